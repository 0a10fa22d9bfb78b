"""What crosses a tensor-parallel group in a forward and in a backward pass, as functions that autograd knows.

They are f and g of Shoeybi et al., "Megatron-LM" (2019, section 3), and gathering. None of them takes a parameter, so
that the weights' half of a backward pass (W) holds no operation of the group (but for `positions`): I, or a full
backward, has them all, in an order that depends on the graph alone, which is the same on all members.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spantrain.models.tensor.group import TensorGroup

__all__ = ["InputCopy", "gather_parts", "gather_same", "sum_gradients", "sum_parts"]


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
        ctx: Any, tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, used_by_parts: bool
    ) -> Tensor:
        ctx.group, ctx.sizes, ctx.dim, ctx.used_by_parts = group, sizes, dim, used_by_parts
        return group.all_gather(tensor, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0]
        if ctx.used_by_parts:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            ctx.group.all_reduce(gradient)
        start = sum(ctx.sizes[: ctx.group.rank])
        own = gradient.narrow(ctx.dim, start, ctx.sizes[ctx.group.rank])
        return own.contiguous(), None, None, None, None


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
    whole: Tensor = _Gather.apply(tensor, group, sizes, dim, True)  # type: ignore[no-untyped-call]
    return whole


def gather_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; every member computes the same from it."""
    whole: Tensor = _Gather.apply(tensor, group, sizes, dim, False)  # type: ignore[no-untyped-call]
    return whole


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
