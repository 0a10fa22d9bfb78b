"""How long a sample takes over a link: now, and in the calmest step.

A link that several devices share is faster while few of them send, so the best pace of all would make every busy moment
look slow. What is compared with is the slowest moment of the step in which that was fastest.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

_MESSAGES = 5


@dataclass(frozen=True, kw_only=True)
class PaceState:
    """What is kept of a pace; can be written as JSON and taken up again."""

    last_s: tuple[float, ...] = ()
    """Seconds per sample of the last messages."""
    slowest_s: float | None = None
    """The slowest pace of this step so far."""
    calm_s: float | None = None
    """The slowest pace of the calmest step."""


class SamplePace:
    """Seconds per sample, the median of the last messages; each counts without what a message takes whatever it holds.

    >>> pace = SamplePace()
    >>> for seconds in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
    ...     pace.note(4 * seconds, 4)
    >>> pace.begin_step()
    >>> for _ in range(3):
    ...     pace.note(24.0, 4)
    >>> pace.now_s, pace.slowness
    (6.0, 3.0)
    """

    def __init__(self, state: PaceState | None = None, *, messages: int = _MESSAGES, message_s: float = 0.0) -> None:
        """Begin with nothing known, or go on from a saved state.

        The pace is that of so many messages, and each of them takes `message_s` besides its samples.
        """
        state = state or PaceState()
        self._last_s = deque(state.last_s, maxlen=messages)
        self._message_s = message_s
        self._slowest_s = state.slowest_s
        self._calm_s = state.calm_s

    @property
    def state(self) -> PaceState:
        """What is known now."""
        return PaceState(last_s=tuple(self._last_s), slowest_s=self._slowest_s, calm_s=self._calm_s)

    @property
    def now_s(self) -> float | None:
        """The present pace; None until enough messages went."""
        return median(self._last_s) if len(self._last_s) == self._last_s.maxlen else None

    def begin_step(self, *, was_calm: bool = True) -> None:
        """Take in that a step is over, and whether it may tell what is calm.

        What a slow link lets through comes evenly, and what work lets through by fits and starts: the slowest moment of
        a slow step may be faster than that of a calm one.
        """
        if self._slowest_s is not None and was_calm:
            self._calm_s = min(self._slowest_s, self._calm_s or self._slowest_s)
        self._slowest_s = None

    def note(self, seconds: float, samples: int) -> None:
        """Take in how long so many samples took: more than nothing."""
        self._last_s.append(max(seconds - self._message_s, seconds / 2) / samples)
        now_s = self.now_s
        if now_s is not None:
            self._slowest_s = max(now_s, self._slowest_s or 0.0)

    @property
    def slowness(self) -> float:
        """How many times as long as in the slowest moment of a calm step a sample takes; 1 as long as none is known."""
        now_s = self.now_s
        return 1.0 if now_s is None or self._calm_s is None else max(1.0, now_s / self._calm_s)
