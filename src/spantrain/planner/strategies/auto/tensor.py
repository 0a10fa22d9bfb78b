"""Plans whose replicas divide tensors inside a host: a small search beside the large one, where that is allowed.

A stage has one host's devices, as tensor-parallel groups of one degree: devices of one kind in equal shares, or all of
a host's unlike devices in shares by speed (SpanTrain, Chinese paper, second-level groups). Stages go along hosts of
falling speed, all groups of a host as replicas, or along the groups of one host. Cuts make the largest stage's work
least among those that fit. It pays where a unit fits on no device alone, or where few samples are to be had quickly.
Kept of the paper: unequal shares by capacity. Not kept: groups over several hosts.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from spantrain.core.plan import Plan, Stage
from spantrain.core.quantities import format_seconds
from spantrain.planner.assembly.assemble import ReplicaDevices, least_largest
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.score import Score, Scorer
from spantrain.planner.strategies.spantrain.strategy import build_plan
from spantrain.planner.strategies.spantrain.tables import WayTables
from spantrain.planner.strategies.spantrain.ways import Slot

_MAX_STAGES = 6
_SIMULATED = 24
_PROPOSED = 2
_ALL_BY_SPEED, _ALL_EVEN = 0, 1
_SPEED_AT = 4
"""Samples at which devices are compared."""


GroupRow = tuple[tuple[ReplicaDevices, ...], ...]
"""By stage: its replicas."""


def divided_proposals(request: PlanRequest, best: Score | None) -> tuple[Proposal, ...]:
    """Return the best plans in which some replica divides tensors, best first.

    Only those are returned that are clearly better than the best plan without.

    Raises:
        ProfileError: the profile lacks a timing or a link.
    """
    search, worth = TensorSearch(request), request.constraints.tensor_parallel.worth
    plans: dict[tuple[Stage, ...], tuple[float, Plan]] = {}
    for row in search.rows():
        for size in request.job.micro_batch_sizes():
            made = search.plan(row, size)
            if made is not None:
                plans[made[0].stages] = made[::-1]
    scorer, found = Scorer(request), list[tuple[Score, Plan, float]]()
    for _, plan in sorted(plans.values(), key=lambda entry: entry[0])[:_SIMULATED]:
        scored = scorer.score(plan)
        if scored is not None and scored[1].fits and (best is None or scored[0].is_clearly_under(best, worth)):
            found.append((scored[0], plan, scored[1].step_s))
    found.sort(key=lambda entry: entry[0])
    return tuple(
        Proposal(plan=plan, own_estimate_s=plans[plan.stages][0], reasons=_reasons(plan, step_s))
        for _, plan, step_s in found[:_PROPOSED]
    )


class TensorSearch:
    """Makes plans of rows of groups, and rows of hosts."""

    def __init__(self, request: PlanRequest) -> None:
        self._names, self._dividing = request.devices_within_quotas, request.dividing
        self._devices = request.profile.cluster.device_by_name
        self._tables = WayTables(request.profile, request.job)

    def rows(self) -> Iterator[GroupRow]:
        """Yield pipelines of hosts, fastest first, each divided in the same way as far as it can be."""
        hosts: dict[tuple[str, str], list[str]] = {}
        for name in self._names:
            hosts.setdefault((self._devices[name].site, self._devices[name].host), []).append(name)
        order = sorted(hosts.values(), key=lambda names: sum(self._alone_s(name) ** -1 for name in names), reverse=True)
        degrees = [2**k for k in range(1, max(len(names) for names in order).bit_length())]
        for degree in (_ALL_BY_SPEED, _ALL_EVEN, *degrees):
            ways = [self._groups(names, degree) for names in order]
            if all(len(group.devices) == 1 for way in ways for group in way):
                continue
            for count in range(1, min(len(ways), _MAX_STAGES) + 1):
                yield tuple(ways[:count])
            for way in self._unlike(ways):
                if 1 < len(way) <= _MAX_STAGES:
                    yield tuple((group,) for group in way)
                if way is not ways[0]:
                    yield (way,)

    def _unlike(self, ways: Sequence[tuple[ReplicaDevices, ...]]) -> list[tuple[ReplicaDevices, ...]]:
        """Return the first of those ways whose devices are of the same kinds and in the same site."""
        found: dict[object, tuple[ReplicaDevices, ...]] = {}
        for way in ways:
            devices = [self._devices[name] for group in way for name in group.devices]
            found.setdefault(tuple((device.site, device.kind, device.memory_bytes) for device in devices), way)
        return list(found.values())

    def plan(self, row: GroupRow, size: int) -> tuple[Plan, float] | None:
        """Return the plan of a pipeline with the work of its largest stage in a step; None if it does not fit."""
        slots = [Slot(members=groups, even=False) for groups in row]
        arrays = [self._tables.slot(slot, size) for slot in slots]
        found = [own.run for own in arrays if own is not None]
        if len(found) < len(row) or len(row) > self._tables.units:
            return None
        longest_s, begins = least_largest(found)
        plan = build_plan(self._tables, slots, begins, size) if np.isfinite(longest_s) else None
        filled = (len(row) - 1) * size / self._tables.job.global_batch
        return None if plan is None else (plan, longest_s * (1 + filled))

    def _groups(self, names: Sequence[str], degree: int) -> tuple[ReplicaDevices, ...]:
        """Divide a host's devices into groups of so many of a kind, or all into one, by speed or even."""
        if names[0] not in self._dividing:
            degree = 1
        if degree in (_ALL_BY_SPEED, _ALL_EVEN):
            speeds = [1 / self._alone_s(name) if degree == _ALL_BY_SPEED else 1.0 for name in names]
            order = sorted(range(len(names)), key=lambda index: -speeds[index])
            return (ReplicaDevices(tuple(names[k] for k in order), tuple(speeds[k] / sum(speeds) for k in order)),)
        kinds: dict[tuple[str, int], list[str]] = {}
        for name in names:
            kinds.setdefault((self._devices[name].kind, self._devices[name].memory_bytes), []).append(name)
        groups = (own[first : first + degree] for own in kinds.values() for first in range(0, len(own), degree))
        return tuple(ReplicaDevices(tuple(group), (1 / len(group),) * len(group)) for group in groups)

    def _alone_s(self, name: str) -> float:
        units = range(self._tables.units)
        return self._tables.spans.kind_seconds(self._devices[name].kind, units, _SPEED_AT)


def _reasons(plan: Plan, step_s: float) -> tuple[str, ...]:
    lines = []
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            if len(replica.devices) > 1:
                shares = " : ".join(f"{share:.0%}" for share in replica.tp_shares)
                lines.append(f"Stage {index}: {'+'.join(replica.devices)} divide its tensors {shares}.")
    lines.append(f"With tensors divided so, a step takes {format_seconds(step_s)}.")
    return tuple(lines)
