"""The model in one piece on every device, each with equally many samples: DistributedDataParallel and fully_shard.

Units take an emulated device's time one by one. In the forward pass a unit computes, then waits until its time has
passed. In the backward pass it is the other way round, since autograd hands a parameter's gradient on as soon as it is
known, and so to whoever sums gradients beside the backward pass: a unit waits first, computes at the end of its time,
and waits for the rest of it. So a unit's gradients are there when the emulated device would have them, and sums overlap
as they would there. On a real processor nothing is between the units.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spantrain.core.action import Op
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.models.build import build_units
from spantrain.models.units import Rows, UnitModule, loss_of, rows_read, shared_parameters
from spantrain.runtime.step.emulation import emulated_seconds
from spantrain.runtime.step.work import SampledFeed
from spantrain_studies.comparison.worker.device import FrameworkDevice, StartedElsewhereDevice
from spantrain_studies.comparison.worker.orders import Framework, FrameworkOrder
from spantrain_studies.comparison.worker.reference import StepEnd, forward_bytes, state_bytes, sum_over_all

Tensors = tuple[Tensor, ...]
Seconds = Callable[[Op, int], float]
"""(operation, samples) -> what it is to take."""


class TimedUnit(nn.Module):
    """One unit, with marks in the graph where its backward pass begins and ends."""

    def __init__(self, unit: UnitModule, device: StartedElsewhereDevice, seconds: Seconds) -> None:
        super().__init__()
        self.unit = unit
        self._device = device
        self._seconds = seconds
        self._real_s: float | None = None
        """The least that its backward pass has taken really."""

    def forward(self, rows: Rows, *tensors: Tensor) -> Tensors:
        """Run the unit; its time has passed on return."""
        samples = next(iter(rows.values())).shape[0]
        begins = self._goes_back if any(tensor.requires_grad for tensor in tensors) else self._waits
        marked = _marked(tensors, self._went_back)
        outputs = self._device.run(lambda: _as_tuple(self.unit.run(marked, rows)), self._seconds(Op.FORWARD, samples))
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


class PlainUnit(nn.Module):
    """One unit, which takes the time that it takes."""

    def __init__(self, unit: UnitModule) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, rows: Rows, *tensors: Tensor) -> Tensors:
        """Run the unit."""
        return _as_tuple(self.unit.run(tensors, rows))


class UnitChain(nn.Module):
    """All units of a model, one after the other; returns the loss sum."""

    def __init__(self, units: Sequence[TimedUnit | PlainUnit]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, rows: Rows) -> Tensor:
        """Return the loss, summed over the samples."""
        tensors: Tensors = ()
        for unit in self.units[:-1]:
            tensors = unit(rows, *tensors)
        (loss_sum,) = self.units[-1](rows, *tensors)
        return cast(Tensor, loss_sum)


class TimedChain(UnitChain):
    """All units of a model, each in an emulated device's time."""

    def __init__(self, units: Sequence[UnitModule], device: StartedElsewhereDevice, seconds: Sequence[Seconds]) -> None:
        super().__init__([TimedUnit(unit, device, own) for unit, own in zip(units, seconds, strict=True)])
        self._device = device


class _GradientMark(torch.autograd.Function):
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
    found = iter(cast(Any, _GradientMark).apply(call, *wanted))
    return tuple(next(found) if tensor.requires_grad else tensor for tensor in tensors)


def _as_tuple(outputs: Tensor | Tensors) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


_MIB = 2**20


class WholeModelRunner:
    """One device's copy of the model, or its part of every parameter, and the samples that are its own."""

    def __init__(self, order: FrameworkOrder, rank: int, device: FrameworkDevice, feed: SampledFeed) -> None:
        """Build the model; all devices do so together."""
        self._order = order
        samples = order.global_batch // len(order.devices)
        self._span = Span(rank * samples, (rank + 1) * samples)
        self._feed, self._device = feed, device
        units = build_units(order.model, seed=order.job.seed)
        self._reads = rows_read(units)
        self._held_bytes = _held_bytes(units, feed, self._span)
        chain = _chain(units, device, order, order.devices[rank])
        wrap: type[_Ddp | _Fsdp] = _Ddp if order.framework is Framework.DDP else _Fsdp
        self._wrapped: _Wrapped = wrap(chain, units, order)
        self._end = StepEnd(order.job, self._wrapped.parameters, self._wrapped.sum_of)

    def step(self, step: int) -> float | None:
        """Run one step; return the loss of the own samples, summed."""
        rows = self._feed.rows(step, self._span, self._reads)
        loss_sum = self._device.around(partial(self._there_and_back, rows))
        self._wrapped.finish()
        self._end.run(step)
        return loss_sum

    def _there_and_back(self, rows: Rows) -> float:
        loss_sum = self._wrapped.module(rows)
        (loss_sum * self._wrapped.loss_factor / self._order.global_batch).backward()
        return float(loss_sum.detach())

    def peak_bytes(self) -> int:
        """Return the most that it held."""
        state = state_bytes(self._wrapped.parameters, self._end.optimizer)
        return state + self._held_bytes + self._wrapped.gathered_bytes


