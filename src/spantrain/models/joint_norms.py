"""Batch normalization by the statistics of what several devices have: sums of all of them, forward and backward.

As `torch.nn.SyncBatchNorm`, on processors too, with tensor-parallel members that have some of the channels, or all.
Only the normalization exchanges anything, not its scale and shift: so the weights' half of a backward pass waits for
nobody (`models.tensor_parallel.group`).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from spantrain.core.records import Record
from spantrain.core.shares import TensorPart

if TYPE_CHECKING:
    from spantrain.models.tensor_parallel.group import TensorGroup


class Channels(Record):
    """The channels that a device has of a normalization."""

    count: int
    """Of all, in the unsplit model."""
    part: TensorPart | None
    """None: all of them."""
    index: Tensor
    """Of the own ones."""


class JoinedDevices(Record):
    """All devices of a stage, whose replicas run the same micro-batch, and do the same in the same order."""

    group: "TensorGroup"
    leads: bool
    """Whether this device tells of what the members of its replica hold whole."""

    def totals(self, sums: tuple[Tensor, Tensor], count: float, channels: Channels) -> tuple[Tensor, Tensor, float]:
        """Return two sums by own channel, and the number that they are of, over all devices; float64."""
        found = torch.zeros(2 * channels.count + 1, dtype=torch.float64, device=sums[0].device)
        if self.leads or channels.part is not None:
            for whole, own in zip(found[:-1].chunk(2), sums, strict=True):
                whole[channels.index] = own.to(torch.float64)
        found[-1] = count * self.leads
        self.group.all_reduce(found)
        first, second = found[:-1].chunk(2)
        return first[channels.index], second[channels.index], float(found[-1])


class _Normalized(torch.autograd.Function):
    """Rows of mean 0 and variance 1 in each channel, over all devices."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, eps: float, joined: JoinedDevices, channels: Channels) -> tuple[Tensor, ...]:
        dims = [dim for dim in range(given.dim()) if dim != 1]
        rows, own = given.float(), given.numel() // given.shape[1]
        variance, mean = (tensor.double() for tensor in torch.var_mean(rows, dim=dims, correction=0))
        first, second, count = joined.totals((mean * own, (variance + mean.square()) * own), own, channels)
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {given.shape}")
        mean = first / count
        variance = (second / count - mean.square()).clamp_(min=0)
        scale = torch.rsqrt(variance + eps).float()
        result = (rows - _by_channel(mean.float(), rows)) * _by_channel(scale, rows)
        ctx.save_for_backward(result, scale)
        ctx.count, ctx.joined, ctx.channels, ctx.dtype = count, joined, channels, given.dtype
        mean, unbiased = mean.float(), (variance * (count / (count - 1))).float()
        ctx.mark_non_differentiable(mean, unbiased)
        return result, mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, scale = ctx.saved_tensors
        gradient = gradients[0]
        dims = [dim for dim in range(result.dim()) if dim != 1]
        own = gradient.sum(dims), (gradient * result).sum(dims)
        found = ctx.joined.totals(own, 0.0, ctx.channels)
        mean, along = (_by_channel((total / ctx.count).float(), result) for total in found[:2])
        return ((gradient - mean - result * along) * _by_channel(scale, result)).to(ctx.dtype), None, None, None


def jointly_normalized(
    norm: _BatchNorm, given: Tensor, joined: JoinedDevices, channels: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a normalization makes of its input, with the mean and the unbiased variance of all devices' samples.

    Args:
        norm: whose scale and shift are applied; its running statistics stay.
        given: `(samples, channels, ...)`.
        joined: who has the other samples.
        channels: of the normalization here.

    Raises:
        ValueError: there is one number in each channel.
        PeerLostError: another device went away.
    """
    norm._check_input_dim(given)  # type: ignore[no-untyped-call]
    result, mean, variance = _Normalized.apply(given, norm.eps, joined, channels)  # type: ignore[no-untyped-call]
    if norm.affine:
        result = result * _by_channel(norm.weight, result) + _by_channel(norm.bias, result)
    return result.to(given.dtype), mean, variance


def _by_channel(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(1, -1, *[1] * (like.dim() - 2))
