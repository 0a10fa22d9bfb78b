"""What crosses a tensor-parallel group in a forward and in a backward pass, as functions that autograd knows.

They are f and g of Shoeybi et al., "Megatron-LM" (2019, section 3), the pair that Korthikanti et al. put in their place
for slices of a sequence (2022, section 4.2.2), and gathering of what all use alike. None of them takes a parameter, so
that the weights' half of a backward pass (W) holds no operation of the group (but for `positions`): I, or a full
backward, has them all, in an order that depends on the graph alone, which is the same on all members.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spantrain.models.tensor_parallel.group import TensorGroup


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(total)
        return total, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG004 - the signature is torch's
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - the signature is torch's
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,  # noqa: ARG004 - what the gradient is of
        gathered: tuple[Tensor],
        group: TensorGroup,
        sizes: Sequence[int],
        dim: int,
        used_by_parts: bool,
    ) -> Tensor:
        # In a tuple, so that torch takes it for a result and not for an argument that is handed on.
        ctx.group, ctx.sizes, ctx.dim, ctx.used_by_parts = group, sizes, dim, used_by_parts
        return gathered[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.used_by_parts:
            own = ctx.group.reduce_scatter(gradients[0], ctx.sizes, ctx.dim)
        else:
            own = _piece(gradients[0], ctx.group, ctx.sizes, ctx.dim)
        return own, None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, sums: bool) -> Tensor:
        ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
        return group.reduce_scatter(tensor, sizes, dim) if sums else _piece(tensor, group, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.group.all_gather(gradients[0], ctx.sizes, ctx.dim), None, None, None, None


def _piece(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return a copy of the member's own piece."""
    own = tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])
    return own.clone(memory_format=torch.contiguous_format)


def sum_gradients(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the tensor, which all members have and each uses in part; its gradient is summed over the group."""
    copied: Tensor = _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_parts(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the members' tensors, which all of them use in the same way."""
    total: Tensor = _SumParts.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; each member computes another part from it."""
    return _gathered(tensor, group.all_gather(tensor.detach(), sizes, dim), group, sizes, dim, used_by_parts=True)


def gather_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; every member computes the same from it."""
    return _gathered(tensor, group.all_gather(tensor.detach(), sizes, dim), group, sizes, dim, used_by_parts=False)


def gather_both(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """Return what `gather_parts` and what `gather_same` would, gathered once."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    parts = _gathered(tensor, whole, group, sizes, dim, used_by_parts=True)
    return parts, _gathered(tensor, whole.view_as(whole), group, sizes, dim, used_by_parts=False)


def _gathered(
    tensor: Tensor, whole: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, *, used_by_parts: bool
) -> Tensor:
    found: Tensor = _Gather.apply(tensor, (whole,), group, sizes, dim, used_by_parts)  # type: ignore[no-untyped-call]
    return found


def scatter_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of the sum of the members' tensors."""
    own: Tensor = _Scatter.apply(tensor, group, sizes, dim, True)  # type: ignore[no-untyped-call]
    return own


def scatter_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of a tensor that all members have."""
    own: Tensor = _Scatter.apply(tensor, group, sizes, dim, False)  # type: ignore[no-untyped-call]
    return own


class InputCopy:
    """`sum_gradients`, once for a tensor that several modules of a unit read.

    Queries, keys and values, or a gate and what it gates, read one tensor. Their gradients are added first and
    summed over the group once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._tensor: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor's copy; the one made before, if this very tensor came last."""
        if self._copied is None or self._tensor is not tensor:
            self._tensor, self._copied = tensor, sum_gradients(tensor, self._group)
        return self._copied

    def forget(self) -> None:
        """Let go of the tensor: a unit's pass is over."""
        self._tensor = self._copied = None
