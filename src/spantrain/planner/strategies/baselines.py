"""What people do without a planner: one device, one site, data parallelism, equal layers.

`ddp`: plain data parallelism (PyTorch DistributedDataParallel; Li et al., VLDB 2020).

Kept: the whole model on every device, equal shares of the samples, gradients summed in its buckets beside the last
backward (`torch-ddp` in `cost.sums`). Micro-batches are accumulated without a sum between them (`no_sync`); of
their sizes and those of buckets the best is taken, as a user would who tries them out. Not kept: where the global batch
does not divide evenly, shares differ by one sample in the place of padding.

`gpipe` and `1f1b`: pipelines of equally many layers over all devices, in the order of the cluster file.

What one gets from GPipe (Huang et al., NeurIPS 2019) and from PipeDream-Flush or Megatron-LM's 1F1B (Narayanan et al.,
ICML 2021 and SC 2021) without planning. Kept: the order of work, and what it holds in memory. Of the micro-batch sizes
the best is taken, as a user would who tries them out. Not kept: recomputing activations. Devices beyond the number of
units are left out.

`fsdp`: fully sharded data parallelism (PyTorch FSDP; Zhao et al., VLDB 2023; ZeRO stage 3).

Kept: equal shares, all state divided evenly, each unit's parameters gathered one unit ahead for every forward and again
for every backward (full sharding, backward prefetch), gradients summed to their holders unit by unit, beside the
backward, for every micro-batch; with `bfloat16-weights` in 16 bits, as its mixed precision does. Training does it so
(`runtime.gradients.unit_shards`). As a user would, the best size of micro-batch is taken. Not kept: hybrid sharding
(divided inside a host, whole across hosts), gradients accumulated without a sum (`no_sync`, which would hold them
whole), offloading. Devices are alike to it, and all are used.

`zero1`: data parallelism with the optimizer's state divided, as training does it (`runtime.gradients.own_rows`).

`zero2`: data parallelism with divided gradients and optimizer state (Rajbhandari et al., ZeRO, SC 2020, stage 2).

Kept: the whole model on every device, equal shares, who holds what, and the bytes that are sent: each micro-batch's
gradients are summed to their holders beside the backward, which do not keep what is not theirs, and the new parameters
are gathered at the end of the step. As a user would, the best size of micro-batch is taken. Not kept: buckets over
several units, offloading to the host.

`offload`: the best device alone with its state in its host's memory (Ren et al., ZeRO-Offload, USENIX ATC 2021;
Rajbhandari et al., ZeRO-Infinity, SC 2021; as RoundPipe and others fine-tune large models on one card).

Kept: parameters, gradients and optimizer state in the host's memory, updates by the processor, a unit's parameters on
the device only while it works, the next one's on their way meanwhile. Of the sizes of micro-batches, and of all
activations held or computed again, the best is taken. Not kept: disks, updates beside the backward pass, several
devices. One of each make is tried; kinds whose memory is the processor's have nothing to offload to.

`single-device`: the best device alone (DESIGN idea 6), one of each kind and memory tried.

`single-site`: the best site alone (DESIGN idea 6), planned by `spantrain-dp`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeVar

from spantrain.core.plan import SumModel
from spantrain.core.quantities import format_bytes
from spantrain.core.shares import StateSharding
from spantrain.core.span import apportion, equal_spans
from spantrain.core.update.optimizers import division_refusal
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import Assembler, StageShape, draft_stage, with_limits
from spantrain.planner.request import PlanRequest, Proposal, Strategy
from spantrain.planner.strategies.spantrain_dp.strategy import candidates

A = TypeVar("A")
_PER_DEVICE, _PER_SITE = 2, 4
"""Plans proposed for a device, and for a site."""


def data_parallel(
    request: PlanRequest, state_sharding: StateSharding, sums: SumModel = SumModel.SPANTRAIN
) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with equal shares, and its state divided or not.

    Raises:
        InfeasiblePlanError: there are fewer samples than devices, some device cannot hold its part, all micro-batches
            that the job asks for are smaller than the devices are many, or the optimizer's state cannot be divided.
    """
    if state_sharding is not StateSharding.NONE and division_refusal(request.job.optimizer):
        raise InfeasiblePlanError(f"optimizer {request.job.optimizer} needs whole parameters for its updates")
    devices = request.devices_within_quotas
    sizes = _sizes(request, len(devices))
    assembler = Assembler(request, sums)
    shape = StageShape(units=range(assembler.units), devices=devices, state_sharding=state_sharding)
    return assembler.best((((shape,), size, None) for size in sizes), "1f1b")


DDP: Strategy = partial(data_parallel, state_sharding=StateSharding.NONE, sums=SumModel.TORCH_DDP)
ZERO1: Strategy = partial(data_parallel, state_sharding=StateSharding.ZERO1)
ZERO2: Strategy = partial(data_parallel, state_sharding=StateSharding.ZERO2)
FSDP: Strategy = partial(data_parallel, state_sharding=StateSharding.ZERO3)


def offload(request: PlanRequest, *, known: bool = False) -> tuple[Proposal, ...]:
    """Propose the whole model on one device of each make, its state in its host's memory (`known`: whose size is).

    Raises:
        InfeasiblePlanError: none has room for it, with itself or in its host; each refusal is in the message.
    """
    return _of_all(partial(_offloaded, request, known=known), _one_of_each_make(request))


