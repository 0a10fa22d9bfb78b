"""An emulated device whose work somebody else may start: autograd, in a backward pass."""

from typing import Any

from spantrain.devices.emulated import EmulatedDevice


class StartedElsewhereDevice(EmulatedDevice):
    """An emulated device that is told when work begins and when it has ended, and lets its time pass around it."""

    def __init__(self, **settings: Any) -> None:
        """Make an idle device; `settings` as `EmulatedDevice` takes them."""
        super().__init__(**settings)
        self._open: tuple[float, float] | None = None
        """Work between `begin` and `end`: when it really began, and its seconds."""

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
