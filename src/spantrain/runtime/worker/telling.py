"""Tells the coordinator what this device did in a step, beside its further work."""

import contextlib
from threading import Thread

from spantrain.core.trace import DeviceStep
from spantrain.errors import SpanTrainError
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.control.requests import TellStep
from spantrain.runtime.recorder import StepRecorder


class StepTeller:
    """One step at a time: while one is on its way, others are left out."""

    def __init__(self, control: ControlPlane, recorder: StepRecorder) -> None:
        self._control, self._recorder = control, recorder
        self._thread: Thread | None = None

    def tell(self, step: int, peak_bytes: int | None) -> None:
        """Send what was done in it; nothing waits for that, and nothing comes of its getting lost."""
        if self._thread is None or not self._thread.is_alive():
            told = self._recorder.record(step, peak_bytes)
            self._thread = Thread(target=self._ask, args=(told,), name="step record", daemon=True)
            self._thread.start()

    def unfinished(self) -> DeviceStep | None:
        """Return what was done in the step that is under way, if anything."""
        step = self._recorder.step_under_way
        return None if step is None else self._recorder.record(step)

    def _ask(self, told: DeviceStep) -> None:
        with contextlib.suppress(SpanTrainError):
            self._control.ask(TellStep(told=told))
