"""How many bytes may be on their way to a peer: what the link takes while the quickest answer comes, and a little more.

More would only wait in queues before the link. There it delays all that comes later, the word of what has come
included, and what finds a queue full is lost. The rate is the largest that was seen of late, of each message from the
word before it left to the word that it has come; as in Cardwell et al., "BBR: congestion-based congestion control",
2016, which this is a plain form of, for whole messages and above TCP.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

__all__ = ["Mark", "Pace"]

_FIRST_BYTES = 64 * 1024
"""Before anything is known: a message or two on a slow link, and soon enough known on a fast one."""
_SLACK_S = 0.2
"""Over the quickest answer: room for answers that come late, and to find out that there is more."""
_OF_LATE_S = 3.0


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known when a message left."""

    done_bytes: int
    since_s: float


class Pace:
    """Learns from what leaves and what is answered. Times are of any one clock.

    >>> pace = Pace()
    >>> mark = pace.left(0.0, alone=True)
    >>> pace.room_bytes
    65536
    >>> pace.came(0.5, 50_000, left_s=0.0, mark=mark)
    >>> pace.room_bytes
    70000
    """

    def __init__(self) -> None:
        self._done_bytes = 0
        self._heard_s = 0.0
        self._answer_s = inf
        self._rates: deque[tuple[float, float]] = deque()
        """Of late: when, and bytes per second; falling, so that the first is the largest."""

    @property
    def room_bytes(self) -> int:
        """What may be on its way."""
        if not self._rates:
            return _FIRST_BYTES
        return int(self._rates[0][1] * (self._answer_s + _SLACK_S))

    def left(self, now_s: float, *, alone: bool) -> Mark:
        """Note that a message leaves, with nothing else on its way or with some; return what to keep with it."""
        return Mark(self._done_bytes, now_s if alone else self._heard_s)

    def came(self, now_s: float, size_bytes: int, *, left_s: float, mark: Mark) -> None:
        """Note the word that a message has come."""
        self._done_bytes += size_bytes
        self._heard_s = now_s
        self._answer_s = min(self._answer_s, now_s - left_s)
        if now_s > mark.since_s:
            self._learn(now_s, (self._done_bytes - mark.done_bytes) / (now_s - mark.since_s))

    def _learn(self, now_s: float, rate: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        while self._rates[0][0] < now_s - _OF_LATE_S:
            self._rates.popleft()
