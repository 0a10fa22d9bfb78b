"""The orders of work that `critical-path` follows in a plan."""

from typing import Annotated

from spantrain.core.records import Bounds, NotNegative, Record


class PlannedWait(Record, where="a planned wait"):
    """An action worth waiting for, though something else could run."""

    position: Annotated[int, Bounds(low=0)]
    """Which action of the order it is, from 0."""
    seconds: NotNegative
    """For how long the device should be idle before it."""


class PlannedOrder(Record):
    """What one replica should do, in order."""

    ops: str
    """A letter for each action (F, B, I, W); those of a kind take the replica's micro-batches by rising sample."""
    waits: tuple[PlannedWait, ...] = ()
    stages: tuple[int, ...] = ()
    """By action: its stage, where the replica's device has several; else empty."""

    def __post_init__(self) -> None:
        wrong = sorted(set(self.ops) - set("FBIW"))
        if wrong:
            raise ValueError(f"a planned order has letters of F, B, I and W, got {''.join(wrong)}")
        if self.stages and len(self.stages) != len(self.ops):
            raise ValueError(f"a planned order has {len(self.ops)} actions, but stages of {len(self.stages)}")


class DispatchHints(Record):
    """The orders of all replicas."""

    orders: tuple[tuple[PlannedOrder, ...], ...]
    """By stage and replica; of stages that share devices, by the first of them."""
    predicted_s: float
    """Seconds of a step, as simulated."""
    reason: str
    """Why these orders."""
