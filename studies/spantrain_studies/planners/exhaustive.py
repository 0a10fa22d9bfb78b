"""The true optimum of small cases, for tests: every plan is simulated that a proven bound does not rule out.

The space: every subset of devices, every ordered partition of it into stages (devices of a stage are replicas), every
placement of cuts, every micro-batch size of the job, shares by capacity and those that differ by one sample moved
(`share_choices`), in-flight limits as large as memory allows, the job's schedule. Bounds are those of
`auto`; a plan whose bound is over what has been found is not simulated, since its simulation could not be lower.

Plans are arrays: structures (ordered parts), cuts, micro-batch sizes, each with its bound. Devices that nothing tells
apart (`twins`) stand for each other: of them only the first ones are used, in order.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

import numpy as np
from numpy.typing import NDArray

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.span_tables import Array
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.request import Objective, PlanRequest, Proposal
from spantrain.planner.strategies.auto.cuts import pipeline_bounds_s, values
from spantrain.planner.strategies.auto.hops import HOP_FIELDS, PipelinePart
from spantrain.planner.strategies.auto.parts import PART_FIELDS, PartCosts
from spantrain.planner.strategies.auto.shape import PlanShape, ShapeBuilder
from spantrain.planner.strategies.score import Score, Scorer, weights_of

_NEIGHBOUR_SHARES = 1.10
"""Of the shares by capacity, those count as neighbours whose slowest replica takes at most this much longer."""
_CHUNK = 200_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates:
    """Plans of one micro-batch size and number of stages that may be worth simulating."""

    size: int
    structures: tuple[tuple[PipelinePart, ...], ...]
    cuts: NDArray[np.int64]
    """By cut placement: the unit at which each part begins, then the end."""
    where: NDArray[np.int64]
    """By candidate: structure and cut placement."""
    step_s: Array
    """By candidate: a lower bound."""
    value: Array
    """By candidate: a lower bound on the objective."""

    def shape(self, index: int) -> PlanShape:
        """Return one of them."""
        structure, cut = self.where[index]
        begins = tuple(int(unit) for unit in self.cuts[cut])
        return PlanShape(size=self.size, parts=self.structures[structure], begins=begins)


class PlanSpace:
    """The search space of a request on a grid that has every unit."""

    def __init__(self, costs: PartCosts, profile: Profile, devices: Sequence[str]) -> None:
        self._costs = costs
        self._units = costs.units
        self._partitions = tuple(ordered_partitions(devices, twins(profile, devices), self._units))

    def candidates(self, size: int, most_s: float = np.inf, most: float = np.inf) -> Iterator[Candidates]:
        """Yield the candidates of a micro-batch size whose bounds are within `most_s` seconds and a value of `most`."""
        tables = _StackedTables(self._costs, size)
        by_count: dict[int, list[tuple[PipelinePart, ...]]] = {}
        for partition in self._partitions:
            choices = [share_choices(self._costs, devices, size) for devices in partition]
            for parts in product(*choices):
                by_count.setdefault(len(parts), []).append(parts)
        for count, structures in sorted(by_count.items()):
            cuts = np.array(
                [(0, *middle, self._units) for middle in combinations(range(1, self._units), count - 1)], dtype=np.int64
            )
            step = max(1, _CHUNK // len(cuts))
            for start in range(0, len(structures), step):
                found = tables.bounded(tuple(structures[start : start + step]), cuts, most_s, most)
                if len(found.where):
                    yield found


class _StackedTables:
    """Stacked arrays of all parts and hops of a micro-batch size."""

    def __init__(self, costs: PartCosts, size: int) -> None:
        self._costs, self._batch = costs, costs.batch(size)
        self._part_index: dict[PipelinePart, int] = {}
        self._hop_index: dict[tuple[PipelinePart, PipelinePart], int] = {}
        self._parts: list[Array] = []
        self._hops: list[Array] = []
        self._per_second: dict[tuple[str, ...], float] = {}
        self._barrier: dict[frozenset[str], float] = {}

    def bounded(
        self, structures: tuple[tuple[PipelinePart, ...], ...], cuts: NDArray[np.int64], most_s: float, most: float
    ) -> Candidates:
        """Return those within the limits: cheap terms first, all terms for what is left."""
        parts = np.array([[self._part(part) for part in parts] for parts in structures])
        hops = np.array([[self._hop(a, b) for a, b in pairwise(row)] for row in structures])
        stacked = np.array(self._parts)
        run = np.zeros((len(structures), len(cuts)))
        for stage in range(parts.shape[1]):
            run = np.maximum(
                run, stacked[:, 3][parts[:, stage][:, None], cuts[None, :, stage], cuts[None, :, stage + 1]]
            )
        barrier = np.array([self._barrier_s(row) for row in structures])
        run += barrier[:, None]
        structure, cut = np.nonzero(run <= min(most_s, np.finfo(float).max))
        fields = [
            stacked[parts[structure, stage], :, cuts[cut, stage], cuts[cut, stage + 1]].T
            for stage in range(parts.shape[1])
        ]
        ways = []
        if parts.shape[1] > 1:
            stacked_hops = np.array(self._hops)
            ways = [stacked_hops[hops[structure, s], :, cuts[cut, s + 1]].T for s in range(parts.shape[1] - 1)]
        tied = np.array([self._tied_s(row) for row in structures])[structure]
        step_s = pipeline_bounds_s(fields, ways, tied) + barrier[structure]
        per_second = np.array([self._second(row) for row in structures])[structure]
        value = values(fields, ways, per_second, step_s, counts_more=self._costs.weights.counts_more)
        keep = (step_s <= most_s) & (value <= most)
        where = np.stack([structure[keep], cut[keep]], axis=1)
        return Candidates(
            size=self._batch.size, structures=structures, cuts=cuts, where=where, step_s=step_s[keep], value=value[keep]
        )

    def _part(self, part: PipelinePart) -> int:
        found = self._part_index.get(part)
        if found is None:
            found = self._part_index[part] = len(self._parts)
            self._parts.append(self._costs.part(part, self._batch))
            assert self._parts[-1].shape[0] == len(PART_FIELDS)
        return found

    def _hop(self, lower: PipelinePart, upper: PipelinePart) -> int:
        found = self._hop_index.get((lower, upper))
        if found is None:
            found = self._hop_index[lower, upper] = len(self._hops)
            self._hops.append(self._costs.hop(lower, upper, self._batch))
            assert self._hops[-1].shape[0] == len(HOP_FIELDS)
        return found

    def _barrier_s(self, parts: tuple[PipelinePart, ...]) -> float:
        devices = frozenset(name for part in parts for name in part.devices)
        found = self._barrier.get(devices)
        if found is None:
            found = self._barrier[devices] = self._costs.barrier_s(sorted(devices))
        return found

    def _tied_s(self, parts: tuple[PipelinePart, ...]) -> float:
        return 0.0 if len(parts) == 1 else self._costs.tied_s(parts[0].devices[0], parts[-1].devices[0])

    def _second(self, parts: tuple[PipelinePart, ...]) -> float:
        return self._costs.weights.per_second(name for part in parts for name in part.devices)


def twins(profile: Profile, devices: Sequence[str]) -> dict[str, int]:
    """Return the class of each device: equal for those of one kind and place with equal links to all others."""
    cluster, links = profile.cluster, profile.link_by_pair
    classes: list[list[str]] = []
    found: dict[str, int] = {}

    def way(a: str, b: str) -> tuple[float, float, object] | None:
        link = links.get((a, b))
        return None if link is None else (link.latency_s, link.bandwidth_bytes_per_s, link.curve)

    def alike(a: str, b: str) -> bool:
        x, y = cluster.device_by_name[a], cluster.device_by_name[b]
        if (x.kind, x.memory_bytes, x.backend, x.site) != (y.kind, y.memory_bytes, y.backend, y.site):
            return False
        alone = all(len(cluster.host_by_name[device.host].devices) == 1 for device in (x, y))
        if not alone and x.host != y.host:
            return False
        others = [name for name in devices if name not in (a, b)]
        return way(a, b) == way(b, a) and all(
            way(a, other) == way(b, other) and way(other, a) == way(other, b) for other in others
        )

    for name in devices:
        number = next((k for k, members in enumerate(classes) if alike(members[0], name)), len(classes))
        if number == len(classes):
            classes.append([])
        classes[number].append(name)
        found[name] = number
    return found


def ordered_partitions(
    devices: Sequence[str], classes: dict[str, int], most_parts: int
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every way to put a non-empty subset of devices into at most so many ordered parts, twins used in order."""
    members: dict[int, list[str]] = {}
    for name in devices:
        members.setdefault(classes[name], []).append(name)
    order = {name: index for index, name in enumerate(devices)}
    for count in range(1, len(devices) + 1):
        for subset in combinations(devices, count):
            for partition in _ordered(subset):
                if len(partition) > most_parts:
                    continue
                flat = [name for part in partition for name in sorted(part, key=order.__getitem__)]
                used: dict[int, list[str]] = {}
                for name in flat:
                    used.setdefault(classes[name], []).append(name)
                if all(names == members[number][: len(names)] for number, names in used.items()):
                    yield partition