def _chain(units: Sequence[UnitModule], device: FrameworkDevice, order: FrameworkOrder, name: str) -> UnitChain:
    if isinstance(device, StartedElsewhereDevice):
        return TimedChain(units, device, unit_seconds(order, name))
    return UnitChain([PlainUnit(unit) for unit in units])


class _Wrapped(Protocol):
    """What a framework makes of the chain."""

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    """What is here of them, for the optimizer."""
    loss_factor: float
    """So that gradients come out summed over all samples."""
    gathered_bytes: int
    """Of parameters of others, at most."""
    sum_of: Callable[[float], float]

    def finish(self) -> None:
        """Wait for sums that are under way; then `parameters` have their gradients."""


class _Ddp:
    def __init__(self, chain: UnitChain, units: Sequence[UnitModule], order: FrameworkOrder) -> None:
        del units
        bucket = {} if order.bucket_bytes is None else {"bucket_cap_mb": order.bucket_bytes / _MIB}
        # All build the same weights from the same seed: to send them first, as DDP does, takes a slow link minutes.
        kept: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True, "init_sync": False}
        self.module: nn.Module = DistributedDataParallel(chain, **kept | bucket)
        self.parameters: Sequence[nn.Parameter] = list(chain.parameters())
        self.loss_factor, self.gathered_bytes = float(len(order.devices)), 0
        self.sum_of: Callable[[float], float] = lambda own: own

    def finish(self) -> None:
        """Do nothing: the backward pass ends when all sums have."""


class _Fsdp:
    def __init__(self, chain: UnitChain, units: Sequence[UnitModule], order: FrameworkOrder) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from spantrain_studies.comparison.worker.scatter import LaterReduceScatter

        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigError(f"fsdp: torch {torch.__version__} is too old for this comparison; use 2.9 or newer")
        # Parameters that units share belong into one group, which is the root's.
        tied = {position for members in shared_parameters(units).values() for position, _ in members}
        own = [unit for position, unit in enumerate(chain.units) if position not in tied]
        self.loss_factor, self.gathered_bytes = 1.0, _gathered_bytes(units, tied)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (len(order.devices),))
        for unit in own:
            fully_shard(unit, mesh=mesh)
        fully_shard(chain, mesh=mesh)
        self._scatter = LaterReduceScatter()
        for module in (*own, chain):
            cast(Any, module).set_custom_reduce_scatter(self._scatter)
        _gather_ahead(chain, own)
        self.module: nn.Module = chain
        self._sharded = list(chain.parameters())
        # The optimizer has the parts themselves: through DTensor an update takes a processor a hundred times as long.
        self.parameters: Sequence[nn.Parameter] = [nn.Parameter(_part(parameter)) for parameter in self._sharded]
        self.sum_of: Callable[[float], float] = sum_over_all

    def finish(self) -> None:
        """Make the sums, and hand the gradients on."""
        self._scatter.finish()
        for sharded, own in zip(self._sharded, self.parameters, strict=True):
            own.grad = None if sharded.grad is None else _part(sharded.grad)
            sharded.grad = None


def _part(tensor: Tensor) -> Tensor:
    """Return what is here of a sharded tensor; it shares its storage."""
    part = cast(Any, tensor).to_local().detach()
    assert isinstance(part, Tensor)
    return part


def _gather_ahead(chain: UnitChain, units: Sequence[nn.Module]) -> None:
    """Have each unit's parameters gathered while the one before computes, in both passes, as CUDA streams would."""
    cast(Any, chain)._set_unshard_async_op(True)
    for before, after in pairwise(units):
        cast(Any, before).set_modules_to_forward_prefetch([after])
        cast(Any, after).set_modules_to_backward_prefetch([before])


def _gathered_bytes(units: Sequence[UnitModule], root: set[int]) -> int:
    """Return the most bytes that are gathered at once: the root's own, and two neighbours'."""
    sizes = [sum(parameter.nbytes for parameter in unit.parameters()) for unit in units]
    shared = {id(p): p.nbytes for position in root for p in units[position].parameters()}
    others = sorted((size for position, size in enumerate(sizes) if position not in root), reverse=True)
    return sum(shared.values()) + sum(others[:2])


def _held_bytes(units: Sequence[UnitModule], feed: SampledFeed, span: Span) -> int:
    rows = feed.rows(0, span, rows_read(units))
    return forward_bytes(nn.ModuleList(units), lambda: (loss_of(units, rows),))


def unit_seconds(order: FrameworkOrder, device: str) -> list[Callable[[Op, int], float]]:
    """Return for each unit what its operations are to take on an emulated device."""
    return [partial(_seconds, emulated_seconds(order.cluster, device, "float32", [unit])) for unit in order.graph.units]


def _seconds(law: Callable[[Op, int], float | None], op: Op, samples: int) -> float:
    seconds = law(op, samples)
    assert seconds is not None, "it is of an emulated device"
    return seconds
