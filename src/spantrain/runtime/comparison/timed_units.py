"""A chain of units in one piece that takes an emulated device's time, unit by unit.

In the forward pass a unit computes, then waits until its time has passed. In the backward pass it is the other way
round, since autograd hands a parameter's gradient on as soon as it is known, and so to whoever sums gradients beside
the backward pass: a unit waits first, computes at the end of its time, and waits for the rest of it. So a unit's
gradients are there when the emulated device would have them, and sums overlap as they would there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from spantrain.core.action import Op
from spantrain.devices.device import EmulatedDevice
from spantrain.models.units import UnitModule

Tensors = tuple[Tensor, ...]
Seconds = Callable[[Op, int], float]
"""(operation, samples) -> what it is to take."""


class TimedUnit(nn.Module):
    """One unit, with marks in the graph where its backward pass begins and ends."""

    def __init__(self, unit: UnitModule, device: EmulatedDevice, seconds: Seconds) -> None:
        super().__init__()
        self.unit = unit
        self._device = device
        self._seconds = seconds
        self._real_s: float | None = None
        """The least that its backward pass has taken really."""

    def forward(self, *tensors: Tensor) -> Tensors:
        """Run the unit; its time has passed on return."""
        samples = tensors[0].shape[0]
        begins = self._goes_back if any(tensor.requires_grad for tensor in tensors) else self._waits
        marked = _marked(tensors, self._went_back)
        outputs = self._device.run(lambda: _as_tuple(self.unit(*marked)), self._seconds(Op.FORWARD, samples))
        return _marked(outputs, partial(begins, self._seconds(Op.BACKWARD, samples)))

    def _waits(self, seconds: float) -> None:
        """Let the time pass first: in a unit that reads the data, nothing tells when its backward pass has ended."""
        self._device.run(lambda: None, seconds)

    def _goes_back(self, seconds: float) -> None:
        self._device.begin(seconds, ahead_s=self._real_s or 0.0)

    def _went_back(self) -> None:
        real_s = self._device.end()
        if real_s is not None:
            self._real_s = real_s if self._real_s is None else min(real_s, self._real_s)


class TimedChain(nn.Module):
    """All units of a model, one after the other; returns the loss sum."""

    def __init__(self, units: Sequence[UnitModule], device: EmulatedDevice, seconds: Sequence[Seconds]) -> None:
        super().__init__()
        self._device = device
        self.units = nn.ModuleList(
            TimedUnit(unit, device, unit_seconds) for unit, unit_seconds in zip(units, seconds, strict=True)
        )

    def forward(self, inputs: Tensors, labels: Tensor) -> Tensor:
        """Return the loss, summed over the samples."""
        tensors = inputs
        for unit in self.units[:-1]:
            tensors = unit(*tensors)
        (loss_sum,) = self.units[-1](*tensors, labels)
        return cast(Tensor, loss_sum)


class _Mark(torch.autograd.Function):
    """Leaves tensors as they are, and calls somebody when their gradients pass."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.call()
        return (None, *gradients)


def _marked(tensors: Tensors, call: Callable[[], None]) -> Tensors:
    """Return the tensors, those that gradients come for behind a mark."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        return tensors
    found = iter(cast(Any, _Mark).apply(call, *wanted))
    return tuple(next(found) if tensor.requires_grad else tensor for tensor in tensors)


def _as_tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)
