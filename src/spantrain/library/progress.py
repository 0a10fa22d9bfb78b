"""Lines on standard error, and calls of callbacks: what a use case reports, as a library's user hears it."""

import sys
from collections.abc import Callable, Sequence

from spantrain.core.plan import Plan
from spantrain.library.callbacks import Callback, StepReport
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.runtime.coordinator.barrier import StepOutcome


class Progress:
    """A reporter that says little, and tells callbacks."""

    def __init__(self, callbacks: Sequence[Callback], *, every: int, stop: Callable[[], object]) -> None:
        """Print a line every so many steps (0: none); call `stop` when a callback wants that."""
        self._callbacks = tuple(callbacks)
        self._every = every
        self._stop = stop
        self._global_batch = 0

    def phase(self, text: str) -> None:
        """Print it."""
        self._say(text)

    def progress(self, done: int, total: int, text: str) -> None:
        """Say nothing: it is soon over."""

    def note(self, text: str) -> None:
        """Print it."""
        self._say(text)

    def show_plan(self, outcome: PlanOutcome) -> None:
        """Print who does what, a stage a line."""
        for index, stage in enumerate(outcome.plan.stages):
            self._say(f"  stage {index}: units {stage.first_unit}-{stage.end_unit - 1} on {', '.join(stage.devices)}")

    def run_begins(self, plan: Plan) -> None:
        """Tell callbacks."""
        self._global_batch = plan.global_batch
        for callback in self._callbacks:
            callback.on_train_begin()

    def step(self, outcome: StepOutcome, total_steps: int) -> None:
        """Print a line now and then; tell callbacks, and end if one wants that."""
        assert outcome.loss is not None, "steps are reported with their loss"
        report = StepReport(
            step=outcome.step + 1,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            step_s=outcome.duration_s,
            samples_per_s=self._global_batch / outcome.duration_s,
            heldout_loss=outcome.evaluation_loss,
            skipped=outcome.skipped,
        )
        if self._every and (report.step % self._every == 0 or report.step == total_steps):
            held_out = "" if report.heldout_loss is None else f"  held-out loss {report.heldout_loss:.4f}"
            skipped = "  (skipped: gradients overflowed)" if report.skipped else ""
            self._say(
                f"  step {report.step}  loss {report.loss:.4f}  |grad| {report.grad_norm:.2f}"
                f"  {report.samples_per_s:.1f} samples/s{held_out}{skipped}"
            )
        answers = [callback.on_step(report) for callback in self._callbacks]
        if any(answers):
            self._stop()

    def saved(self, folder: str) -> None:
        """Tell callbacks."""
        for callback in self._callbacks:
            callback.on_save(folder)

    def ended(self, losses: tuple[float, ...]) -> None:
        """Tell callbacks."""
        for callback in self._callbacks:
            callback.on_end(losses)

    def _say(self, text: str) -> None:
        if self._every:
            sys.stderr.write(f"{text}\n")
