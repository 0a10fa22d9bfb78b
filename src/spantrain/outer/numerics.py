"""The arithmetic of the outer optimizer, on tensors by name.

Di-PS, 4.1 (steps 1 and 3) and algorithm 1. Kept: the mean weighted by tokens, clipping by the norm over all shards,
Nesterov momentum with rate 0.7 and momentum 0.8. Decided here: all in float32, or what the parameters have if that is
more; sums of squares in float64; terms are added in the order given. A step is that of torch.optim.SGD with
`nesterov=True` and no dampening, also for momentum 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OuterRule", "Tensors", "nesterov", "pseudo_gradient", "sum_of_squares", "velocity_type", "weighted_mean"]

Tensors = Mapping[str, Tensor]
"""By parameter name."""


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """How a shard steps along the mean pseudo-gradient."""

    learning_rate: float = 0.7
    momentum: float = 0.8

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                "learning_rate must be positive and momentum at least 0 and under 1, "
                f"got {self.learning_rate} and {self.momentum}"
            )


def pseudo_gradient(start: Tensors, now: Tensors) -> dict[str, Tensor]:
    """Return start minus now, by name.

    Raises:
        ValueError: they are not of the same names and shapes.
    """
    if start.keys() != now.keys() or any(start[name].shape != now[name].shape for name in start):
        unlike = sorted(name for name in start.keys() | now.keys() if _shape(start, name) != _shape(now, name))
        raise ValueError(f"start and end of a round must hold the same parameters, but differ in {', '.join(unlike)}")
    return {name: start[name].detach() - now[name].detach() for name in start}


def _shape(tensors: Tensors, name: str) -> object:
    return tensors[name].shape if name in tensors else None


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of all numbers, added in float64; not finite if one is not."""
    return sum(float(tensor.flatten().double().square().sum()) for tensor in tensors)


def weighted_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of tensors times their parts, in this order; the type is at least float32."""
    (first, tensor), *others = parts
    mean = tensor.to(velocity_type(tensor.dtype)) * first
    for part, other in others:
        mean.add_(other, alpha=part)
    return mean


def velocity_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that means and velocities of such parameters have: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def nesterov(parameter: Tensor, gradient: Tensor, velocity: Tensor, rule: OuterRule) -> tuple[Tensor, Tensor]:
    """Return a new parameter and a new velocity; nothing is changed in place.

    >>> rule = OuterRule(learning_rate=1.0, momentum=0.0)
    >>> nesterov(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), rule)[0]
    tensor([2.])
    """
    velocity = velocity * rule.momentum + gradient
    ahead = gradient + velocity * rule.momentum
    return (parameter - ahead * rule.learning_rate).to(parameter.dtype), velocity
