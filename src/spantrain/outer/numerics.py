"""The arithmetic of the outer optimizer, on tensors by name.

Di-PS, 4.1 (steps 1 and 3) and algorithm 1. Kept: the mean weighted by tokens, clipping by the norm over all shards,
Nesterov momentum with rate 0.7 and momentum 0.8. Decided here: all in float32, or what the parameters have if that is
more; sums of squares in float64; terms are added in the order given. A step is that of torch.optim.SGD with
`nesterov=True` and no dampening, also for momentum 0; where only some of the clusters pushed it is a part of one. All
goes through memory once, in blocks that stay in the processor's cache from the first operation to the last; blocks
begin with each parameter, so that no bit depends on what else a shard holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "OuterRule",
    "Tensors",
    "nesterov",
    "pseudo_gradient",
    "step_along",
    "sum_of_squares",
    "velocity_type",
    "weighted_mean",
]

Tensors = Mapping[str, Tensor]
"""By parameter name."""

_BLOCK = 2**16
"""Numbers that are worked on at once: with what a step reads and writes of them, 1.5 MiB in single precision."""


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

    def of_part(self, part: float) -> tuple[float, float, float]:
        """Return, for a part of a step: what is kept of the velocity, and how far gradient and new velocity are gone.

        In parts that add up to 1, whichever, a velocity decays as in one step; and a gradient that comes in a part
        takes the parameters, in the end, that part of the way of a gradient in one step. Part 1 is a step as it is.

        >>> OuterRule(momentum=0.81).of_part(0.5)[0], OuterRule(momentum=0.8).of_part(1.0)
        (0.9, (0.8, 1.0, 0.8))
        """
        if not self.momentum:
            return 0.0, 1.0, 0.0
        kept = self.momentum**part
        ahead = self.momentum * ((1 - kept) / (1 - self.momentum)) * (self.momentum / kept)
        return kept, 1 + (self.momentum - ahead), ahead


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


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.detach().reshape(-1), _BLOCK)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of all numbers, added in float64; not finite if one is not."""
    return sum(_squares(tensors), 0.0)


def _squares(tensors: Sequence[Tensor]) -> Iterator[float]:
    for tensor in tensors:
        for block in _blocks(tensor):
            exact = block.to(torch.float64)
            yield float(torch.dot(exact, exact))


def weighted_mean(parts: Sequence[tuple[float, Tensor]], *, out: Tensor | None = None) -> Tensor:
    """Return the sum of tensors times their parts, in this order; the type is at least float32.

    `out`, of that type, takes the result; it may be the first of the tensors itself.

    >>> first = torch.tensor([2.0, 4.0])
    >>> weighted_mean([(0.5, first), (0.25, torch.tensor([4.0, 0.0]))], out=first) is first, first
    (True, tensor([2., 2.]))
    """
    (first, tensor), *others = parts
    mean = out if out is not None else torch.empty(tensor.shape, dtype=velocity_type(tensor.dtype))
    rest = [(part, _blocks(other)) for part, other in others]
    for k, (into, block) in enumerate(zip(_blocks(mean), _blocks(tensor), strict=True)):
        torch.mul(block.to(into.dtype), first, out=into)
        for part, blocks in rest:
            into.add_(blocks[k], alpha=part)
    return mean


def velocity_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that means and velocities of such parameters have: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def step_along(
    mean: Tensor, parameter: Tensor, velocity: Tensor, rule: OuterRule, *, scale: float, part: float = 1.0, out: Tensor
) -> None:
    """Write the new parameter to `out`, and the new velocity over the mean, which is multiplied by `scale` first.

    `part`: of a whole step (see `OuterRule.of_part`).
    Reads three arrays and writes two: twenty bytes a number in single precision.
    """
    kept, own, ahead_of_it = rule.of_part(part)
    arrays = (_blocks(one) for one in (mean, parameter, velocity, out))
    for gradient, before, speed, into in zip(*arrays, strict=True):
        if scale * part != 1.0:
            gradient.mul_(scale * part)
        faster = torch.add(gradient, speed, alpha=kept)
        if own != 1.0:
            gradient.mul_(own)
        ahead = gradient.add_(faster, alpha=ahead_of_it)
        if into.dtype == ahead.dtype:
            torch.sub(before, ahead, alpha=rule.learning_rate, out=into)
        else:
            into.copy_(torch.sub(before, ahead, alpha=rule.learning_rate))
        gradient.copy_(faster)


def nesterov(
    parameter: Tensor, gradient: Tensor, velocity: Tensor, rule: OuterRule, *, part: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a new parameter and a new velocity; nothing is changed in place. `part`: of a whole step.

    >>> rule = OuterRule(learning_rate=1.0, momentum=0.0)
    >>> nesterov(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), rule)[0]
    tensor([2.])
    """
    faster = gradient.detach().to(velocity_type(parameter.dtype), copy=True).contiguous()
    new = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    step_along(faster, parameter, velocity, rule, scale=1.0, part=part, out=new)
    return new, faster
