"""Nesterov momentum, as of torch.optim.SGD with `nesterov=True` and no dampening, also for momentum 0.

Di-PS, 4.1. Kept: rate 0.7 and momentum 0.8. Decided here: parts of steps (see `OuterSettings`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from spantrain.core.records import Bounds
from spantrain.outer.rules.registry import OuterRule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Nesterov(OuterRule):
    """The default."""

    name: ClassVar[str] = "nesterov"
    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    learning_rate: Annotated[float, Bounds(over=0)] = 0.7
    momentum: Annotated[float, Bounds(low=0, under=1)] = 0.8

    def step(self, ahead: "Tensor", old: Sequence["Tensor"], new: Sequence["Tensor"], part: float) -> float:
        """Step by a part, along the gradient and the new velocity."""
        import torch

        (speed,), (faster,) = old, new
        kept, own, beyond = self.of_part(part)
        torch.add(ahead, speed, alpha=kept, out=faster)
        if own != 1.0:
            ahead.mul_(own)
        ahead.add_(faster, alpha=beyond)
        return self.learning_rate

    def of_part(self, part: float) -> tuple[float, float, float]:
        """Return, for a part of a step: what is kept of the velocity, and how far gradient and new velocity are gone.

        In parts that add up to 1, whichever, a velocity decays as in one step; and a gradient that comes in a part
        takes the parameters, in the end, that part of the way of a gradient in one step. Part 1 is a step as it is.

        >>> Nesterov(momentum=0.81).of_part(0.5)[0], Nesterov(momentum=0.8).of_part(1.0)
        (0.9, (0.8, 1.0, 0.8))
        """
        if not self.momentum:
            return 0.0, 1.0, 0.0
        kept = self.momentum**part
        beyond = self.momentum * ((1 - kept) / (1 - self.momentum)) * (self.momentum / kept)
        return kept, 1 + (self.momentum - beyond), beyond
