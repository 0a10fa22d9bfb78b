"""Stages, sizes and a schedule as a Plan that fits into memory: what strategies of other papers are written in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from spantrain.core.action import Op
from spantrain.core.plan import Plan, Replica, Stage, StateSharding, SumModel
from spantrain.core.quantities import format_bytes
from spantrain.core.shares import even_share
from spantrain.core.span import Span, equal_spans
from spantrain.cost.compute import ComputeCost
from spantrain.cost.memory import Division, MemoryCost
from spantrain.cost.network import NetworkCost
from spantrain.cost.step import StepCost
from spantrain.cost.sum_models import default_sums
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.shares import SampleShares
from spantrain.planner.assembly.tables import Array, Tables
from spantrain.planner.request import PlanRequest, Proposal

_PROPOSED = 3
_WHOLE = "1f1b"
"""Stands for the static schedules: they go back at once."""
_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """A stage without its samples."""

    units: range
    devices: tuple[str, ...]
    shares: tuple[int, ...] | None = None
    """Of the samples, for each replica; None: equal ones."""
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
        self.memory = MemoryCost(self.profile, self.job.optimizer, self.compute.dtype)
        self.shares = SampleShares(self.profile.cluster, self.compute)
        self.units = len(self.profile.graph.units)

    @property
    def compute(self) -> ComputeCost:
        """Seconds of work."""
        return self.step_cost.compute

    @property
    def network(self) -> NetworkCost:
        """Seconds of transfers."""
        return self.step_cost.network

    @cached_property
    def cut_bytes(self) -> Array:
        """Bytes of one sample over the cut in front of unit j, there and back, as [j]; 0 at both ends."""
        graph = self.profile.graph.units[:-1]
        return np.array([0.0, *(unit.cut_bytes_per_sample + unit.gradient_bytes_per_sample for unit in graph), 0.0])

    @cached_property
    def parameter_sums(self) -> Array:
        """Running sums of the units' parameter bytes; entry j is those of units 0 to j-1."""
        return np.cumsum([0.0, *(unit.parameter_bytes for unit in self.profile.graph.units)])

    def work_sums(self, kinds: Sequence[str], samples: int) -> Array:
        """Return running sums over units of the seconds of F, I and W, the mean over devices of these kinds."""
        rows = [[self.compute.prefix_seconds(kind, op, samples) for op in _OPS] for kind in kinds]
        return np.asarray(np.array(rows).sum(axis=1).mean(axis=0), dtype=np.float64)

    def kinds(self, devices: Iterable[str]) -> list[str]:
        """Return the kinds of devices."""
        return [self.profile.cluster.device_by_name[name].kind for name in devices]

    def need(self, device: str, largest: int, in_flight: int) -> Array:
        """Return the bytes that a device needs for units i to j-1, as [i, j]."""
        return self._tables.need(device, largest, in_flight)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.profile, replace(self.job, schedule=_WHOLE))

    def mean_bandwidth_bytes_per_s(self, devices: Sequence[str]) -> float:
        """Return the mean rate between neighbours in this order: what planners for one network are told."""
        pairs = list(pairwise(devices))
        if not pairs:
            return float("inf")
        return len(pairs) / sum(1 / self.network.link(a, b).bandwidth_bytes_per_s for a, b in pairs)

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
        return Plan(
            cluster=self.profile.cluster,
            model=self.profile.model,
            global_batch=self.job.global_batch,
            dtype=self.compute.dtype,
            stages=tuple(stages),
            schedule=schedule,
        )

    def _stage(self, shape: StageShape, spans: tuple[Span, ...], held: int, misses: list[str]) -> Stage:
        shares = shape.shares or (1,) * len(shape.groups)
        whole = (self.job.global_batch,) * len(shape.groups)
        draft = _stage_of(shape, spans, shares, whole)
        limits = []
        for index, group in enumerate(shape.groups):
            sizes = sorted((span.size for span in draft.replica_spans(index)), reverse=True)
            in_flight, part = max(1, sum(sizes[:held])), _division(shape, group)
            for name in group:
                need = self.memory.need(shape.units, name, in_flight, max(sizes, default=0), part).peak_bytes
                have = self.profile.cluster.device_by_name[name].memory_bytes
                if need > have:
                    what = f"units {shape.units.start}-{shape.units.stop - 1}"
                    misses.append(f"{name} needs {format_bytes(need)} for {what}, has {format_bytes(have)}")
            limits.append(in_flight)
        return replace(_stage_of(shape, spans, shares, tuple(limits)), sums=default_sums(self._sums))

    def best(
        self,
        options: Iterable[tuple[Sequence[StageShape], int, float | None]],
        schedule: str,
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


def _division(shape: StageShape, group: tuple[str, ...]) -> Division:
    return Division(tp_share=even_share(len(group)), state_sharding=shape.state_sharding, replicas=len(shape.groups))


def _stage_of(shape: StageShape, spans: tuple[Span, ...], shares: Sequence[int], limits: Sequence[int]) -> Stage:
    return Stage(
        first_unit=shape.units.start,
        end_unit=shape.units.stop,
        micro_batches=spans,
        state_sharding=shape.state_sharding,
        replicas=tuple(
            Replica(devices=group, sample_share=float(share), in_flight_limit=limit, tp_shares=(1.0,) * len(group))
            for group, share, limit in zip(shape.groups, shares, limits, strict=True)
        ),
    )


def _held_at_once(schedule: str, left: int, micro_batches: int) -> int:
    """Return the micro-batches that a stage holds at once; `left`: the stages from it to the last."""
    if schedule == "gpipe":
        return micro_batches
    assert schedule == "1f1b", schedule
    return min(left, micro_batches)
