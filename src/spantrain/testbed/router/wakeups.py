"""Wake at an instant, not some time after it: sleep until a little before, then look until it has come.

A sleeping process is woken late, by 20 to 100 microseconds and more where the processor had gone to sleep as well;
a packet would cross two such delays on each way. How late wake-ups are is learned from those that happened.
"""

import select
import time
from collections.abc import Sequence

_FIRST_S, _LONGEST_S = 60e-6, 200e-6
_STEP_S = 2e-6
_PART = 0.9


class Lead:
    """How long before an instant to ask for the wake-up: what nine of ten wake-ups are late by, at most 0.2 ms."""

    def __init__(self) -> None:
        self.seconds = _FIRST_S

    def learn(self, late_s: float) -> None:
        """Take note of a wake-up that came so long after the time asked for.

        Steps up and down in the ratio of 9 to 1 rest where one wake-up in ten is later, however late that one is.
        """
        step_s = _PART * _STEP_S if late_s > self.seconds else (_PART - 1) * _STEP_S
        self.seconds = min(max(0.0, self.seconds + step_s), _LONGEST_S)


def wait_until(due_s: float, fds: Sequence[int], lead: Lead) -> list[int]:
    """Return the files that can be read, at once if there are some, else at `due_s` on the monotonic clock."""
    asked_s = due_s - lead.seconds
    sleep_s = asked_s - time.monotonic()
    if sleep_s > 0:
        ready, _, _ = select.select(fds, (), (), sleep_s)
        if ready:
            return ready
        lead.learn(time.monotonic() - asked_s)
    while True:
        ready, _, _ = select.select(fds, (), (), 0)
        if ready or time.monotonic() >= due_s:
            return ready
