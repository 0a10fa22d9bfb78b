"""A stage of torch's pipelines that takes an emulated device's time.

What torch calls for each micro-batch is wrapped: its computation runs on the emulated device for as long as ours
would. Messages are torch's own, sent and awaited outside of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from spantrain.core.action import Op
from spantrain.core.units import UnitGraph
from spantrain.devices.device import EmulatedDevice
from spantrain.models.units import UnitModule
from spantrain.runtime.comparison.held import forward_bytes

Tensors = tuple[Tensor, ...]


class StageModule(nn.Module):
    """Consecutive units; the model's last one compares with `labels`, which are put there before each forward."""

    def __init__(self, units: Sequence[UnitModule], *, is_last: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.labels: Tensor | None = None
        self._is_last = is_last

    def forward(self, *tensors: Tensor) -> Tensor | Tensors:
        """Return what the next stage takes; the last one the loss sum, of shape (1,)."""
        for unit in self.units[:-1]:
            tensors = unit(*tensors)
        if not self._is_last:
            return _contiguous(self.units[-1](*tensors))
        loss_sum: Tensor = self.units[-1](*tensors, self.labels)
        return loss_sum.reshape(1)


class TimedStage(PipelineStage):
    """One stage on one device."""

    def __init__(
        self,
        module: StageModule,
        *,
        index: int,
        count: int,
        graph: UnitGraph,
        units: range,
        samples: int,
        device: EmulatedDevice,
        seconds: Callable[[Op, int], float],
    ) -> None:
        """Make the stage.

        Args:
            module: its units.
            index: of the stage.
            count: of all stages.
            graph: of the model.
            units: their indices in it.
            samples: of a micro-batch.
            device: what computes.
            seconds: (operation, samples) -> what it is to take.
        """
        example = tensors_behind(graph, units.start - 1, samples)
        outputs = (torch.zeros(1).requires_grad_(),) if index == count - 1 else tensors_behind(
            graph, units.stop - 1, samples
        )  # fmt: skip
        super().__init__(module, index, count, device.torch_device, input_args=example or None, output_args=outputs)
        self.labels: tuple[Tensor, ...] = ()
        """Of each micro-batch, on the last stage."""
        self.held_peak_bytes = 0
        self._module, self._samples, self._timed, self._seconds_of = module, samples, device, seconds
        self._each_bytes: int | None = None
        self._held = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F of a micro-batch."""
        if self.labels:
            self._module.labels = self.labels[fwd_chunk_id]
        self._hold(1)
        return self._run(Op.FORWARD, partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run B of a micro-batch, or I alone, which the first stage leaves to W."""
        work = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._hold(-1)
            return self._run(Op.BACKWARD, work)
        return work() if self.is_first else self._run(Op.BACKWARD_INPUT, work)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run W of a micro-batch; on the first stage, all of its backward pass."""
        self._hold(-1)
        op = Op.BACKWARD if self.is_first else Op.BACKWARD_WEIGHT
        return self._run(op, partial(super().backward_weight_one_chunk, bwd_chunk_id, last_backward))

    def measure_held(self, inputs: Tensors, labels: Tensor | None) -> None:
        """Find out what a micro-batch holds, from one forward pass."""
        self._module.labels = labels
        self._each_bytes = forward_bytes(self._module, lambda: _tuple(self._module(*inputs)))

    def _run(self, op: Op, work: Callable[[], Any]) -> Any:
        return self._timed.run(work, self._seconds_of(op, self._samples))

    def _hold(self, change: int) -> None:
        self._held += change
        self.held_peak_bytes = max(self.held_peak_bytes, self._held * (self._each_bytes or 0))


def tensors_behind(graph: UnitGraph, unit: int, samples: int) -> Tensors:
    """Return empty tensors as they cross the cut behind a unit; none in front of the first, which reads the data."""
    if unit < 0:
        return ()
    found = []
    for spec in graph.units[unit].outputs:
        tensor = torch.zeros(samples, *spec.shape_per_sample, dtype=getattr(torch, spec.dtype))
        found.append(tensor.requires_grad_() if spec.requires_grad else tensor)
    return tuple(found)


def _contiguous(tensors: Tensors) -> Tensors:
    return tuple(tensor.contiguous() for tensor in tensors)


def _tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)
