"""The model in stages, one or more on every device: torch.distributed.pipelining's schedules.

A stage takes its device's time: what torch calls for each micro-batch is wrapped, and its computation runs on that
device, on an emulated one for as long as ours would. Messages are torch's own, sent and awaited outside of it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from spantrain.core.action import Op
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.models.build import build_units
from spantrain.models.units import Rows, UnitModule, rows_read, shared_parameters
from spantrain.runtime.step.emulation import emulated_seconds
from spantrain.runtime.step.work import SampledFeed
from spantrain_studies.comparison.worker.device import FrameworkDevice
from spantrain_studies.comparison.worker.orders import Framework, FrameworkOrder
from spantrain_studies.comparison.worker.reference import StepEnd, forward_bytes, state_bytes, sum_over_all

Tensors = tuple[Tensor, ...]


class StageModule(nn.Module):
    """Consecutive units; they read `rows`, which are put there before each forward."""

    def __init__(self, units: Sequence[UnitModule], *, is_last: bool) -> None:
        super().__init__()
        self.units: Any = nn.ModuleList(units)
        self.rows: Rows = {}
        self._is_last = is_last

    def forward(self, *tensors: Tensor) -> Tensor | Tensors:
        """Return what the next stage takes; the last one the loss sum, of shape (1,)."""
        for unit in self.units[:-1]:
            tensors = unit.run(tensors, self.rows)
        if not self._is_last:
            return _own(self.units[-1].run(tensors, self.rows))
        loss_sum: Tensor = self.units[-1].run(tensors, self.rows)
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
        device: FrameworkDevice,
        seconds: Callable[[Op, int], float | None],
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
            seconds: (operation, samples) -> what it is to take; None: what it takes.
        """
        example = tensors_behind(graph, units.start - 1, samples)
        outputs = (torch.zeros(1).requires_grad_(),) if index == count - 1 else tensors_behind(
            graph, units.stop - 1, samples
        )  # fmt: skip
        super().__init__(module, index, count, device.torch_device, input_args=example or None, output_args=outputs)
        self.reads = rows_read(module.units)
        """What its units read of the samples."""
        self.rows: Sequence[Rows] = ()
        """Of each micro-batch."""
        self.held_peak_bytes = 0
        self._module, self._samples, self._timed, self._seconds_of = module, samples, device, seconds
        self._each_bytes: int | None = None
        self._held = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F of a micro-batch."""
        self._module.rows = self.rows[fwd_chunk_id]
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

    def measure_held(self, inputs: Tensors, rows: Rows) -> None:
        """Find out what a micro-batch holds, from one forward pass."""
        self._module.rows = rows
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


def _own(tensors: Tensors) -> Tensors:
    """Return the tensors as torch sends and detaches them: in one piece, and none a view of another one."""
    return tuple(
        tensor.clone(memory_format=torch.contiguous_format) if tensor._is_view() else tensor.contiguous()
        for tensor in tensors
    )


def _tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


_SCHEDULES: Mapping[Framework, Any] = {
    Framework.GPIPE: ScheduleGPipe,
    Framework.ONE_F_ONE_B: Schedule1F1B,
    Framework.INTERLEAVED: ScheduleInterleaved1F1B,
    Framework.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Framework.ZERO_BUBBLE_V: ScheduleZBVZeroBubble,
}


class StagedModelRunner:
    """One device's stages, and the schedule that runs them."""

    def __init__(self, order: FrameworkOrder, rank: int, device: FrameworkDevice, feed: SampledFeed) -> None:
        """Build the stages; all devices do so together."""
        self._order, self._feed = order, feed
        self._numbers = order.local_stages(rank)
        self._whole = Span(0, order.global_batch)
        units = _built(order, self._numbers)
        self._stages = [self._stage(number, units[number], device, rank) for number in self._numbers]
        parameters = {id(p): p for stage in self._stages for p in stage.submod.parameters()}
        self._tied = SharedParameterSums(order, rank, [unit for number in self._numbers for unit in units[number]])
        self._end = StepEnd(order.job, parameters.values(), sum_over_all)
        self._schedule = _schedule(order, self._stages)

    def step(self, step: int) -> float | None:
        """Run one step; return the loss sum on the device that has the last stage."""
        for stage in self._stages:
            rows = self._feed.rows(step, self._whole, stage.reads)
            stage.rows = _divided(rows, self._order.micro_batches)
        losses: list[Tensor] = []
        target = torch.zeros(self._order.global_batch) if self._has_last else None
        self._schedule.step(target=target, losses=losses if self._has_last else None, return_outputs=False)
        self._tied.run()
        self._end.run(step, not_counted=self._tied.counted_elsewhere)
        return float(sum(loss.detach().sum() for loss in losses)) * self._order.global_batch if losses else None

    def peak_bytes(self) -> int:
        """Return the most that it held."""
        parameters = {id(p): p for stage in self._stages for p in stage.submod.parameters()}
        held = sum(stage.held_peak_bytes for stage in self._stages)
        return state_bytes(parameters.values(), self._end.optimizer) + held

    @property
    def _has_last(self) -> bool:
        return len(self._order.cuts) - 1 in self._numbers

    def _stage(self, number: int, units: Sequence[UnitModule], device: FrameworkDevice, rank: int) -> TimedStage:
        order = self._order
        first, end = order.cuts[number]
        samples = order.global_batch // order.micro_batches
        law = emulated_seconds(order.cluster, order.devices[rank], "float32", order.graph.units[first:end])
        is_last = number == len(order.cuts) - 1
        stage = TimedStage(
            StageModule(units, is_last=is_last),
            index=number,
            count=len(order.cuts),
            graph=order.graph,
            units=range(first, end),
            samples=samples,
            device=device,
            seconds=law,
        )
        span = Span(0, samples)
        rows = self._feed.rows(0, span, rows_read(units))
        stage.measure_held(tensors_behind(order.graph, first - 1, samples), rows)
        return stage


