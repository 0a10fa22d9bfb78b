"""Devices that run other frameworks' work: an emulated one whose work autograd may start, and a real processor."""

import time
from collections.abc import Callable
from typing import Any

from spantrain.devices.base import NOTHING_MORE, ComputeDevice, CpuDevice, EmulatedTime, T
from spantrain.devices.emulated import EmulatedDevice
from spantrain.errors import ConfigError


class StartedElsewhereDevice(EmulatedDevice):
    """An emulated device that is told when work begins and when it has ended, and lets its time pass around it."""

    def __init__(self, **settings: Any) -> None:
        """Make an idle device; `settings` as `EmulatedDevice` takes them."""
        super().__init__(**settings)
        self._open: tuple[float, float] | None = None
        """Work between `begin` and `end`: when it really began, and its seconds."""

    @property
    def busy_s(self) -> float:
        """Seconds of device time so far."""
        return self.emulated_s

    def around(self, work: Callable[[], T]) -> T:
        """Do work whose parts are begun and ended, or run, one by one: they are what is counted."""
        return work()

    def begin(self, seconds: float, *, ahead_s: float = 0.0) -> None:
        """Let work of so many seconds begin that somebody else starts, and ends with `end`; return when it may compute.

        What is computed here becomes known to others at once. So the wait comes first, and the real computation as
        near to the end as it can: `ahead_s` before it, which is what it is thought to take.
        """
        now_s = self._clock.now_s()
        self._deadline_s = self._start(now_s) + seconds
        self._clock.wait_until(self._deadline_s - ahead_s)
        self._open = (self._clock.now_s(), seconds)

    def end(self) -> float | None:
        """Wait for the rest of the time of what `begin` let begin; return its real seconds, None if there is none."""
        if self._open is None:
            return None
        began_s, seconds = self._open
        self._open = None
        real_s = self._clock.now_s() - began_s
        self._count(real_s, seconds)
        self._clock.wait_until(self._deadline_s)
        self._ended_s = self._clock.now_s()
        self.last_s = seconds
        return real_s


class CountingProcessor(CpuDevice):
    """The processor of the machine, which adds up how long it computes."""

    real_s = None
    """What of an emulated device's time is real; here all is."""

    def __init__(self) -> None:
        """Make an idle device."""
        super().__init__()
        self.busy_s = 0.0
        """Seconds of computation so far."""

    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:
        """Do the work and return its result."""
        result = super().run(work, seconds, besides)
        self.busy_s += self.last_s
        return result

    def around(self, work: Callable[[], T]) -> T:
        """Do work that waits for others in between: what counts is the processor's time in this thread."""
        began_s = time.thread_time()
        result = work()
        self.busy_s += time.thread_time() - began_s
        return result


FrameworkDevice = StartedElsewhereDevice | CountingProcessor


def framework_device(device: ComputeDevice, name: str) -> FrameworkDevice:
    """Return what runs other frameworks' work where a worker computes with `device`.

    Raises:
        ConfigError: it is neither emulated nor a processor.
    """
    if isinstance(device, EmulatedDevice):
        return StartedElsewhereDevice()
    if isinstance(device, CpuDevice):
        return CountingProcessor()
    raise ConfigError(f"device {name}: other frameworks are compared on processors (backend: cpu) and emulated devices")
