"""What workers ask of the training run that is under way: to end a step, to note a checkpoint, for given batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.coordinator.batches import BatchQueue
from spantrain.runtime.outer.meetings import StageMeetings
from spantrain.runtime.worker.worker_protocol import DeviceReport, OuterCall
from spantrain.transport.control.protocol import RemoteRefusal


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The coordinator's side of one run; its methods are called by workers, each in a thread of its own."""

    barrier: StepBarrier
    on_saved: Callable[[SavedFile], Sequence[int]]
    """Hears of every device's part of a checkpoint; returns the steps whose checkpoints are not kept any longer."""
    batches: BatchQueue | None = None
    """There is one if a user's loop gives the batches."""
    meetings: StageMeetings | None = None
    """There is a place for them if the run takes part in an outer optimizer."""

    def commit_step(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Take a device's report of a step, and return what the barrier says of it once all have come.

        Raises:
            RemoteRefusal: it is none that this device may make now.
        """
        return _answer(self.barrier.report(name, from_json(DeviceReport, payload, f"report of {name}")))

    def note_saved(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Note a device's part of a checkpoint; return the steps whose files it may delete.

        Raises:
            RemoteRefusal: it is not this device's own, or of a step that nobody was told to save.
        """
        saved = from_json(SavedFile, payload, f"checkpoint of {name}")
        ordered = self.barrier.wants_checkpoint(saved.step) or (
            self.batches is not None and self.batches.wants_checkpoint(saved.step)
        )
        if not ordered:
            raise RemoteRefusal(f"device {name} was not told to save anything after {saved.step} steps")
        if name not in self.barrier.plan.devices or not saved.is_of(name):
            raise RemoteRefusal(f"device {name} has not written {saved.name}")
        return {"dropped": list(self.on_saved(saved))}

    def meet_stages(self, name: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Take what a device says of the outer optimizer outside of steps; return what all said.

        Raises:
            RemoteRefusal: this run takes part in none, or this device comes at a wrong time.
        """
        if self.meetings is None:
            raise RemoteRefusal("this run takes part in no outer optimizer")
        call = from_json(OuterCall, payload, f"outer report of {name}")
        return _answer(self.meetings.meet(name, call.number, call.report))

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


def _answer(value: object | None) -> dict[str, Any]:
    """Return what a worker is told; None: that it shall ask again."""
    answer = {"again": True} if value is None else to_json(value)
    assert isinstance(answer, dict)
    return answer
