"""What decision machines and their drivers exchange (DESIGN idea 2), and the address of a message on the wire."""

from dataclasses import dataclass

from spantrain.core.action import Action, Direction
from spantrain.core.span import Span


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A new step begins; nothing of it has arrived or run."""

    step: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Samples have come from the stage before (forward) or after (backward), in some piece."""

    direction: Direction
    span: Span


@dataclass(frozen=True, slots=True)
class Finished:
    """An action that was commanded has ended."""

    action: Action


@dataclass(frozen=True, slots=True)
class Recut:
    """Micro-batches of this device that have not begun are to be cut otherwise, up to the end of the step."""

    spans: tuple[Span, ...]
    """In the place of those that they share samples with; the same samples, by rising sample."""
    reason: str

    def __post_init__(self) -> None:
        if not self.spans or list(self.spans) != sorted(self.spans):
            raise ValueError(f"a re-cut needs spans by rising sample, got {self.spans}")
        if not self.reason or " because " in self.reason:
            raise ValueError(f"a re-cut needs a reason, without ' because ' in it; got {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Run:
    """Do this action now."""

    action: Action
    reason: str


Event = StepStarted | Arrived | Finished | Recut
Command = Run


@dataclass(frozen=True, slots=True, order=True)
class MessageKey:
    """The address of a message: what it is, not who waits for it.

    `lane` is `forward` or `backward` for samples between stages, `tied:NAME` for sums of shared gradients,
    `probe` for measuring. `cut` is the unit index behind which the model is cut.
    """

    generation: int
    step: int
    lane: str
    cut: int
    span: Span

    def __str__(self) -> str:
        return f"g{self.generation}/s{self.step}/{self.lane}/cut{self.cut}{self.span}"
