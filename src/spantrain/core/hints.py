"""An order of work that was found when planning, for the dispatch policy `critical-path` to follow."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannedWait:
    """An action worth waiting for, though something else could run."""

    position: int
    """Which action of the order it is, from 0."""
    seconds: float
    """For how long the device should be idle before it."""

    def __post_init__(self) -> None:
        if self.position < 0 or self.seconds < 0:
            raise ValueError(f"a planned wait's position and seconds must not be negative, got {self}")


@dataclass(frozen=True, kw_only=True)
class PlannedOrder:
    """What one replica should do, in order."""

    ops: str
    """A letter for each action (F, B, I, W); those of a kind take the replica's micro-batches by rising sample."""
    waits: tuple[PlannedWait, ...] = ()

    def __post_init__(self) -> None:
        wrong = sorted(set(self.ops) - set("FBIW"))
        if wrong:
            raise ValueError(f"a planned order has letters of F, B, I and W, got {''.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class DispatchHints:
    """The orders of all replicas."""

    orders: tuple[tuple[PlannedOrder, ...], ...]
    """By stage and replica."""
    predicted_s: float
    """Seconds of a step, as simulated."""
    reason: str
    """Why these orders."""
