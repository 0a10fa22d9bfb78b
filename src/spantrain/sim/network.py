"""Links that transfers share, on a virtual clock."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spantrain.sim.clock import VirtualClock

__all__ = ["Network", "Transfer"]


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
        if min(self.size_bytes, self.latency_s, self.occupancy_s) < 0:
            raise ValueError(f"a transfer's bytes and seconds must not be negative, got {self}")


@dataclass(eq=False, slots=True, kw_only=True)
class _Sending:
    left_s: float
    sent: Callable[[], None]


class _Link:
    """Serves its sendings at once, in equal shares, or one after the other."""

    def __init__(self, clock: VirtualClock, *, fair: bool) -> None:
        self._clock = clock
        self._fair = fair
        self._sendings: list[_Sending] = []
        self._since_s = 0.0
        self._version = 0

    def add(self, sending: _Sending) -> None:
        self._advance()
        self._sendings.append(sending)
        self._plan_next()

    def _served(self) -> list[_Sending]:
        return self._sendings if self._fair else self._sendings[:1]

    def _advance(self) -> None:
        served = self._served()
        for sending in served:
            sending.left_s = max(0.0, sending.left_s - (self._clock.now_s - self._since_s) / len(served))
        self._since_s = self._clock.now_s

    def _plan_next(self) -> None:
        self._version += 1
        served = self._served()
        if not served:
            return
        first = min(served, key=lambda sending: sending.left_s)
        version = self._version
        self._clock.at(self._clock.now_s + first.left_s * len(served), lambda: self._end(first, version))

    def _end(self, sending: _Sending, version: int) -> None:
        if version != self._version:
            return  # the shares have changed since
        self._advance()
        self._sendings.remove(sending)
        self._plan_next()
        sending.sent()


class Network:
    """Carries messages: each pair of devices sends one after the other, links are shared by pairs.

    A pair is one connection. On a shared link connections get equal parts of the bandwidth (`fair`), as TCP flows
    through one router do, or are served by turn.
    """

    def __init__(self, clock: VirtualClock, *, fair: bool = True) -> None:
        self._clock = clock
        self._fair = fair
        self._links: dict[str, _Link] = {}
        self._lanes: dict[tuple[str, str], deque[Callable[[], None]]] = {}

    def send(self, source: str, target: str, transfer: Transfer, arrived: Callable[[float, float], None]) -> None:
        """Carry a message; call `arrived(start_s, sent_s)` when it is there: when it left, and had left altogether."""
        lane = self._lanes.setdefault((source, target), deque())
        lane.append(lambda: self._start(lane, transfer, arrived))
        if len(lane) == 1:
            lane[0]()

    def _start(
        self, lane: deque[Callable[[], None]], transfer: Transfer, arrived: Callable[[float, float], None]
    ) -> None:
        start_s = self._clock.now_s

        def sent() -> None:
            sent_s = self._clock.now_s
            self._clock.at(sent_s + transfer.latency_s, lambda: arrived(start_s, sent_s))
            lane.popleft()
            if lane:
                lane[0]()

        if transfer.link not in self._links:
            self._links[transfer.link] = _Link(self._clock, fair=self._fair)
        self._links[transfer.link].add(_Sending(left_s=transfer.occupancy_s, sent=sent))
