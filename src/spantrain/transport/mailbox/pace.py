"""How many bytes may be on their way to a peer: what the link takes while the quickest answer comes, and a little more.

More would only wait in queues before the link. There it delays all that comes later, the word of what has come
included, and what finds a queue full is lost. The rate is the largest that was seen of late, of each message from the
word before it left to the word that it has come; as in Cardwell et al., "BBR: congestion-based congestion control",
2016, which this is a plain form of, for whole messages and above TCP. The quickest answer too is of late only: ways
change. It is looked for among those that hardly waited in our own queue, else what waits would be taken for the way's
length and ever more would wait; where a link is never idle, next to nothing is sent now and then until one has come.
"""

from collections import deque
from dataclasses import dataclass

_FIRST_BYTES = 64 * 1024
"""Before anything is known: a message or two on a slow link, and soon enough known on a fast one."""
_SLACK_S = 0.2
"""Over the quickest answer: room for answers that come late, and to find out that there is more."""
_OF_LATE_S = 3.0
_OF_LATE_ANSWERS = 2.0
"""A rate is of late for so many seconds, and for so many answers: nothing is learnt while one is awaited."""
_ANSWER_OF_LATE_S = 20.0
_DRAINED_EVERY_S = 10.0
_DRAINED_EVERY_ANSWERS = 30.0
"""So often, in seconds or answers, one is wanted that did not wait behind more than one other message."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known when a message left."""

    done_bytes: int
    since_s: float
    drained: bool
    """Whether at most one other message was on its way."""


class Pace:
    """Learns from what leaves and what is answered. Times are of any one clock.

    >>> pace = Pace()
    >>> mark = pace.left(0.0, others=0)
    >>> pace.room_bytes
    65536
    >>> pace.came(0.5, 50_000, left_s=0.0, mark=mark)
    >>> pace.room_bytes
    70000
    """

    def __init__(self) -> None:
        self._done_bytes = 0
        self._heard_s = 0.0
        self._rates: deque[tuple[float, float]] = deque()
        """Of late: when, and bytes per second; falling, so that the first is the largest."""
        self._answers: deque[tuple[float, float]] = deque()
        """Of late: when, and seconds to an answer that hardly waited; rising, so that the first is the quickest."""

    @property
    def room_bytes(self) -> int:
        """What may be on its way; 0 while the link is to run empty for an answer that did not wait."""
        if not self._rates:
            return _FIRST_BYTES
        answer_s = self._answers[0][1]
        if self._heard_s - self._answers[-1][0] > max(_DRAINED_EVERY_S, _DRAINED_EVERY_ANSWERS * answer_s):
            return 0
        return int(self._rates[0][1] * (answer_s + _SLACK_S))

    def left(self, now_s: float, *, others: int) -> Mark:
        """Note that a message leaves, with so many others on their way; return what to keep with it."""
        return Mark(self._done_bytes, now_s if others == 0 else self._heard_s, others <= 1)

    def came(self, now_s: float, size_bytes: int, *, left_s: float, mark: Mark) -> None:
        """Note the word that a message has come."""
        self._done_bytes += size_bytes
        self._heard_s = now_s
        if mark.drained or not self._answers:
            self._learn_answer(now_s, now_s - left_s)
        if now_s > mark.since_s:
            self._learn_rate(now_s, (self._done_bytes - mark.done_bytes) / (now_s - mark.since_s))

    def _learn_answer(self, now_s: float, answer_s: float) -> None:
        while self._answers and self._answers[-1][1] >= answer_s:
            self._answers.pop()
        self._answers.append((now_s, answer_s))
        while self._answers[0][0] < now_s - _ANSWER_OF_LATE_S:
            self._answers.popleft()

    def _learn_rate(self, now_s: float, rate: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        while self._rates[0][0] < now_s - max(_OF_LATE_S, _OF_LATE_ANSWERS * self._answers[0][1]):
            self._rates.popleft()
