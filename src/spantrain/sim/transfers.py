"""What simulated links carry, and the clock that says when: events in the order of their time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

_MIN_S = 1e-12

Arrived = Callable[[float, float], None]
"""Takes when a message left, and when its last byte had left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """What it takes to bring a message from one device to another."""

    size_bytes: int
    latency_s: float
    occupancy_s: float
    """How long its links are busy with it when nothing else uses them."""
    links: tuple[str, ...]
    """What it shares with others, each one direction of a link or of a host's port; the way between places first."""
    usage: tuple[float, ...] = ()
    """The part of each link that the message takes when it goes at full speed; empty: all of each."""
    uses: tuple[tuple[str, float], ...] = field(init=False, repr=False, compare=False)
    """Each link with that part."""
    bandwidth_bytes_per_s: float = field(init=False, repr=False, compare=False)
    """At full speed; what has no work counts as very fast."""

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.latency_s < 0 or self.occupancy_s < 0:
            raise ValueError(f"a transfer's bytes and seconds must not be negative, got {self}")
        if not self.links or (self.usage and len(self.usage) != len(self.links)):
            raise ValueError(f"a transfer needs a link, and a part of each link or none, got {self}")
        if any(not 0 < part <= 1 for part in self.usage):
            raise ValueError(f"a transfer takes more than nothing and at most all of a link, got {self}")
        uses = tuple(zip(self.links, self.usage or (1.0,) * len(self.links), strict=True))
        object.__setattr__(self, "uses", uses)
        bandwidth = max(self.size_bytes, 1) / max(self.occupancy_s, _MIN_S)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)


WITHIN_DEVICE = TransferCost(size_bytes=0, latency_s=0.0, occupancy_s=0.0, links=("within a device",))
"""What a device's next stage takes from it: nothing is sent."""


class Sending:
    """A message that is on its links, or waits for those before it on its connection."""

    __slots__ = ("arrived", "arrives", "end_s", "lane", "left_s", "part", "since_s", "start_s", "transfer", "version")

    def __init__(self, transfer: TransferCost, arrived: Arrived, lane: "deque[Sending]") -> None:
        self.transfer = transfer
        self.arrived = arrived
        self.lane = lane
        """What its sender has still to send to its receiver."""
        self.left_s = transfer.occupancy_s
        """Seconds of its work that are left, at full speed."""
        self.start_s = 0.0
        self.end_s: float | None = None
        """When its last byte has left."""
        self.part = -1.0
        """The part of its full speed that it has; negative: it has not been found yet."""
        self.since_s = 0.0
        """Up to when work has been taken off `left_s`."""
        self.version = 0
        """Counts changes of its speed; what was planned before a change is void."""
        self.arrives = 0
        """After which change it was planned when it is there."""

    def arrive(self, version: int) -> None:
        """Be there, unless the plan for it has changed."""
        if version == self.version:
            assert self.end_s is not None
            self.arrived(self.start_s, self.end_s)


class VirtualClock:
    """Calls what is due, in time; what is due at once is called in the order in which it was asked for.

    What is asked for as `last` is called after all else that is due at once: a device that becomes idle decides with
    knowledge of what arrives at that moment, as the runtime does.

    >>> clock, seen = VirtualClock(), []
    >>> clock.at(2.0, seen.append, "later"); clock.at(1.0, seen.append, "soon")
    >>> clock.run(); seen, clock.now_s
    (['soon', 'later'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._tickets = count()
        self._due: list[tuple[float, bool, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any, last: bool = False) -> None:
        """Call something at a time, which is not in the past."""
        assert time_s >= self.now_s, f"{time_s} s is before {self.now_s} s"
        heappush(self._due, (time_s, last, next(self._tickets), call, arguments))

    def run(self) -> None:
        """Go on until nothing is due."""
        due = self._due
        while due:
            self.now_s, _, _, call, arguments = heappop(due)
            call(*arguments)

    def back_to(self, time_s: float) -> None:
        """Go back to a time after the last thing that mattered: what came since was asked for and not needed."""
        assert not self._due, "nothing may be due"
        self.now_s = min(self.now_s, time_s)
