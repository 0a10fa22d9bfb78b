"""An emulated device: real work that takes the time which it would take on a device of some kind."""

import time
from collections.abc import Callable

from spantrain.devices.base import NOTHING_MORE, ComputeDevice, EmulatedTime, T

_LOOK_S = 0.05
"""How long a wait goes on before it is looked whether it is still needed."""
_GAP_S = 1e-3
"""Work counts as queued if it comes at most this long after the end of the work before."""
_CARRY_S = 20e-3
"""How far in the past a start may lie."""
_SPIN_S = 150e-6
"""How long before the deadline sleep ends: about what the system's timers overshoot by."""


class PreciseClock:
    """The wall clock, waited for precisely: asleep until shortly before the deadline, then looking at the clock."""

    def now_s(self) -> float:
        """Return the system's monotonic time."""
        return time.monotonic()

    def wait_until(self, deadline_s: float) -> None:
        """Return at the deadline, or at once if it has passed; late by tens of microseconds on a free processor."""
        asleep_s = deadline_s - time.monotonic() - _SPIN_S
        if asleep_s > 0:
            time.sleep(asleep_s)
        while time.monotonic() < deadline_s:
            pass


class EmulatedDevice(ComputeDevice):
    """Does the real computation, then waits until the time has passed that it would take on the emulated device.

    The wait goes to an absolute deadline. Work that is started at once after other work, as queued work is, starts at
    that work's deadline and not when this process got round to it, so that errors of waking up do not add up; a
    device that was idle starts at the present. Time lost in one piece of work beyond `_CARRY_S` is not caught up.

        previous deadline   woke up   started       deadline
              |----lag--------|---gap----|              |
              |<------------- seconds ----------------->|
    """

    def __init__(self, clock: PreciseClock | None = None) -> None:
        """Make an idle device, which waits by a clock; the processor really computes."""
        super().__init__()
        self.real_s = 0.0
        """Seconds of real computation."""
        self.emulated_s = 0.0
        """Seconds that it was to take."""
        self._clock = clock or PreciseClock()
        self._deadline_s = float("-inf")
        self._ended_s = float("-inf")

    @property
    def real_compute_ratio(self) -> float:
        """Real seconds over emulated ones: under a tenth, or the emulation feels the machine below it."""
        return self.real_s / self.emulated_s if self.emulated_s > 0 else 0.0

    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:
        """Do the work and return its result `seconds` after its start (None: at once when done, and not counted).

        What `more_s` says comes on top: time that was real, such as the network's, and not computation. The real
        computation is done at once, but what it gives is known to others at its milestones only.
        """
        called_s = self._clock.now_s()
        start_s = self._start(called_s)
        result = work()
        done_s = self._clock.now_s()
        if seconds is None:
            self._deadline_s = done_s
        else:
            added_s = besides.more_s()
            self._deadline_s = start_s + seconds + added_s
            self._count(max(0.0, done_s - called_s - besides.waited_s()), seconds)
            for after_s, call in besides.milestones:
                self._wait_until(start_s + after_s + (added_s * after_s / seconds if seconds else 0.0))
                call()
            self._wait_until(self._deadline_s)
        self._ended_s = self._clock.now_s()
        self.last_s = self._ended_s - start_s
        return result

    def _wait_until(self, deadline_s: float) -> None:
        while (next_s := self._clock.now_s() + _LOOK_S) < deadline_s:
            self._clock.wait_until(next_s)
            self.check_abort()
        self._clock.wait_until(deadline_s)

    def _start(self, now_s: float) -> float:
        queued = now_s - self._ended_s <= _GAP_S
        return max(self._deadline_s, now_s - _CARRY_S) if queued else now_s

    def _count(self, real_s: float, seconds: float) -> None:
        self.real_s += real_s
        self.emulated_s += seconds
        self.overruns += 0.0 < seconds < real_s
