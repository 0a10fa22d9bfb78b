"""What devices did in single steps: of some the coordinator asks for it, with the verdict on the step.

Once a second at most, so that it costs a run little on slow links; always the same step of all devices, so that who
waited for whom can be told from it.
"""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from spantrain.core.records import Record
from spantrain.core.trace import DeviceStep, Trace

if TYPE_CHECKING:
    from spantrain.runtime.coordinator.barrier import StepOutcome

_EVERY_S = 1.0


class RecordedStep(Record):
    """One step as all devices have told it."""

    outcome: "StepOutcome"
    trace: Trace
    """On the coordinator's clock."""
    peak_bytes: Mapping[str, int]
    """By device, of those that can tell: the most that its tensors have held at once."""


class StepRecords:
    """Asks for steps, and collects what is told of them; its methods are called in any thread."""

    def __init__(self, on_step: Callable[[RecordedStep], None], *, every_s: float = _EVERY_S) -> None:
        """`on_step` hears of each step that all its devices have told of."""
        self._on_step = on_step
        self._every_s = every_s
        self._lock = Lock()
        self._asked: StepOutcome | None = None
        self._parts: dict[str, DeviceStep] = {}

    def asks_for(self, outcome: "StepOutcome") -> bool:
        """Whether all devices are to tell of a step that has just ended."""
        with self._lock:
            if self._asked is not None and outcome.closed_s - self._asked.closed_s < self._every_s:
                return False
            self._asked, self._parts = outcome, {}
            return True

    def take(self, device: str, told: DeviceStep) -> None:
        """Note what a device tells; of another step than the last that was asked for nothing is kept."""
        with self._lock:
            asked = self._asked
            if asked is None or told.step != asked.step:
                return
            self._parts[device] = told
            if self._parts.keys() != asked.busy_s.keys():
                return
            parts = dict(self._parts)
        self._on_step(recorded(asked, parts))


def recorded(outcome: "StepOutcome", parts: Mapping[str, DeviceStep]) -> RecordedStep:
    """Put together what devices tell of a step."""
    return RecordedStep(
        outcome=outcome,
        trace=Trace.joined([part.trace(device) for device, part in sorted(parts.items())], "wall"),
        peak_bytes={device: part.peak_bytes for device, part in parts.items() if part.peak_bytes is not None},
    )
