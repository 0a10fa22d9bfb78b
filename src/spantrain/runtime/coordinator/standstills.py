"""Has the devices of a run that stands still asked whom they cannot reach (`recovery.standstill` decides)."""

import threading
import time
from collections.abc import Callable

from spantrain.recovery.standstill import Standstill
from spantrain.runtime.control.requests import Reach
from spantrain.runtime.coordinator.barrier import StepBarrier


class StandstillWatch:
    """Over one training run; `look` and `said` are the one thread's, `answer` any thread's."""

    def __init__(
        self, barrier: StepBarrier, limit_s: float, tell: Callable[[str], None], *, own_loop: bool = False
    ) -> None:
        """`limit_s` as of `Standstill`; `tell`: people; `own_loop`: a user's loop gives batches when it likes."""
        self._barrier, self._tell, self._own_loop = barrier, tell, own_loop
        self._lock = threading.Lock()
        self._step = barrier.committed.step
        self._decides = Standstill(barrier.plan.devices, time.monotonic(), limit_s)

    @property
    def round(self) -> int:
        """The number of the question that devices are to answer; 0: none."""
        return self._decides.round

    def look(self) -> tuple[bool, dict[str, str]]:
        """Return whether devices are to be asked now, and who is to be given up, and why."""
        now_s, step = time.monotonic(), self._barrier.committed.step
        with self._lock:
            if step != self._step:
                self._step = step
                self._decides.on_step(now_s)
            said = self._decides.said(now_s, step, () if self._own_loop else self._barrier.awaited)
            found = self._decides.asks(now_s), self._decides.lost(now_s)
        if said:
            self._tell(said)
        return found

    def answer(self, device: str, said: Reach) -> None:
        """Take what a device says."""
        with self._lock:
            self._decides.on_answer(time.monotonic(), device, said.number, said.unreached)
