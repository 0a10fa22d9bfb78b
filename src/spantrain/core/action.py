"""Actions: pieces of work of a stage on a span of samples, with a text form that parses back."""

import re
from dataclasses import dataclass
from enum import Enum

from spantrain.core.span import Span

_TEXT = re.compile(r"(\d+)([FBIW])(\[\d+:\d+\])")


class Op(Enum):
    """What is done to the samples: F, B, I, W (B = I + W)."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members are unique, and keys of many tables; the default hashes their names in Python.
    __hash__ = object.__hash__


SPLIT_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
"""All that is done to a sample; a whole backward pass counts as I and W."""


class Direction(Enum):
    """Which way a message goes: activations up the pipeline, gradients down."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, order=False)
class Action:
    """One piece of work: stage, operation, samples.

    >>> str(Action.parse("2F[0:16]"))
    '2F[0:16]'
    """

    stage: int
    op: Op
    span: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.span}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form, e.g. `2F[0:16]`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}; write stage, F|B|I|W, span, e.g. 2F[0:16]")
        return cls(int(match[1]), Op(match[2]), Span.parse(match[3]))


def requires(action: Action, num_stages: int) -> tuple[tuple[str, int], ...]:
    """Return what must be there, for every sample of the span, before the action may run.

    Each entry is (value, stage): `activation` of the stage before, `output_gradient` from the stage
    after, `forward` or `backward_input` of the stage itself. This is the only place where order is written.

    >>> requires(Action.parse("1F[0:4]"), 3), requires(Action.parse("2I[0:4]"), 3)
    ((('activation', 0),), (('forward', 2),))
    """
    stage = action.stage
    match action.op:
        case Op.FORWARD:
            return () if stage == 0 else (("activation", stage - 1),)
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            own = (("forward", stage),)
            return own if stage == num_stages - 1 else (*own, ("output_gradient", stage + 1))
        case Op.BACKWARD_WEIGHT:
            return (("backward_input", stage),)


def produces(action: Action, num_stages: int) -> Direction | None:
    """Return the direction in which the action's result leaves the stage, if it does.

    >>> produces(Action.parse("0F[0:4]"), 2), produces(Action.parse("0I[0:4]"), 2)
    (<Direction.FORWARD: 'forward'>, None)
    """
    match action.op:
        case Op.FORWARD:
            return Direction.FORWARD if action.stage < num_stages - 1 else None
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            return Direction.BACKWARD if action.stage > 0 else None
        case Op.BACKWARD_WEIGHT:
            return None
