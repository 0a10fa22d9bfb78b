"""The members of a tensor-parallel group: what they add and put together; those in processes are the runtime's own.

What crosses the group in a forward and in a backward pass are functions that autograd knows: f and g of Shoeybi et al.,
"Megatron-LM" (2019, section 3), the pair that Korthikanti et al. put in their place for slices of a sequence (2022,
section 4.2.2), and gathering of what all use alike. None of them takes a parameter, so that the weights' half of a
backward pass (W) holds no operation of the group (but for `OwnHeadsOfBias`): I, or a full backward, has them all, in an
order that depends on the graph alone, which is the same on all members.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[[Tensor], Tensor]


class TensorGroup:
    """One member's view of its group. All members call the same operations in the same order.

    As it stands, a group of one device, whose tensors are their own sums and all there is.
    """

    rank = 0
    """The member's place in the group."""
    size = 1
    """Number of members."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors, of equal shapes, in place; every member gets the same bits."""

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the members' tensors behind each other along `dim`; `sizes` are their lengths there, by rank."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the own piece along `dim` of the sum of the members' tensors; `sizes` are those of all, by rank."""
        return tensor


class LoneGroup(TensorGroup):
    """One member without the others, to see what it holds: what it is given has their shapes, and other numbers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own tensor where it is among the others', with zeros for those."""
        shape = list(tensor.shape)
        shape[dim] = sum(sizes)
        whole = tensor.new_zeros(shape)
        whole.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank]).copy_(tensor)
        return whole

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own piece."""
        return _piece(tensor, self, sizes, dim)


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Crossing(torch.autograd.Function):
    """One operation forward, and another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Work, back: Work) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _crossing(tensor: Tensor, there: Work, back: Work) -> Tensor:
    return _Crossing.apply(tensor, there, back)  # type: ignore[no-untyped-call, no-any-return]


def _sum(tensor: Tensor, group: TensorGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def _piece(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return a copy of the member's own piece."""
    return tensor.split_with_sizes(list(sizes), dim)[group.rank].clone(memory_format=torch.contiguous_format)


def sum_parts(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the members' tensors, which all of them use in the same way."""
    return _crossing(tensor, lambda part: _sum(part, group), lambda gradient: gradient)


def gather_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; each member computes another part from it."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    return _crossing(tensor, lambda _: whole, lambda gradient: group.reduce_scatter(gradient, sizes, dim))


def gather_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; every member computes the same from it."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    return _crossing(tensor, lambda _: whole, lambda gradient: _piece(gradient, group, sizes, dim))


def gather_both(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """Return what `gather_parts` and what `gather_same` would, gathered once."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    parts = _crossing(tensor, lambda _: whole, lambda gradient: group.reduce_scatter(gradient, sizes, dim))
    same = whole.view_as(whole)
    return parts, _crossing(tensor, lambda _: same, lambda gradient: _piece(gradient, group, sizes, dim))


def scatter_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of the sum of the members' tensors."""
    return _crossing(
        tensor,
        lambda part: group.reduce_scatter(part, sizes, dim),
        lambda gradient: group.all_gather(gradient, sizes, dim),
    )


def scatter_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of a tensor that all members have."""
    return _crossing(
        tensor, lambda whole: _piece(whole, group, sizes, dim), lambda gradient: group.all_gather(gradient, sizes, dim)
    )


class InputCopy:
    """A tensor that all members have and each uses in part; its gradient is summed over the group.

    Several modules of a unit read one: queries, keys and values, or a gate and what it gates. Their gradients are added
    first and summed over the group once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._tensor: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor's copy; the one made before, if this very tensor came last."""
        if self._copied is None or self._tensor is not tensor:
            self._tensor = tensor
            self._copied = _crossing(
                tensor, lambda whole: whole.view_as(whole), lambda gradient: _sum(gradient, self._group)
            )
        return self._copied

    def forget(self) -> None:
        """Let go of the tensor: a unit's pass is over."""
        self._tensor = self._copied = None
