"""Interleaved pipelines: layers dealt out to a pipeline's devices in several rounds, in turn or there and back.

(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2; Qi et al.,
"Pipeline Parallelism with Controllable Memory", 2024.) A device waits for less at a step's begin and end, where the
pipeline fills and drains, for more messages. Kept: rounds of all devices, and two rounds that turn at the end. Not
kept: equal numbers of layers; each device gets in all about what it had, by the seconds that its units take.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, cycle
from typing import TypeVar

from spantrain.core.action import SPLIT_OPS
from spantrain.core.plan import Plan
from spantrain.core.units import UnitGraph
from spantrain.cost.memory import MemoryCost
from spantrain.cost.replicas import ReplicaCost
from spantrain.errors import InfeasiblePlanError, PlanError, ProfileError
from spantrain.formats.registry import WireFormat
from spantrain.planner.request import JobSpec, PlanRequest, Proposal, Restriction, Strategy
from spantrain.planner.strategies.baselines import equal_layers
from spantrain.planner.strategies.dealing import Dealt, dealt
from spantrain.planner.strategies.score import looks_of, structure_of
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import ProfileCosts, StepCosts
from spantrain.sim.search.interleaved import quick_step_s, with_interleaved_order
from spantrain.sim.search.model import Room

A = TypeVar("A")
_DEVICES = 32
"""A pipeline of more devices is not interleaved: its search would take seconds."""
_KINDS = 4
"""Sets of devices of a kind in a site, the fastest, that are tried as a pipeline by themselves."""
_WORTH = 0.995
"""A pipeline is proposed if it takes less than this part of the best plan's step."""
_PIPELINES, _QUICK = 2, 100_000
"""So many pipelines are interleaved, and more as long as quick simulations of all had no more actions than that; so
many again are there for other cuts and orders of work, however many pipelines there were."""
_SPARED = 0.75
"""Part of a plan's actions that is not counted if it is seen not to be worth it before it is simulated to its end."""
_SEARCHED, _ORDERS = 12, 10
"""Cuts and the order of work are searched of the best by a quick rule until so many in a row are no better; what an
order costs, in simulations."""
_ORDER_GAINS, _CUTS_GAIN = 1.15, 1.4
"""What that brings at most, mostly; and with cuts that move."""


