"""What users want to be told while training: progress on standard error, and calls of callbacks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from spantrain.app.metrics import EvaluationMetrics, StepMetrics
from spantrain.app.progress_display import ProgressDisplay
from spantrain.app.training.best_checkpoint import BestCheckpoint
from spantrain.app.training.outcome import TrainOutcome
from spantrain.core.plan import Plan
from spantrain.library.arguments import TrainingArguments
from spantrain.library.callbacks import Callbacks, TrainerState
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.runtime.coordinator.barrier import StepOutcome


class UserReporter:
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
        self._callbacks = Callbacks(callbacks, args)
        self.best = BestCheckpoint(
            metric=f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}",
            greater_is_better=bool(args.greater_is_better),
            kept=args.load_best_model_at_end,
        )
        """Of the run; tells of it with `TrainRequest.best`."""
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._display = ProgressDisplay(self._console, every=args.logging_steps)
        self._says = args.logging_steps > 0
        self._begun = self._stopped = False
        self._stop, self._save = stop, save

    def __enter__(self) -> "UserReporter":
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()

    @property
    def state(self) -> TrainerState:
        """What callbacks see."""
        return self._callbacks.state

    def expect(self, steps: int) -> None:
        """Hear how many steps there will be in all; 0: as many as a loop wants."""
        self._callbacks.state.max_steps = steps

    def phase(self, text: str) -> None:
        """Print it."""
        self._display.begin()
        self.note(text)

    def progress(self, done: int, total: int, text: str) -> None:
        """Draw it where there is a terminal."""
        self._display.part(done, total, text)

    def note(self, text: str) -> None:
        """Print it."""
        if self._says:
            self._console.print(text, soft_wrap=True)

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
        del outcome
        self._display.step(metrics, total_steps)
        state = self._callbacks.state
        state.global_step, state.epoch, state.last = metrics.step, metrics.epoch, metrics
        self._tell("on_step_end")

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Print it and tell callbacks."""
        self._display.evaluated(metrics)
        self._tell("on_evaluate", metrics=metrics.scalars())

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Tell callbacks."""
        self._callbacks.state.log_history.append({**scalars, "step": step})
        self._tell("on_log", logs=dict(scalars))

    def saved(self, folder: str) -> None:
        """Tell callbacks."""
        self._callbacks.state.checkpoint = folder
        self._tell("on_save")

    def ended(self, outcome: TrainOutcome | None) -> None:
        """Tell callbacks."""
        self._display.close()
        if outcome is not None:
            self.logged(outcome.metrics, outcome.global_step)
        self._tell("on_train_end")

    def _tell(self, event: str, **more: Any) -> None:
        state, best = self._callbacks.state, self.best
        state.best_metric, state.best_global_step, state.best_model_checkpoint = best.value, best.step, best.checkpoint
        self._callbacks.tell(event, **more)
        control = self._callbacks.control
        if control.should_save:
            control.should_save = False
            self._save()
        if control.should_training_stop and not self._stopped:
            self._stopped = True
            self._stop()
