"""What workers ask about batches that a user's own loop gives (`runtime.coordinator.batches`)."""

from dataclasses import dataclass
from enum import StrEnum

from spantrain.runtime.control.plane import OrderRequest


class NextStep(StrEnum):
    """What the loop wants of all devices."""

    WAIT = "wait"
    GO = "go"
    """Run the step: its batch is there."""
    SAVE = "save"
    """Write a checkpoint, then ask again."""
    STOP = "stop"


@dataclass(frozen=True, kw_only=True)
class NextStepAnswer:
    """What to do next."""

    next: NextStep


@dataclass(frozen=True, kw_only=True)
class AskNextStep(OrderRequest[NextStepAnswer], name="next_step"):
    """Asks what to do before a step."""

    step: int
    saved: bool
    """Whether a checkpoint was written before it."""


@dataclass(frozen=True, kw_only=True)
class BatchPiece:
    """Bytes of a safetensors file with rows of a batch."""

    piece: bytes
    total: int
    """Bytes of the file."""


@dataclass(frozen=True, kw_only=True)
class FetchRows(OrderRequest[BatchPiece], name="batch_rows"):
    """Asks for rows of a step's batch."""

    step: int
    part: str
    """`inputs`, `labels` or `counted` (`models.units.counted_labels`)."""
    lo: int
    hi: int
    offset: int
    """Of the first byte that is wanted."""
