"""What workers ask of the training run that is under way: to end a step, to note a checkpoint, for given batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spantrain.config.artefacts import from_json, to_json
from spantrain.runtime.barrier import StepBarrier
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.given import BatchDesk
from spantrain.runtime.orders import OuterCall, StepReport
from spantrain.runtime.outer_meetings import StageMeetings
from spantrain.transport.control.protocol import RemoteRefusal

__all__ = ["TrainingRun"]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The coordinator's side of one run; its methods are called by workers, each in a thread of its own."""

    barrier: StepBarrier
    on_saved: Callable[[SavedFile], Sequence[int]]
    """Hears of every device's part of a checkpoint; returns the steps whose checkpoints are not kept any longer."""
    batches: BatchDesk | None = None
    """There is one if a user's loop gives the batches."""
    meetings: StageMeetings | None = None
    """There is a place for them if the run takes part in an outer optimizer."""

    def commit_step(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Take a device's report of a step, and return what the barrier says of it once all have come."""
        answer = to_json(self.barrier.report(name, from_json(StepReport, payload, f"report of {name}")))
        assert isinstance(answer, dict)
        return answer

    def note_saved(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Note a device's part of a checkpoint; return the steps whose files it may delete."""
        return {"dropped": list(self.on_saved(from_json(SavedFile, payload, f"checkpoint of {name}")))}

    def meet_stages(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Take what a device says of the outer optimizer outside of steps; return what all said.

        Raises:
            RemoteRefusal: this run takes part in none.
        """
        if self.meetings is None:
            raise RemoteRefusal("this run takes part in no outer optimizer")
        call = from_json(OuterCall, payload, f"outer report of {name}")
        answer = to_json(self.meetings.meet(name, call.number, call.report))
        assert isinstance(answer, dict)
        return answer

    def abort(self, reason: str) -> None:
        """Let all go that wait for others."""
        self.barrier.abort(reason)
        if self.meetings is not None:
            self.meetings.abort(reason)

    def answer_given(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answer what a device asks of the batches that a user's loop gives.

        Raises:
            RemoteRefusal: this run reads its own data.
        """
        if self.batches is None:
            raise RemoteRefusal("no run on given batches is under way")
        return self.batches.answer(payload)
