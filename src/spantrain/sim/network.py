"""Links that transfers share, on a virtual clock."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spantrain.sim.clock import VirtualClock
from spantrain.sim.speed import SpeedTrace

__all__ = ["Network", "Transfer"]

_NO_TRACES: Mapping[str, SpeedTrace] = MappingProxyType({})

Arrived = Callable[[float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What it takes to bring a message from one device to another."""

    size_bytes: int
    latency_s: float
    occupancy_s: float
    """How long the link is busy with it when nothing else uses the link."""
    link: str
    """What it shares with others: one direction of one link."""

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.latency_s < 0 or self.occupancy_s < 0:
            raise ValueError(f"a transfer's bytes and seconds must not be negative, got {self}")


class _Sending:
    """A message on its link."""

    __slots__ = ("arrived", "lane", "latency_s", "left_s", "start_s")

    def __init__(self, lane: "_Lane", transfer: Transfer, arrived: Arrived) -> None:
        self.lane = lane
        self.left_s = transfer.occupancy_s
        self.latency_s = transfer.latency_s
        self.arrived = arrived
        self.start_s = 0.0


_Lane = deque[tuple["_Link", _Sending]]
"""What one device has still to send another; the first one is on its link."""


def _left_s(sending: _Sending) -> float:
    return sending.left_s


class _Link:
    """Serves its sendings at once, in equal shares, or one after the other."""

    def __init__(self, clock: VirtualClock, *, fair: bool, speed: SpeedTrace | None) -> None:
        self._clock = clock
        self._fair = fair
        self._speed = speed
        self._sendings: list[_Sending] = []
        self._since_s = 0.0
        self._version = 0

    def add(self, sending: _Sending) -> None:
        sending.start_s = self._clock.now_s
        if self._sendings:
            self._advance()
        else:
            self._since_s = sending.start_s
        self._sendings.append(sending)
        self._plan_next()

    def _served(self) -> list[_Sending]:
        return self._sendings if self._fair else self._sendings[:1]

    def _advance(self) -> None:
        """Take what has been done since the last change off what is served."""
        now_s = self._clock.now_s
        if now_s > self._since_s:
            served = self._served()
            done_s = now_s - self._since_s if self._speed is None else self._speed.work_s(self._since_s, now_s)
            for sending in served:
                sending.left_s = max(0.0, sending.left_s - done_s / len(served))
            self._since_s = now_s

    def _plan_next(self) -> None:
        """Ask to be called when the next one of what is served will be through."""
        self._version += 1
        if len(self._sendings) == 1 or not self._fair:
            first = self._sendings[0]
            work_s = first.left_s
        else:
            first = min(self._sendings, key=_left_s)
            work_s = first.left_s * len(self._sendings)
        now_s = self._clock.now_s
        end_s = now_s + work_s if self._speed is None else self._speed.end_s(now_s, work_s)
        self._clock.at(end_s, self._end, first, self._version)

    def _end(self, sending: _Sending, version: int) -> None:
        if version != self._version:
            return  # the shares have changed since
        if len(self._sendings) == 1:
            self._sendings.clear()
        else:
            self._advance()
            self._sendings.remove(sending)
            self._plan_next()
        sent_s = self._clock.now_s
        self._clock.at(sent_s + sending.latency_s, sending.arrived, sending.start_s, sent_s)
        sending.lane.popleft()
        if sending.lane:
            link, following = sending.lane[0]
            link.add(following)


class Network:
    """Carries messages: each pair of devices sends one after the other, links are shared by pairs.

    A pair is one connection. On a shared link connections get equal parts of the bandwidth (`fair`), as TCP flows
    through one router do, or are served by turn. `speeds` says of some links how their bandwidth changes over time.
    """

    def __init__(
        self, clock: VirtualClock, *, fair: bool = True, speeds: Mapping[str, SpeedTrace] = _NO_TRACES
    ) -> None:
        self._clock = clock
        self._fair = fair
        self._speeds = speeds
        self._links: dict[str, _Link] = {}
        self._lanes: dict[tuple[str, str], _Lane] = {}

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that have carried anything."""
        return tuple(self._links)

    def send(self, source: str, target: str, transfer: Transfer, arrived: Arrived) -> None:
        """Carry a message; call `arrived(start_s, sent_s)` when it is there: when it left, and had left altogether."""
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = deque()
        link = self._links.get(transfer.link)
        if link is None:
            speed = self._speeds.get(transfer.link)
            link = self._links[transfer.link] = _Link(self._clock, fair=self._fair, speed=speed)
        sending = _Sending(lane, transfer, arrived)
        lane.append((link, sending))
        if len(lane) == 1:
            link.add(sending)
