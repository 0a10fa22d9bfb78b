"""One device's part of a stage, or of its several stages: its groups, its units with what it holds of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.errors import ConfigError
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.low_weights import LowWeights, with_low_weights
from spantrain.models.statistics import BatchStatistics, JoinedDevices, statistics_parts
from spantrain.models.tensor_parallel.shard import notices, partial_parameters, shard_units
from spantrain.models.units import UnitModule, parameter_names
from spantrain.runtime.gradients.groups import StageGroups
from spantrain.runtime.gradients.own_rows import OwnRows, own_rows
from spantrain.runtime.gradients.part_sums import GroupParts, share_parts
from spantrain.runtime.gradients.stage_sums import tied_across_stages
from spantrain.runtime.gradients.unit_shards import UnitShards
from spantrain.runtime.step.context import WorkerContext
from spantrain.schedule.joint import check_joint


class StageMember(Record):
    """What one device is and has within its stage, or within all of its stages."""

    numbers: tuple[int, ...]
    """Of its stages, rising."""
    replica: Replica
    groups: StageGroups
    units: tuple[UnitModule, ...]
    """Of all of its stages."""
    chunks: tuple[StageExecutor, ...]
    """What runs each of its stages."""
    parts: GroupParts
    shares: Mapping[str, tuple[float, ...]]
    """By device of the replica: the part of each unit that it computes."""
    partial: tuple[str, ...]
    """Parameters that all members hold whole, but of whose gradient each has a part of the sum."""
    notices: tuple[str, ...]
    """What could not be divided."""
    unlike: bool
    """Whether the replica's devices are of several kinds, whose results may differ in their last bits."""
    rows: Mapping[str, OwnRows] | None = None
    """What of its parameters it updates, by name; None: all."""
    shards: UnitShards | None = None
    """What replicas exchange around units, where they divide gradients."""
    second: StageExecutor | None = None
    """A copy with weights of its own, where two steps run at once (`runtime.worker.stale_session`)."""

    @property
    def stage_index(self) -> int:
        """The first of its stages."""
        return self.numbers[0]

    @property
    def executors(self) -> tuple[StageExecutor, ...]:
        """All of them: of its stages, or the two of one stage whose weights steps take in turn."""
        return self.chunks if self.second is None else (*self.chunks, self.second)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of all of its stages, by name in the unsplit model; of one that several share, in the first."""
        return named_once(self.chunks)

    @property
    def leads(self) -> bool:
        """Whether it decides for its replica."""
        return self.groups.replica.rank == 0


def named_once(chunks: Sequence[StageExecutor]) -> dict[str, nn.Parameter]:
    """Return the parameters of several stages, each once, by its name in the first that has it."""
    named = [(name, own) for chunk in chunks for name, own in chunk.named_parameters().items()]
    first = {id(own): (name, own) for name, own in reversed(named)}
    return dict(reversed(first.values()))


def build_member(here: WorkerContext, plan: Plan, units: Sequence[UnitModule], groups: StageGroups) -> StageMember:
    """Divide the stage's units, in place, and take this device's part of them to the device.

    Raises:
        ConfigError: the devices of the replica have not the same model, or it has no sequence to slice as planned.
        PlanError: replicas would wait for each other's statistics for ever.
    """
    crew = plan.crew_of(here.name)
    stage, stage_index = crew.first, crew.numbers[0]
    replica = stage.replicas[crew.replica_index(here.name)]
    names = [tuple(parameter_names(unit).values()) for unit in units]
    if stage.sequence_parallel and not any(unit.sequence_activation_bytes for unit in here.graph.units):
        raise ConfigError(
            f"stage {stage_index}: sequence_parallel, but no unit of {plan.model.name} is a transformer block of which "
            "all layers are known; leave it out of the plan (docs/tensor-parallel.md)"
        )
    group = groups.replica
    own = shard_units(units, replica.tp_shares, group.rank, group, sequence_parallel=stage.sequence_parallel)
    own |= statistics_parts(units)  # of all of them, what this member holds
    check_joint(plan, here.graph, statistics=here.job.joins_statistics)
    # Moved and rounded as one module, so that a parameter of two stages stays one.
    with_low_weights(nn.ModuleList(units), plan.dtype, here.device.torch_device)
    by_stage = dict(zip(crew.units, units, strict=True))
    chunks = tuple(
        stage_executor(here, plan, number, [by_stage[unit] for unit in one.units], groups)
        for number, one in zip(crew.numbers, crew.stages, strict=True)
    )
    rows = own_rows(plan, here.name, named_once(chunks))
    shards = _shards(here, plan, units, chunks[0], rows, groups)
    parts = share_parts(group, own, here.device.torch_device)
    return StageMember(
        numbers=crew.numbers,
        replica=replica,
        groups=groups,
        units=tuple(units),
        chunks=chunks,
        parts=parts,
        shares={
            member: unit_shares(held, names) for member, held in zip(replica.devices, parts.by_member, strict=True)
        },
        partial=partial_parameters(units),
        notices=tuple(f"{'+'.join(replica.devices)}: {text}" for text in notices(units)),
        unlike=len({plan.cluster.device_by_name[member].kind for member in replica.devices}) > 1,
        rows=rows,
        shards=shards,
    )


def _by_unit(stage: Stage) -> bool:
    """Whether something is done with parameters or gradients around each unit's work."""
    return stage.divides_gradients or stage.offloads


