"""What users want to be told while training; every method may be left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from spantrain.errors import ConfigError

__all__ = ["Callback", "StepReport", "checked_callbacks"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step that has ended."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch, before this step's update."""
    grad_norm: float
    """Of all parameters, before clipping."""
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
