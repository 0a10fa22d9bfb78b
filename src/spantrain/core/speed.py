"""How fast devices and links are over time, as a trace says; and what a device knows of its links by its own clock."""

import math
from bisect import bisect_right
from enum import StrEnum
from typing import Annotated

from spantrain.core.records import Bounds, NotNegative, Record
from spantrain.errors import UsageError

_SLOWEST = 1e-6
"""Smallest speed that is no pause."""


class SpeedTrace(Record):
    """How fast something is over time, as a part of its normal speed: 1 up to the first change.

    What is at work when the speed changes goes on at the new speed. A speed of 0 is a pause; the last speed must be
    more than that, or what waits would never end.

    Raises:
        UsageError: times do not rise, or a speed is negative, tiny or not a number, or the last one is 0.

    >>> halved = SpeedTrace(changes=((2.0, 0.5),))
    >>> halved.end_s(1.0, 2.0), halved.work_s(1.0, 4.0)
    (4.0, 2.0)
    """

    changes: tuple[tuple[float, float], ...]
    """Each: seconds since the first step's begin, and the speed from then on."""

    def __post_init__(self) -> None:
        if not self.changes:
            raise UsageError("a speed trace needs at least one change: (seconds, part of the normal speed)")
        before_s = -math.inf
        for number, (time_s, speed) in enumerate(self.changes):
            if not math.isfinite(time_s) or time_s <= before_s:
                raise UsageError(f"speed trace, change {number}: its time {time_s} s must be after {before_s} s")
            if speed and not _SLOWEST <= speed < math.inf:
                raise UsageError(
                    f"speed trace, change {number}: its speed must be 0, or {_SLOWEST:g} or more, got {speed}"
                )
            before_s = time_s
        if self.changes[-1][1] == 0:
            raise UsageError(f"speed trace: its last speed is 0 from {before_s} s on, so nothing would ever end")

    def speed_at(self, time_s: float) -> float:
        """Return the speed at a time."""
        return self._speed(self._after(time_s))

    def next_change_s(self, time_s: float) -> float | None:
        """Return when the speed changes next after a time; None if it does not."""
        following = self._after(time_s)
        return self.changes[following][0] if following < len(self.changes) else None

    def end_s(self, start_s: float, work_s: float) -> float:
        """Return when work that takes `work_s` at normal speed ends."""
        now_s, left_s = start_s, work_s
        following = self._after(start_s)
        while following < len(self.changes):
            change_s, speed = self.changes[following][0], self._speed(following)
            if left_s <= (change_s - now_s) * speed and (speed > 0 or left_s == 0):
                break
            left_s -= (change_s - now_s) * speed
            now_s, following = change_s, following + 1
        return now_s if left_s == 0 else now_s + left_s / self._speed(following)

    def work_s(self, start_s: float, end_s: float) -> float:
        """Return how much work, in seconds at normal speed, is done between two times."""
        done_s, now_s = 0.0, start_s
        for following in range(self._after(start_s), len(self.changes) + 1):
            at_end = following == len(self.changes) or self.changes[following][0] >= end_s
            until_s = end_s if at_end else self.changes[following][0]
            done_s += (until_s - now_s) * self._speed(following)
            now_s = until_s
            if at_end:
                break
        return done_s

    def _after(self, time_s: float) -> int:
        """Return the index of the first change after a time."""
        return bisect_right(self.changes, time_s, key=lambda change: change[0])

    def _speed(self, following: int) -> float:
        """Return the speed before the change of this index."""
        return self.changes[following - 1][1] if following else 1.0


class LinkVerdict(StrEnum):
    """What holds a link up, if anything does."""

    CALM = "calm"
    """It carries what is expected of it."""
    SLOW_LINK = "slow-link"
    """What is on the wire takes longer than it should."""
    SLOW_PEER = "slow-peer"
    """The peer leaves no room: messages wait though nothing of ours is on the wire."""
    IDLE = "idle"
    """Nothing large enough to tell anything was sent of late."""


class LinkReport(Record, where="link to {0.peer}"):
    """One direction of one link, as its sender sees it."""

    peer: str
    verdict: LinkVerdict
    bytes_per_s: Annotated[float | None, Bounds(over=0)]
    """Achieved while the link was busy; None where no message was large enough to tell."""
    latency_s: Annotated[float | None, Bounds(low=0)]
    """Shortest time from a small message's start to the peer's word that it has it: there and back; None: not known."""
    queued_s: NotNegative
    """The longest that a message of late waited before its first byte left."""
    busy_s: NotNegative
    """For how long the link was busy with these messages."""
    messages: Annotated[int, Bounds(low=0)]
    """Messages that the rate was found from."""
    confidence: Annotated[float, Bounds(low=0, high=1)]
    """0 to 1: how far the messages agree on the rate, and whether they are enough."""
    newest_bytes_per_s: Annotated[float | None, Bounds(over=0)] = None
    """The rate of the newest quarter of them; None where there are too few."""


class SentMessage(Record):
    """One message's way out, on the sender's clock."""

    peer: str
    size_bytes: int
    queued_s: float
    """When it was given to the mailbox."""
    started_s: float
    """When its first byte left."""
    acknowledged_s: float
    """When the peer's word came that it has all of it."""

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or not self.queued_s <= self.started_s <= self.acknowledged_s:
            raise ValueError(f"a message is queued, then started, then acknowledged, with 0 bytes or more; got {self}")