def _shards(
    here: WorkerContext,
    plan: Plan,
    units: Sequence[UnitModule],
    executor: StageExecutor,
    rows: Mapping[str, OwnRows] | None,
    groups: StageGroups,
) -> UnitShards | None:
    """Return what replicas exchange around units; divided parameters are given up, but for the own rows."""
    crew = plan.crew_of(here.name)
    stage, stage_index, named = crew.first, crew.numbers[0], executor.named_parameters()
    if not _by_unit(stage):
        return None
    tied = tied_across_stages(plan, stage_index, here.graph, units)
    shards = UnitShards(
        executor.segment_parameters,
        {id(own.whole): own for own in (rows or {}).values()},
        groups.ring,
        gathers=stage.keeps_rows,
        on_host=stage.offloads,
        summed_behind=[named[one.parameter] for one in tied],
    )
    if stage.keeps_rows:
        executor.low_weights = LowWeights(())  # each copy is made as it is gathered
    executor.shards = shards
    return shards


def stage_executor(
    here: WorkerContext, plan: Plan, stage_index: int, units: Sequence[UnitModule], groups: StageGroups
) -> StageExecutor:
    """Return what runs the units of a stage on a device, where they are taken."""
    stage, graph, job = plan.stages[stage_index], here.graph, here.job
    joined = JoinedDevices(group=groups.statistics, leads=groups.replica.rank == 0) if groups.statistics else None
    return StageExecutor(
        units, is_last=stage_index == len(plan.stages) - 1, global_batch=plan.global_batch, dtype=plan.dtype,
        torch_device=here.device.torch_device, seed=job.seed,
        recompute=[unit - stage.first_unit for unit in stage.recompute],
        trains_before=stage.first_unit > 0 and graph.units[stage.first_unit - 1].goes_back,
        statistics=BatchStatistics(units if job.takes_batch_statistics(plan.model) else (), joined),
        fewest_samples=graph.fewest_samples(stage.units), sums_samples=graph.sums_samples, by_unit=_by_unit(stage),
    )  # fmt: skip


def unit_shares(parts: Mapping[str, TensorPart], names: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """Return the part of each unit's products that a member computes: that of the matrices that it holds.

    `names` are the parameters of each unit. A unit without matrices of its own counts as whole.
    """
    found = []
    for of_unit in names:
        held = whole = 0
        for part in (parts[name] for name in of_unit if name in parts):
            if len(part.full_shape) > 1:
                held += torch.Size(part.shape).numel()
                whole += torch.Size(part.full_shape).numel()
        found.append(held / whole if whole else 1.0)
    return tuple(found)
