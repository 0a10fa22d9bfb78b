"""What users want to be told while training: lines on standard error, and calls of callbacks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spantrain.app.metrics import EvaluationMetrics, StepMetrics
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.runtime.coordinator.barrier import StepOutcome

__all__ = ["Callback", "StepReport", "checked_callbacks"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step that has ended."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch, before this step's update."""
    grad_norm: float
    """Norm of all parameters' gradients, before clipping."""
    step_s: float
    samples_per_s: float
    heldout_loss: float | None = None
    """With the parameters from before this step, where it was evaluated."""
    skipped: bool = False
    """Under float16: gradients overflowed, so nothing was updated and the loss scale was lowered."""


class Callback:
    """Inherit, and override what is wanted; calls come one after another, in the order of what happens."""

    def on_train_begin(self) -> None:
        """Hear that workers are up and the plan is made."""

    def on_step(self, report: StepReport) -> bool | None:
        """Hear of a step; return True to end training after the next one, with a checkpoint."""

    def on_save(self, folder: str) -> None:
        """Hear that a checkpoint is complete."""

    def on_end(self, losses: tuple[float, ...]) -> None:
        """Hear that training has ended, with the losses of all steps."""


def checked_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Return what is a list of callbacks.

    Raises:
        ConfigError: it is none, or holds something else: a class, a function.
    """
    given: object = callbacks
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"callbacks: got a {type(given).__name__}; wanted a list of spantrain.Callback objects")
    for entry in given:
        if not isinstance(entry, Callback):
            got = f"the class {entry.__name__}" if isinstance(entry, type) else f"a {type(entry).__name__}"
            raise ConfigError(f"callbacks: one is {got}; wanted objects of spantrain.Callback's heirs")
    return tuple(given)


class UserReporter:
    """A reporter that says little, and tells callbacks."""

    def __init__(self, callbacks: Sequence[Callback], *, every: int, stop: Callable[[], object]) -> None:
        """Print a line every so many steps (0: none); call `stop` when a callback wants that."""
        self._callbacks = tuple(callbacks)
        self._every = every
        self._stop = stop

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
        del plan
        for callback in self._callbacks:
            callback.on_train_begin()

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        """Print a line now and then; tell callbacks, and end if one wants that."""
        report = StepReport(
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            step_s=metrics.step_s,
            samples_per_s=metrics.samples_per_s,
            heldout_loss=outcome.evaluation_loss,
            skipped=metrics.skipped,
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

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Say nothing: the step behind it tells."""

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Say nothing: steps are told one by one."""

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
