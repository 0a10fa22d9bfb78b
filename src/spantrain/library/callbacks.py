"""Who is told of what happens while training: the transformers library's protocol of callbacks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spantrain.app.metrics import StepMetrics
from spantrain.errors import ConfigError
from spantrain.library.arguments import TrainingArguments

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


class Callbacks:
    """All callbacks of a run, and what they see and want."""

    def __init__(self, callbacks: Sequence[Any], args: TrainingArguments) -> None:
        self._callbacks = tuple(callbacks)
        self._args = args
        self.state = TrainerState()
        self.control = TrainerControl()

    def tell(self, event: str, **more: Any) -> None:
        """Call each that has a method for an event."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._args, self.state, self.control, **more)
