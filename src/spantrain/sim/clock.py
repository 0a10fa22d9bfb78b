"""Events in the order of their time."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


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
