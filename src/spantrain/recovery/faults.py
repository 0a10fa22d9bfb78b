"""Faults that are made on purpose in a run, to see what becomes of it."""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What is done to a device's worker."""

    KILL = "kill"
    PAUSE = "pause"
    """It stands still for some seconds."""
    RESTART = "restart"
    """It was killed, and is started again."""
    DRAIN = "drain"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    after_step: int
    """Steps done before it."""
    what: FaultKind
    device: str
    seconds: float = 3.0
    """How long it stands still, if it does."""

    def __post_init__(self) -> None:
        if self.after_step < 0 or not 0 < self.seconds <= 3600:
            raise ValueError("after_step is 0 or more, and seconds are over 0 and at most 3600")
