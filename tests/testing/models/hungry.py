"""A model that runs out of memory on one device of a run: where more samples wait there for their backward than fit."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, MICRO_BATCH, WIDTH, CLASSES = 6, 2, 8, 3
SMALL = "s0r0"
"""The device whose memory holds one micro-batch of a layer at once."""
SAMPLE_BYTES = 2**30
"""What a sample takes on an accelerator, whose memory is limited for this; elsewhere samples are only counted."""


class _Held:
    """Samples of one forward, as long as what it has saved is there."""

    now = 0

    def __init__(self, samples: int) -> None:
        self.samples = samples
        _Held.now += samples

    def __del__(self) -> None:
        _Held.now -= self.samples


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, is_hungry: bool) -> Tensor:
        if len(hidden) > MICRO_BATCH:
            return hidden.clone()  # looked at as a whole, before it trains
        ctx.held = _Held(len(hidden))
        is_over = is_hungry and os.readlink("/proc/self/fd/1").endswith(f"/{SMALL}.log")
        if is_over and hidden.is_cuda:
            ctx.ballast = _held_for_real(hidden)
        elif is_over and _Held.now > MICRO_BATCH:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate room for {_Held.now} samples.")
        return hidden.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _held_for_real(hidden: Tensor) -> Tensor:
    """Fill what a device has where more than one micro-batch is there."""
    total_bytes = torch.cuda.get_device_properties(hidden.device).total_memory
    torch.cuda.set_per_process_memory_fraction((MICRO_BATCH + 0.5) * SAMPLE_BYTES / total_bytes, hidden.device)
    return torch.empty(len(hidden) * SAMPLE_BYTES, dtype=torch.uint8, device=hidden.device)


class Hungry(nn.Module):
    """A layer whose saved samples are counted, of which not many fit: at once, or as soon as it has been updated."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.later = later
        self.first: int | None = None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        written = self.linear.weight._version
        self.first = written if self.first is None else self.first
        return hidden + torch.tanh(self.linear(_Saved.apply(hidden, not self.later or written > self.first)))


def hungry(*, later: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """A factory, as a user gives one."""
    batch = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % CLASSES
    layers = Hungry(later=later), Hungry(later=later), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(*layers), batch, functional.cross_entropy


def hungry_later() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """The same, from the second step on."""
    return hungry(later=True)
