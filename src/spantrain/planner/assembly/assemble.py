"""Stages, sizes and a schedule as a Plan that fits into memory: what strategies of other papers are written in."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from spantrain.core.plan import Plan, Replica, Stage, SumModel
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.core.records import Record
from spantrain.core.shares import StateSharding, even_share
from spantrain.core.span import Span, equal_spans
from spantrain.cost.held_sizes import Division, divisions_in
from spantrain.cost.memory import MemoryCost
from spantrain.cost.span_tables import Array, SpanTables
from spantrain.cost.step import StepCost
from spantrain.cost.sums import default_sums
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.precision import LOW_WEIGHTS
from spantrain.planner.request import JobSpec, PlanRequest, Proposal

_PROPOSED = 3


@dataclass(frozen=True, slots=True)
class ReplicaDevices:
    """A replica to be: devices that divide tensors, the first of which leads, or one alone."""

    devices: tuple[str, ...]
    tp_shares: tuple[float, ...]


class StageShape(Record):
    """A stage without its samples."""

    units: range
    devices: tuple[str, ...]
    shares: tuple[int, ...] | None = None
    """Each replica's share of the samples; None: equal ones."""
    degrees: tuple[int, ...] | None = None
    """Devices of each replica's tensor-parallel group, which follow each other; None: every device is a replica."""
    state_sharding: StateSharding = StateSharding.NONE

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica."""
        ends = list(accumulate(self.degrees or (1,) * len(self.devices)))
        return tuple(self.devices[first:end] for first, end in pairwise((0, *ends)))


class Assembler:
    """Makes plans for one request with static schedules, and says by how much one does not fit.

    Their gradients are summed as a framework does it by default; what can be chosen is tuned when they are evaluated.
    """

    def __init__(self, request: PlanRequest, sums: SumModel = SumModel.SPANTRAIN) -> None:
        self._sums = sums
        self.profile, self.job = request.profile, request.job
        self.step_cost = StepCost(self.profile, self.job.dtype)
        self.spans = SpanTables(self.profile, self.job.optimizer, self.job.dtype)
        """The table for static schedules, which go back at once."""
        self.units, self.memory = self.spans.units, self.spans.memory

    def plan(self, shapes: Sequence[StageShape], size: int, schedule: str) -> Plan:
        """Return the plan with micro-batches of one size.

        Raises:
            InfeasiblePlanError: a device cannot hold what the schedule needs it to; the bytes of all such are named.
        """
        spans = equal_spans(self.job.global_batch, size)
        misses: list[str] = []
        stages = [
            self._stage(shape, spans, _held_at_once(schedule, len(shapes) - index, len(spans)), misses)
            for index, shape in enumerate(shapes)
        ]
        if misses:
            raise InfeasiblePlanError(f"with micro-batches of {size}: {'; '.join(misses)}")
        return self.job.plan_of(self.profile, stages, schedule=schedule)

    def _stage(self, shape: StageShape, spans: tuple[Span, ...], held: int, misses: list[str]) -> Stage:
        shares = shape.shares or (1,) * len(shape.groups)
        rows = ((group, share, (1.0,) * len(group)) for group, share in zip(shape.groups, shares, strict=True))
        draft = draft_stage(shape.units, spans, rows, shape.state_sharding)
        limits = []
        for index, replica in enumerate(draft.replicas):
            sizes = sorted(draft.sizes_by_replica[index], reverse=True)
            if sizes and sizes[-1] < (fewest := self.memory.fewest_samples(shape.units)):
                misses.append(f"{replica.devices[0]} runs {sizes[-1]} samples at once, and the model needs {fewest}")
            in_flight, share = max(1, sum(sizes[:held])), even_share(len(replica.devices))
            part = Division(tp_share=share, state_sharding=shape.state_sharding, replicas=len(shape.groups))
            for name in replica.devices:
                need = self.memory.need(shape.units, name, in_flight, max(sizes, default=0), part).peak_bytes
                have = self.profile.cluster.device_by_name[name].memory_bytes
                if need > have:
                    what = f"units {shape.units.start}-{shape.units.stop - 1}"
                    misses.append(f"{name} needs {format_bytes(need)} for {what}, has {format_bytes(have)}")
            limits.append(in_flight)
        return replace(draft.with_limits(limits), sums=default_sums(self._sums))

    def best(
        self, options: Iterable[tuple[Sequence[StageShape], int, float | None]], schedule: str
    ) -> tuple[Proposal, ...]:
        """Return proposals of those options (shapes, size, own estimate) that fit, a few best first.

        They are ranked by the closed form of `cost.step`: a stand-in for a user who tries a few of them out.

        Raises:
            InfeasiblePlanError: none fits; the closest misses are in the message.
        """
        found: list[tuple[float, Proposal]] = []
        misses: list[str] = []
        for shapes, size, own_estimate_s in options:
            try:
                plan = self.plan(shapes, size, schedule)
            except InfeasiblePlanError as error:
                misses.append(str(error))
                continue
            found.append((self.step_cost.estimate(plan).step_s, Proposal(plan=plan, own_estimate_s=own_estimate_s)))
        if not found:
            raise InfeasiblePlanError(misses[0] if misses else "nothing that it can express")
        found.sort(key=lambda entry: entry[0])
        return tuple(proposal for _, proposal in found[:_PROPOSED])


Row = tuple[tuple[str, ...], float, tuple[float, ...]]
"""A replica's devices, share of samples and tensor shares."""


