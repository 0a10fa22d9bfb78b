"""Whether something comes later than its own last intervals let expect: a version, by steps or by seconds."""

import math
from collections import deque

_LATE = 3
_INTERVALS = 4


class Overdue:
    """Knows when something came last, and how long it usually takes.

    >>> version = Overdue(least=64)
    >>> version.says(180), version.says(200), version.says(300), version.says(400)
    (False, True, False, True)
    >>> version.came(410), version.usual, version.is_late(900)
    (410, 192, False)
    """

    def __init__(self, *, least: float, known: bool = True, at: float = 0) -> None:
        """`least`: no interval counts as shorter; `known`: whether the first one will be as long; `at`: its begin."""
        self._least, self._first = least, least if known else math.inf
        self._last: float = at
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._said: float | None = None
        """After how long it was last said that it is late."""

    @property
    def usual(self) -> float:
        """The longest of the last intervals, one that was late cut short; infinite where there is nothing to go by."""
        return max(self._least, max(self._intervals, default=self._first))

    @property
    def last(self) -> float:
        """Where it came last."""
        return self._last

    def is_late(self, at: float, *, since: float = -math.inf) -> bool:
        """Whether it should have come long ago; `since`: from where on it could come."""
        return at - max(since, self._last) > _LATE * self.usual

    def says(self, at: float) -> bool:
        """Whether to say now that it is late: once, and then whenever twice as much has passed."""
        passed = at - self._last
        if not self.is_late(at) or (self._said is not None and passed < 2 * self._said):
            return False
        self._said = passed
        return True

    def came(self, at: float) -> float | None:
        """Note that it came; return how long that took, if it was said to be late."""
        passed, said = at - self._last, self._said is not None
        self._intervals.append(min(passed, _LATE * self.usual))
        self._last, self._said = at, None
        return passed if said else None