def _one_of_each_make(request: PlanRequest) -> Iterable[str]:
    alike: dict[object, str] = {}
    for name in request.devices_within_quotas:
        alike.setdefault(request.profile.cluster.device_by_name[name].make, name)
    return alike.values()


def _of_all(propose: Callable[[A], Iterable[Proposal]], entries: Iterable[A]) -> tuple[Proposal, ...]:
    """Return what is proposed for all of some devices, or sets of them.

    Raises:
        InfeasiblePlanError: nothing is; each refusal is in the message.
    """
    found, refusals = list[Proposal](), list[str]()
    for entry in entries:
        try:
            found += propose(entry)
        except InfeasiblePlanError as error:
            refusals.append(str(error))
    if not found:
        raise InfeasiblePlanError("; ".join(refusals))
    return tuple(found)


def _offloaded(request: PlanRequest, name: str, *, known: bool) -> list[Proposal]:
    """Return plans of one device, with as many samples in flight as fit, all units computed again and none."""
    cluster, assembler = request.profile.cluster, Assembler(request)
    device = cluster.device_by_name[name]
    if cluster.kind_by_name[device.kind].unified_memory:
        raise InfeasiblePlanError(f"{name} has its processor's memory: there is nothing to offload to.")
    has_bytes = next(host.memory_bytes for host in cluster.hosts if host.name == device.host)
    if known and has_bytes is None:
        raise InfeasiblePlanError(f"{device.host}: nobody says how much memory it has (the host's memory).")
    units, found = range(assembler.units), list[Proposal]()
    for size, again in product(request.job.micro_batch_sizes(), (False, True)):
        spans = equal_spans(request.job.global_batch, size)
        draft = draft_stage(units, spans, [((name,), 1.0, (1.0,))], StateSharding.OFFLOAD)
        needs_bytes = assembler.memory.host_bytes(draft)
        if has_bytes is not None and needs_bytes > has_bytes:
            needs, has = format_bytes(needs_bytes), format_bytes(has_bytes)
            raise InfeasiblePlanError(f"{device.host} needs {needs} for the state of {name}, has {has}.")
        draft = replace(draft, recompute=tuple(units) if again else ())
        stage = with_limits(draft, assembler.memory, splits=False)
        if stage is not None:
            plan = request.job.plan_of(request.profile, [stage], schedule="1f1b")
            found.append(Proposal(plan=plan, own_estimate_s=None))
    if not found:
        raise InfeasiblePlanError(f"{name} has no room for the largest layer and one sample's activations.")
    return found


def _sizes(request: PlanRequest, count: int) -> list[int]:
    """Return the sizes of micro-batches to try, in which each device has a sample."""
    total, asked = request.job.global_batch, request.job.micro_batches
    if total < count:
        raise InfeasiblePlanError(f"{count} devices, but only {total} samples in a step: some would get none")
    if not asked:
        each = -(-total // count)
        return sorted({min(total, count * 2**power) for power in range(each.bit_length() + 1)})
    sizes = sorted(size for size in set(asked) if size >= count)
    if not sizes:
        of_what = ", ".join(map(str, sorted(set(asked))))
        raise InfeasiblePlanError(f"with micro-batches of {of_what}: {count} devices, so some would get no sample")
    return sizes


def equal_layers(
    schedule: str, request: PlanRequest, *, units_each: int = 1, devices: Sequence[str] = ()
) -> tuple[Proposal, ...]:
    """Propose a stage for each device, all with equally many units, in an order of work.

    Devices (none: all that may be used) that would have fewer than `units_each` are left out.

    Raises:
        InfeasiblePlanError: a stage does not fit on its device with any micro-batch size.
    """
    assembler, devices = Assembler(request), devices or request.devices_within_quotas
    most = max(1, assembler.units // units_each)
    return assembler.best(_options(assembler, request, devices[:most]), schedule)


def _options(
    assembler: Assembler, request: PlanRequest, devices: Sequence[str]
) -> Iterator[tuple[tuple[StageShape, ...], int, None]]:
    shapes, first = [], 0
    for name, count in zip(devices, apportion(assembler.units, [1.0] * len(devices)), strict=True):
        shapes.append(StageShape(units=range(first, first + count), devices=(name,)))
        first += count
    for size in request.job.micro_batch_sizes():
        yield tuple(shapes), size, None


GPIPE: Strategy = partial(equal_layers, "gpipe")
ONE_F_ONE_B: Strategy = partial(equal_layers, "1f1b")


def single_device(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on each kind of device.

    Raises:
        InfeasiblePlanError: no device can hold the model; each refusal is in the message.
    """
    ask = partial(candidates, request.profile, request.job, limit=_PER_DEVICE)
    return _of_all(ask, [(name,) for name in _one_of_each_make(request)])


def single_site(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans inside each site.

    Raises:
        InfeasiblePlanError: no site can hold the model; each refusal is in the message.
    """
    by_site: dict[str, list[str]] = {}
    for name in request.devices_within_quotas:
        by_site.setdefault(request.profile.cluster.device_by_name[name].site, []).append(name)
    return _of_all(partial(candidates, request.profile, request.job, limit=_PER_SITE), by_site.values())