def stages_between(
    cuts: Sequence[int], size: int, job: JobSpec, memory: MemoryCost, rows_of: Callable[[int, range], Sequence[Row]]
) -> list[Stage] | None:
    """Return stages that begin at these units (and the end); None if a replica's samples do not fit.

    `rows_of`: a stage's replicas, with samples by the times of some units. Those over the whole model were checked for
    memory by who made the cuts; those over the stage's own suit it better.
    """
    stages, spans = list[Stage](), equal_spans(job.global_batch, size)
    for number, (first, end) in enumerate(pairwise(cuts)):
        both = (rows_of(number, timed) for timed in (range(first, end), range(cuts[-1])))
        drafts = (draft_stage(range(first, end), spans, rows) for rows in both if min(n for _, n, _ in rows) > 0)
        made = next(filter(None, (with_limits(one, memory, job.splits_backward) for one in drafts)), None)
        if made is None:
            return None
        stages.append(made)
    return stages


def draft_stage(
    units: range, spans: tuple[Span, ...], rows: Iterable[Row], state_sharding: StateSharding = StateSharding.NONE
) -> Stage:
    """Return a stage that may hold all samples."""
    return Stage(
        first_unit=units.start,
        end_unit=units.stop,
        micro_batches=spans,
        state_sharding=state_sharding,
        replicas=tuple(
            Replica(devices=devices, sample_share=float(share), in_flight_limit=spans[-1].hi, tp_shares=tp_shares)
            for devices, share, tp_shares in rows
        ),
    )


def with_limits(stage: Stage, memory: MemoryCost, splits: bool) -> Stage | None:
    """Return a stage with the in-flight limits that memory allows; None if a device lacks room for a micro-batch, or
    has fewer samples at once than its units need. One that gets no sample of any keeps its limit.

    `splits`: as in `cost.memory.Division`.
    """
    limits = []
    for index, replica in enumerate(stage.replicas):
        sizes = stage.sizes_by_replica[index]
        if not sizes:
            limits.append(replica.in_flight_limit)
            continue
        limit = memory.limit_in(stage, index, divisions_in(stage, replica, splits=splits))
        if limit < max(sizes) or min(sizes) < memory.fewest_samples(stage.units):
            return None
        limits.append(limit)
    return stage.with_limits(limits)


def _held_at_once(schedule: str, left: int, micro_batches: int) -> int:
    """Return the micro-batches that a stage holds at once; `left`: the stages from it to the last."""
    if schedule == "gpipe":
        return micro_batches
    assert schedule == "1f1b", schedule
    return min(left, micro_batches)


def least_largest(costs: Sequence[Array]) -> tuple[float, tuple[int, ...]]:
    """Place the cuts so that the largest cost is least; `costs[k][i, j]` is that of units i to j-1 in place k."""
    units = costs[0].shape[0] - 1
    allowed = np.tril(np.ones((units + 1, units + 1))) == 0
    value: Array = np.where(allowed, costs[-1], np.inf)[:, units]
    choices: list[np.ndarray] = []
    for cost in reversed(costs[:-1]):
        table = np.maximum(np.where(allowed, cost, np.inf), value[None, :])
        choice = table.argmin(axis=1)
        value = table[np.arange(units + 1), choice]
        choices.append(choice)
    return float(value[0]), begins_by(choices, units)


def begins_by(choices: Sequence[np.ndarray], units: int) -> tuple[int, ...]:
    """Return where each place begins, then the end; `choices[-1 - k][i]`: where place k ends if it begins at unit i."""
    begins = [0]
    for choice in reversed(choices):
        begins.append(int(choice[begins[-1]]))
    return (*begins, units)


def infeasible(profile: Profile, job: JobSpec, devices: Sequence[str]) -> InfeasiblePlanError:
    """Return the refusal, with what each device would need in the best even spreading over all of them."""
    spans = job.span_tables(profile)
    memory = {name: profile.cluster.device_by_name[name].memory_bytes for name in devices}
    largest_first = sorted(devices, key=lambda name: -memory[name])[: spans.units]
    needs = [spans.need(name, 1, 1) for name in largest_first]
    fullest, begins = least_largest([need / memory[name] for need, name in zip(needs, largest_first, strict=True)])
    lines = [
        f"{name} needs {format_bytes(need[first, end])} for units {first}-{end - 1}, has {format_bytes(memory[name])}"
        + " (too much)" * bool(need[first, end] > memory[name])
        for name, need, first, end in zip(largest_first, needs, begins[:-1], begins[1:], strict=True)
    ]
    whole = spans.memory.state_bytes(range(spans.units))
    advice = "Use more devices, a lighter optimizer (sgd), or a smaller model."
    if profile.graph.trained_bytes < profile.graph.parameter_bytes / 2 and profile.dtype != LOW_WEIGHTS:
        advice = f"Hold what is not trained in 16 bits (--dtype {LOW_WEIGHTS}), or use more devices or a smaller model."
    if fullest <= 1:
        advice = f"That would fit, {job.micro_batch_sizes()[0]} samples in a micro-batch do not: name smaller ones."
    return InfeasiblePlanError(
        f"{profile.model.name} does not fit on {', '.join(devices)}: parameters, gradients and "
        f"{job.optimizer} state take {format_bytes(whole)} in all, the devices have "
        f"{format_bytes(sum(memory.values()))}; spread out as well as can be, with one sample in flight: "
        f"{'; '.join(lines)}. {advice}"
    )
