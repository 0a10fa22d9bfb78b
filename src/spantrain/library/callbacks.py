"""Who is told of what happens while training: people, on standard error, and callbacks, as in transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from spantrain.app.reporter import DrawingReporter
from spantrain.app.training.metrics import BestCheckpoint, EvaluationMetrics, StepMetrics
from spantrain.app.training.outcome import TrainOutcome
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.library.arguments import TrainingArguments
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.runtime.coordinator.barrier import StepOutcome

__all__ = ["Callback", "StepMetrics", "TrainerControl", "TrainerState"]


@dataclass(kw_only=True)
class TrainerState:
    """Where a run is; names are the transformers library's."""

    max_steps: int = 0
    """In all; 0 where a loop of one's own has no end."""
    global_step: int = 0
    """Steps done."""
    epoch: float | None = None
    """Samples trained on, over those of the data set, where that is known."""
    last: StepMetrics | None = None
    """All that is known of the last step."""
    log_history: list[dict[str, float]] = field(default_factory=list)
    """What was logged, each entry with its `step`."""
    best_metric: float | None = None
    """The best `metric_for_best_model` before the present evaluation; the first weights' does not count."""
    best_global_step: int | None = None
    """Steps done when that was."""
    best_model_checkpoint: str | None = None
    """Folder of the best checkpoint; it stays with `load_best_model_at_end`."""
    checkpoint: str | None = None
    """Folder of the newest checkpoint."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    """Callbacks are called in one process, the one that calls `train`."""


@dataclass(kw_only=True)
class TrainerControl:
    """What a callback wants; set it in a call. The step that is under way then still ends."""

    should_training_stop: bool = False
    """End training, with a checkpoint."""
    should_save: bool = False
    """Write a checkpoint."""


class Callback:
    """Inherit, and override what is wanted; calls come one after another, in the order of what happens.

    `args` are the trainer's TrainingArguments. Further arguments may come by name.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hear that workers are up and the plan is made."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hear of a step: `state.last`."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hear of `logs`: every `logging_steps` of the steps since then, of each evaluation, and of the whole run."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hear what an evaluation gave: `metrics`."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hear that a checkpoint is complete: `state.checkpoint`."""

    def on_plan_change(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hear that another `plan` runs, and the `reason`: a device was lost, has joined or left, links changed."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hear that training has ended."""


_EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_plan_change", "on_train_end")


def checked_callbacks(callbacks: Sequence[object]) -> tuple[Any, ...]:
    """Return what is a list of callbacks: spantrain's, the transformers library's, or anything with such methods.

    Raises:
        ConfigError: it is none, or holds something else: a class, a function.
    """
    given: object = callbacks
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"callbacks: got a {type(given).__name__}; wanted a list of spantrain.Callback objects")
    for entry in given:
        if isinstance(entry, type) or not any(callable(getattr(entry, event, None)) for event in _EVENTS):
            got = f"the class {entry.__name__}" if isinstance(entry, type) else f"a {type(entry).__name__}"
            raise ConfigError(
                f"callbacks: one is {got}; wanted objects of spantrain.Callback's heirs, or others with "
                f"{', '.join(_EVENTS)}"
            )
    return tuple(given)


class UserReporter(DrawingReporter):
    """A reporter that says little, and tells callbacks; a context, which leaves the terminal as it was."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: TrainingArguments,
        *,
        stop: Callable[[], object],
        save: Callable[[], object],
    ) -> None:
        """Print a line every `logging_steps` (0: none); call `stop` and `save` when a callback wants that."""
        super().__init__(Console(stderr=True, markup=False, emoji=False), every=args.logging_steps)
        self._callbacks, self._args = tuple(callbacks), args
        self.state, self._control = TrainerState(), TrainerControl()
        """What callbacks see, and what they want."""
        self.best = BestCheckpoint(
            metric=f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}",
            greater_is_better=bool(args.greater_is_better),
            kept=args.load_best_model_at_end,
        )
        """Of the run; tells of it with `TrainRequest.best`."""
        self._begun = self._stopped = False
        self._stop, self._save = stop, save

    def show_plan(self, outcome: PlanOutcome) -> None:
        """Print who does what, a stage a line."""
        for index, stage in enumerate(outcome.plan.stages):
            self.note(f"  stage {index}: units {stage.first_unit}-{stage.end_unit - 1} on {', '.join(stage.devices)}")

    def run_begins(self, plan: Plan, reason: str = "") -> None:
        """Tell callbacks."""
        if not self._begun:
            self._begun = True
            self._tell("on_train_begin")
        else:
            self._tell("on_plan_change", plan=plan, reason=reason)

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        """Print a line now and then; tell callbacks, and do what they want."""
        super().step(outcome, metrics, total_steps)
        state = self.state
        state.global_step, state.epoch, state.last = metrics.step, metrics.epoch, metrics
        self._tell("on_step_end")

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Print it and tell callbacks."""
        super().evaluated(metrics)
        self._tell("on_evaluate", metrics=metrics.scalars())

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Tell callbacks."""
        self.state.log_history.append({**scalars, "step": step})
        self._tell("on_log", logs=dict(scalars))

    def saved(self, folder: str) -> None:
        """Tell callbacks."""
        self.state.checkpoint = folder
        self._tell("on_save")

    def ended(self, outcome: TrainOutcome | None) -> None:
        """Tell callbacks."""
        self.close()
        if outcome is not None:
            self.logged(outcome.metrics, outcome.global_step)
        self._tell("on_train_end")

    def _tell(self, event: str, **more: Any) -> None:
        state, best, control = self.state, self.best, self._control
        state.best_metric, state.best_global_step, state.best_model_checkpoint = best.value, best.step, best.checkpoint
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._args, state, control, **more)
        if control.should_save:
            control.should_save = False
            self._save()
        if control.should_training_stop and not self._stopped:
            self._stopped = True
            self._stop()