def _ordered(devices: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    if not devices:
        yield ()
        return
    for count in range(1, len(devices) + 1):
        for part in combinations(devices, count):
            rest = tuple(name for name in devices if name not in part)
            for tail in _ordered(rest):
                yield (part, *tail)


def share_choices(costs: PartCosts, devices: tuple[str, ...], size: int) -> tuple[PipelinePart, ...]:
    """Return a part with its shares by capacity, and with those that differ by one sample and are hardly slower.

    None at all if a device would get no sample.
    """
    shares = costs.shares(devices, size)
    if min(shares) == 0:
        return ()
    found = [PipelinePart(devices, shares)]

    def slowest(samples: Sequence[int]) -> float:
        return max(costs.replica_seconds(name, count) for name, count in zip(devices, samples, strict=True))

    least = slowest(shares)
    for giver, taker in permutations(range(len(devices)), 2):
        samples = list(shares)
        samples[giver] -= 1
        samples[taker] += 1
        if samples[giver] > 0 and slowest(samples) <= _NEIGHBOUR_SHARES * least:
            found.append(PipelinePart(devices, tuple(samples)))
    return tuple(found)


MAX_DEVICES = 6
MAX_UNITS = 12
_SAME = 1 - 1e-9
"""Bounds must be under the best by rounding errors at least."""
_FIRST = 40
"""So many of the lowest bounds of each micro-batch size are kept to begin with."""


def exhaustive(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plan there is, alone.

    Raises:
        PlanError: there are too many devices or units for it.
        InfeasiblePlanError: nothing fits into memory.
    """
    devices, units = request.devices, len(request.profile.graph.units)
    if len(devices) > MAX_DEVICES or units > MAX_UNITS:
        raise PlanError(
            f"exhaustive takes up to {MAX_DEVICES} devices and {MAX_UNITS} units, got {len(devices)} and {units}; "
            "leave devices out, or use auto"
        )
    search = _WholeSpaceSearch(request)
    search.look_at_promising()
    search.finish()
    if search.best is None:
        raise InfeasiblePlanError(
            f"{request.profile.model.name}: of all ways to place it on {', '.join(devices)} none fits into memory; "
            "use more devices, a lighter optimizer (sgd), smaller micro-batches or a smaller model"
        )
    score, plan = search.best
    reason = f"The least of {search.seen} plans that could be the best, {search.simulated} of them simulated."
    return (Proposal(plan=plan, own_estimate_s=None, reasons=(reason,) if score.broken == 0 else ()),)


class _WholeSpaceSearch:
    """Branch and bound over the whole space."""

    def __init__(self, request: PlanRequest) -> None:
        profile, job = request.profile, request.job
        weights = weights_of(profile.cluster, request.objective, job.global_batch)
        self._costs = PartCosts(request, weights, range(len(profile.graph.units) + 1), exact_sums=True)
        self._builder = ShapeBuilder(request, self._costs, "exhaustive")
        self._scorer = Scorer(request)
        self._space = PlanSpace(self._costs, profile, request.devices)
        self._sizes = job.micro_batch_sizes()
        self._time_only = request.objective is Objective.THROUGHPUT
        self._done: set[tuple[int, object, object]] = set()
        self.best: tuple[Score, Plan] | None = None
        self.seen = 0

    @property
    def simulated(self) -> int:
        """How many plans have been simulated."""
        return self._scorer.simulated

    def look_at_promising(self) -> None:
        """Simulate the few plans with the lowest bounds, so that most others need not be."""
        lowest = heapq.nsmallest(_FIRST * len(self._sizes), self._all(float("inf")), key=lambda entry: entry[0])
        for value, group, index in lowest:
            self._look_at(value, group, index)

    def finish(self) -> None:
        """Simulate all plans whose bounds are under the best, lowest first."""
        rest = sorted(self._all(self._limit), key=lambda entry: entry[0])
        self.seen = len(rest)
        for value, group, index in rest:
            self._look_at(value, group, index)

    @property
    def _limit(self) -> float:
        """The value that a plan must be under to be of interest; no limit as long as constraints are broken."""
        return float("inf") if self.best is None or self.best[0].broken > 0 else self.best[0].value * _SAME

    def _all(self, most: float) -> Iterator[tuple[float, Candidates, int]]:
        most_s = self._scorer.most_s if self.best is not None and self.best[0].broken == 0 else float("inf")
        if self._time_only:
            most_s = min(most_s, most)
        for size in self._sizes:
            for group in self._space.candidates(size, most_s, most):
                order = group.value.argsort(kind="stable")
                chosen = order[:_FIRST] if self.best is None else order
                yield from ((float(group.value[index]), group, int(index)) for index in chosen)

    def _look_at(self, value: float, group: Candidates, index: int) -> None:
        if value > self._limit:
            return
        shape = group.shape(index)
        key = (shape.size, shape.parts, shape.begins)
        if key in self._done or self._scorer.broken_by_devices(shape.devices):
            return
        self._done.add(key)
        plan = self._builder.plan(shape)
        if plan is None:
            return
        scored = self._scorer.score(plan)
        if scored is not None and (self.best is None or scored[0] < self.best[0]):
            self.best = (scored[0], plan)