def interleaved(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose interleaved pipelines over all devices, in the order of the cluster file.

    Raises:
        InfeasiblePlanError: there is no room for any, nothing to deal out, or another order of work is asked for.
    """
    if request.job.schedule != JobSpec.schedule:
        raise InfeasiblePlanError(
            f"interleaved pipelines are planned with an order of their own, not {request.job.schedule}; "
            "leave out --schedule"
        )
    bases = [base.plan for base in equal_layers("1f1b", request, units_each=2)]
    found = tuple(interleavings(bases, request))
    if not found:
        devices, units = len(bases[0].devices), bases[0].stages[-1].end_unit
        raise InfeasiblePlanError(
            f"no interleaved pipeline of {units} units over {devices} devices: it takes two devices or more (and up to "
            f"{_DEVICES}), two units for each, and room for several micro-batches on all of them"
        )
    return found


def with_interleaved(strategy: Strategy) -> Strategy:
    """Return a strategy that proposes interleaved forms of its pipelines, too, where they are better than all others.

    That may be if a pipeline would be the best were no device to wait in it, and of devices whose layers have yet to be
    dealt out by what they take. None are proposed where the request is for
    another order of work than the default, or does not let devices have several stages. What gains next to nothing is
    left out: in mid-step interleaved plans do not follow the network.
    """

    def propose(request: PlanRequest) -> tuple[Proposal, ...]:
        proposals, limits = strategy(request), request.constraints
        plain = request.restriction is Restriction.NONE and request.job.schedule == JobSpec.schedule
        if not (plain and limits.interleaving) or limits.recompute_all or limits.sequence_parallel:
            return proposals
        # Limits of time are no bar: these plans may be shorter when they are interleaved.
        money = replace(limits, min_samples_per_s=None, max_step_s=None)
        done = [
            (evaluation, one.plan)
            for one in proposals
            if (evaluation := request.evaluate(one.plan)).fits
            and not (evaluation.broken(money) or limits.broken_by_devices(request.profile.cluster, one.plan.devices))
        ]
        best_s = min((evaluation.step_s for evaluation, _ in done), default=math.inf)
        done.sort(key=lambda entry: entry[0].step_s, reverse=True)
        worth = ((found, plan) for found, plan in done if found.step_s * (1 - found.bubble_ratio) < _WORTH * best_s)
        unlike = {looks_of(plan, found.step_s): plan for found, plan in worth}
        bases = {(structure_of(plan), *(stage.devices for stage in plan.stages)): plan for plan in unlike.values()}
        best_first = sorted(bases.values(), key=lambda plan: request.evaluate(plan).step_s)
        more = interleavings(chain(best_first, _others(request, best_s)), request, _WORTH * best_s)
        return (*proposals, *(one for one in more if request.evaluate(one.plan).step_s < _WORTH * best_s))

    return propose


def _others(request: PlanRequest, best_s: float) -> Iterator[Plan]:
    """Yield pipelines of all devices, and of those of each kind in a site that could compute in less than that."""
    graph, cluster, alike = request.profile.graph, request.profile.cluster, dict[tuple[str, str], list[str]]()
    for name in request.devices_within_quotas:
        device = cluster.device_by_name[name]
        alike.setdefault((device.site, device.kind), []).append(name)
    compute, batch = ReplicaCost(request.profile, request.job.dtype).groups.compute, request.job.global_batch
    may = dict[tuple[float, float], list[str]]()
    for (site, kind), names in alike.items():
        with suppress(ProfileError):
            whole_s = sum(compute.kind_seconds(range(len(graph.units)), kind, op, batch) for op in SPLIT_OPS)
            if whole_s / len(names) < best_s and 1 < len(names) <= _DEVICES:
                may.setdefault((whole_s / len(names), -cluster.site_by_name[site].bandwidth_bytes_per_s), names)
    for devices in [[], *(may[key] for key in sorted(may)[:_KINDS])]:
        with suppress(InfeasiblePlanError):
            yield from (base.plan for base in equal_layers("1f1b", request, units_each=2, devices=devices))


def interleavings(bases: Iterable[Plan], request: PlanRequest, below_s: float = math.inf) -> Iterator[Proposal]:
    """Yield pipelines with their layers dealt out otherwise: of all of them those that seem best.

    None in which a device works for `below_s` or longer.
    """
    graph, quick, rows = (
        request.profile.graph,
        _Quick(request, _CUTS_GAIN * below_s),
        dict[object, tuple[float, Dealt]](),
    )
    for number, base in enumerate(base for base in bases if may_interleave(base)):
        if number >= _PIPELINES and quick.actions_left <= 0:
            break
        for one in dealt(base, quick.replicas(base.dtype), graph, below_s):
            if one.key not in rows:
                rows[one.key] = quick.step_s(one.plan), one
    best_s, in_vain = below_s, 0
    quick.actions_left, ordered = _QUICK, set[object]()
    for step_s, one in sorted(rows.values(), key=lambda row: row[0]):
        enough = quick.actions_left <= (0 if in_vain > 1 else -_QUICK)
        if in_vain >= _SEARCHED or (in_vain and enough) or step_s > _CUTS_GAIN * below_s:
            break
        recut, in_vain = quick.recut(one, step_s), in_vain + 1
        for other_s, other in (recut,) if recut[1] is one else (recut, (step_s, one)):
            if other.key in ordered or other_s > _ORDER_GAINS * best_s:
                continue
            ordered.add(other.key)
            found = quick.ordered(other.plan, best_s)
            found_s = math.inf if found is None or found.hints is None else found.hints.predicted_s
            if found is not None and found_s < best_s:
                best_s, in_vain = found_s, 0
                yield Proposal(plan=found, own_estimate_s=None, reasons=tuple(_reasons(found, graph)))
            if found_s < step_s:
                break  # the cuts that it had before can hardly be better


class _Quick:
    """Simulates interleaved plans by a quick rule, and counts their actions."""

    def __init__(self, request: PlanRequest, most_s: float) -> None:
        self._profile, self.actions_left, self._most_s = request.profile, _QUICK, most_s
        self._memory = MemoryCost(request.profile, request.job.optimizer, request.job.dtype)
        self.replicas = cache(partial(ReplicaCost, request.profile))
        """What replicas cost, by dtype."""

    def step_s(self, plan: Plan, most_s: float = math.inf) -> float:
        """Return the seconds of a step; infinite where it cannot run, takes too long, or a size was not measured."""
        before = self.actions_left
        found = self._run(partial(quick_step_s, most_s=min(most_s, self._most_s)), 2, plan)
        if found is None or found == math.inf:
            self.actions_left += int((before - self.actions_left) * _SPARED)
            return math.inf
        return found

    def ordered(self, plan: Plan, most_s: float) -> Plan | None:
        """Return the plan with the best order that is found; None where it cannot run, or none takes less than that."""
        may = self._run(lambda one, costs, _: step_bound_s(one, costs) < most_s, 1, plan)
        return self._run(with_interleaved_order, _ORDERS, plan) if may else None

    def _run(self, run: Callable[[Plan, StepCosts, dict[str, Room]], A], times: int, plan: Plan) -> A | None:
        rooms, replicas = rooms_of(plan, self._memory), self.replicas(plan.dtype)
        self.actions_left -= times * 3 * sum(len(stage.replicas) * len(stage.micro_batches) for stage in plan.stages)
        with suppress(PlanError, ProfileError):
            return None if rooms is None else run(plan, ProfileCosts(self._profile, plan, replicas=replicas), rooms)
        return None

    def recut(self, one: Dealt, step_s: float) -> tuple[float, Dealt]:
        """Return a pipeline with its seconds, its cuts moved while that helps, and half of the actions are left."""
        enough, in_vain = max(0, self.actions_left // 2), 0
        for cuts, way in cycle(one.ways):
            while (other := one.moved(cuts, way)) is not None and self.actions_left > enough:
                if other.busy_s >= step_s or (found_s := self.step_s(other.plan, step_s)) >= step_s:
                    break
                step_s, one, in_vain = found_s, other, 0
            in_vain += 1
            if in_vain > len(one.ways) or self.actions_left <= enough:
                break
        return step_s, one


def _reasons(plan: Plan, graph: UnitGraph) -> Iterator[str]:
    """Yield why devices have several stages."""
    first, end, many = plan.stages[0], plan.stages[-1], sum(crew.several for crew in plan.crews)
    shared = [{name for unit in stage.units for name in graph.units[unit].shared} for stage in (first, end)]
    if first.devices == end.devices and shared[0] & shared[1]:
        yield f"{first.devices[0]} begins the pipeline and ends it: what both ends share is in one place."
    if many > 1:
        yield f"{many} devices have several stages each, and so wait for less where the pipeline fills and drains."


def may_interleave(plan: Plan) -> bool:
    """Whether a pipeline's devices may have several stages each: nothing is divided or computed again, or on its way
    as something else.
    """
    plain = all(len(one.devices) == 1 for stage in plan.stages for one in stage.replicas) and not any(
        stage.divides_state or stage.offloads or stage.recompute or stage.wire_format is not WireFormat.NATIVE
        for stage in plan.stages
    )
    alike = len({stage.micro_batches for stage in plan.stages}) == 1
    return plain and alike and not plan.interleaved and 1 < len(plan.stages) <= _DEVICES


def rooms_of(plan: Plan, memory: MemoryCost) -> dict[str, Room] | None:
    """Return what devices may hold of samples in flight; None where some have no room for one micro-batch."""
    found = {}
    for device, (besides, sample_bytes) in memory.crew_sizes(plan).items():
        left = plan.cluster.device_by_name[device].memory_bytes - besides
        crew = plan.crew_of(device)
        number = crew.replica_index(device)
        spans = {k: stage.replica_spans(number) for k, stage in zip(crew.numbers, crew.stages, strict=True)}
        largest = sum(max((s.size for s in own), default=0) * sample_bytes[k] for k, own in spans.items())
        if left < largest:
            return None
        found[device] = Room(size_bytes=left, sample_bytes=sample_bytes)
    return found