def _divided(rows: Rows, count: int) -> list[Rows]:
    """Return the rows of each micro-batch."""
    pieces = {number: torch.tensor_split(tensor, count) for number, tensor in rows.items()}
    return [{number: of_row[index] for number, of_row in pieces.items()} for index in range(count)]


class SharedParameterSums:
    """Gradients of parameters that units of several devices share copies of."""

    def __init__(self, order: FrameworkOrder, rank: int, units: Sequence[UnitModule]) -> None:
        self._sums: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: list[nn.Parameter] = []
        """Those that a device before this one counts in the norm."""
        own = shared_parameters(units)
        for name, ranks in sorted(_holders(order).items()):
            group = dist.new_group(ranks)  # all devices form all groups in the same order
            if rank not in ranks or len(ranks) == 1:
                continue
            position, local = own[name][0]
            parameter = units[position].get_parameter(local)
            assert isinstance(group, dist.ProcessGroup)
            self._sums.append((parameter, group))
            if rank != ranks[0]:
                self.counted_elsewhere.append(parameter)

    def run(self) -> None:
        """Sum them."""
        for parameter, group in self._sums:
            assert parameter.grad is not None, "every stage has gone back"
            dist.all_reduce(parameter.grad, group=group)


def _holders(order: FrameworkOrder) -> dict[str, list[int]]:
    """Return the ranks that hold each group of shared parameters."""
    found: dict[str, set[int]] = {}
    for number, (first, end) in enumerate(order.cuts):
        for unit in order.graph.units[first:end]:
            for name in unit.shared:
                found.setdefault(name, set()).add(order.rank_of(number))
    return {name: sorted(ranks) for name, ranks in found.items()}


def _built(order: FrameworkOrder, numbers: Sequence[int]) -> dict[int, list[UnitModule]]:
    """Return the units of some stages; what they share is one object."""
    wanted = [unit for number in numbers for unit in range(*order.cuts[number])]
    built = dict(zip(wanted, build_units(order.model, wanted, seed=order.job.seed), strict=True))
    return {number: [built[unit] for unit in range(*order.cuts[number])] for number in numbers}


def _schedule(order: FrameworkOrder, stages: Sequence[TimedStage]) -> Any:
    """Return torch's schedule; its gradients come out summed over the whole batch."""
    make = _SCHEDULES[order.framework]
    return make(
        list(stages) if order.framework.many_stages else stages[0],
        order.micro_batches,
        loss_fn=lambda output, _target: output.sum() / order.global_batch,
        scale_grads=False,
    )
