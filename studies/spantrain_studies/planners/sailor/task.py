"""One shape of Sailor's search (stages, micro-batch, tensor-parallel degrees), as tasks for its programme.

Sailor's dynamic programme (section 4.2.2, equation 1 and listing 1): which devices each stage gets, for one width.

The straggler's seconds are assumed beforehand (section 4.2.3) instead of being corrected while solving: stages that
take longer are not allowed. What is left to be least is a sum over stages, of seconds or of money. A state is the
stage, the region it is in, the regions passed before, and how many devices are left there of each kind: a pipeline does
not come back to a region (the listing goes on to the "next region"). A stage mixes two kinds at most, and then takes
all that is left of one of them: with equal degrees, more mixed stages can be exchanged for whole ones, no slower.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from spantrain.planner.strategies.score import Weights
from spantrain_studies.planners.sailor.space import SupplySpace

Taken = tuple[tuple[int, int], ...]
"""Supplies (by index) and how many replicas of a stage each gives."""
_Left = tuple[int, ...]
_State = tuple[int, int, _Left]
"""Regions passed and the present one, as bits; the present one; devices left there, by supply."""
_NEAREST = 3
"""Regions that a pipeline may go on to, of those it has not passed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one programme solves. Rows are supplies, columns stages."""

    width: int
    """Replicas of every stage (data-parallel degree D)."""
    straggler_s: float
    seconds: Sequence[Sequence[float]]
    degrees: Sequence[Sequence[int]]
    """Of tensor parallelism; 0 where the stage does not fit."""
    worth: Sequence[Sequence[float]]
    """What one replica adds to the sum, besides the seconds of the stage."""
    second_worth: float
    """What a second of the stage's slowest replica adds to the sum."""
    supplies_by_region: Sequence[Sequence[int]]
    count: Sequence[int]
    """Devices, by supply."""
    left_over: Mapping[tuple[int, int], int]
    """Devices of a supply that a degree cannot use, by (supply, degree)."""
    crossing: Sequence[Sequence[Sequence[float]]]
    """What the cut behind a stage adds to the sum, by [region][next region][stage]."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.seconds[0])


def solve(task: Task) -> tuple[float, tuple[Taken, ...]] | None:
    """Return the least sum and what each stage takes; None if the devices are not enough."""
    layer: dict[_State, tuple[float, _State | None, Taken]] = {}
    for region, supplies in enumerate(task.supplies_by_region):
        full = tuple(task.count[supply] for supply in supplies)
        for value, left, taken in _choices(task, 0, region, full):
            layer[1 << region, region, left] = (value, None, taken)
    layers = [layer]
    for stage in range(1, task.stages):
        layer = {}
        for state, (value, _, _) in layers[-1].items():
            for more, following, taken in _next(task, stage, state):
                known = layer.get(following)
                if known is None or value + more < known[0]:
                    layer[following] = (value + more, state, taken)
        if not layer:
            return None
        layers.append(layer)
    if not layers[-1]:
        return None
    last = min(layers[-1], key=lambda entry: layers[-1][entry][0])
    return layers[-1][last][0], _way_back(layers, last)


def _way_back(layers: Sequence[Mapping[_State, tuple[float, _State | None, Taken]]], last: _State) -> tuple[Taken, ...]:
    state: _State | None = last
    found: list[Taken] = []
    for layer in reversed(layers):
        assert state is not None
        _, state, taken = layer[state]
        found.append(taken)
    return tuple(reversed(found))


def _next(task: Task, stage: int, state: _State) -> Iterator[tuple[float, _State, Taken]]:
    """Yield what the next stage may be: where the pipeline is, or in a region it has not passed."""
    passed, region, left = state
    for value, rest, taken in _choices(task, stage, region, left):
        yield value + task.crossing[region][region][stage - 1], (passed, region, rest), taken
    others = [other for other in range(len(task.supplies_by_region)) if not passed >> other & 1]
    if len(others) > _NEAREST:
        others = sorted(others, key=lambda place: task.crossing[region][place][stage - 1])[:_NEAREST]
    for other in others:
        full = tuple(task.count[supply] for supply in task.supplies_by_region[other])
        for value, rest, taken in _choices(task, stage, other, full):
            yield value + task.crossing[region][other][stage - 1], (passed | 1 << other, other, rest), taken


def _choices(task: Task, stage: int, region: int, left: _Left) -> Iterator[tuple[float, _Left, Taken]]:
    """Yield ways to give a stage its replicas from what is left in a region."""
    supplies = task.supplies_by_region[region]
    room = [_replicas(task, stage, supply, count) for supply, count in zip(supplies, left, strict=True)]
    for place in range(len(supplies)):
        if room[place] >= task.width:
            yield _given(task, stage, region, left, {place: task.width})
        elif room[place] > 0:
            missing = task.width - room[place]
            for other in range(len(supplies)):
                if other != place and room[other] >= missing:
                    yield _given(task, stage, region, left, {place: room[place], other: missing})


def _replicas(task: Task, stage: int, supply: int, left: int) -> int:
    """Return how many replicas of a stage the rest of a supply can be."""
    degree = task.degrees[supply][stage]
    if degree == 0 or task.seconds[supply][stage] > task.straggler_s:
        return 0
    return max(0, left - task.left_over[supply, degree]) // degree


def _given(task: Task, stage: int, region: int, left: _Left, replicas: Mapping[int, int]) -> tuple[float, _Left, Taken]:
    rest, value, slowest_s, taken = list(left), 0.0, 0.0, []
    for place, count in replicas.items():
        supply = task.supplies_by_region[region][place]
        rest[place] -= count * task.degrees[supply][stage]
        value += count * task.worth[supply][stage]
        slowest_s = max(slowest_s, task.seconds[supply][stage])
        taken.append((supply, count))
    return value + task.second_worth * slowest_s, tuple(rest), tuple(taken)


_ALIKE = 1.02
"""Stragglers that differ by less than this factor count as one."""
_TIE = 1e-9
"""What a second adds to a sum of money, so that of equal sums the fastest is taken."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SupplyStages:
    """Stages on every supply, for one micro-batch and number of them. Rows are supplies, columns stages."""

    space: SupplySpace
    samples: int
    seconds: tuple[tuple[float, ...], ...]
    degrees: tuple[tuple[int, ...], ...]
    """0 where no degree is enough for the memory (heuristic H2)."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.seconds[0])

    @cached_property
    def least_s(self) -> tuple[float, ...]:
        """Seconds of each stage where it is fastest; infinite if it fits nowhere."""
        return tuple(min((s for _, s in self._fitting(stage)), default=float("inf")) for stage in range(self.stages))

    @cached_property
    def widest(self) -> int:
        """Replicas that every stage might have, if supplies were divided as well as can be."""
        supplies = self.space.supplies
        most = sum(
            supply.count // min((degree for degree in row if degree), default=supply.count + 1)
            for supply, row in zip(supplies, self.degrees, strict=True)
        )
        return most // self.stages

    def _fitting(self, stage: int) -> Iterator[tuple[int, float]]:
        for supply, (row, degrees) in enumerate(zip(self.seconds, self.degrees, strict=True)):
            if degrees[stage]:
                yield supply, row[stage]

    def bound_s(self, width: int, straggler_s: float = 0.0) -> float:
        """Return seconds that no step with at least such a straggler is under."""
        slowest_s = max(straggler_s, *self.least_s)
        return self.space.least_step_s(self.stages, self.samples, width, slowest_s, sum(self.least_s))

    def bound_value(self, width: int) -> float:
        """Return a value of the objective that no plan is under."""
        weights = self.space.weights
        if not weights.counts_more:
            return self.bound_s(width)
        return (
            width
            * self.space.count(self.samples, width)
            * sum(
                min(
                    self._price(weights, supply, stage, busy=True) * seconds for supply, seconds in self._fitting(stage)
                )
                for stage in range(self.stages)
            )
        )

    def _price(self, weights: Weights, supply: int, stage: int, *, busy: bool) -> float:
        """Return what a second of one replica is worth."""
        name = self.space.supplies[supply].hosts[0][0]
        one = weights.second_by_device[name] + (weights.busy_by_device[name] if busy else 0.0)
        return self.degrees[supply][stage] * one

    def least_rate(self, weights: Weights, width: int) -> float:
        """Return what a second of any pipeline of this width is worth at least."""
        return width * sum(
            min(self._price(weights, supply, stage, busy=False) for supply, _ in self._fitting(stage))
            for stage in range(self.stages)
        )

    def straggler_s(self, taken: Sequence[Taken]) -> float:
        """Return the seconds of the slowest stage that was chosen."""
        return max(self.seconds[supply][stage] for stage, parts in enumerate(taken) for supply, _ in parts)

    def stragglers(self) -> list[float]:
        """Return the seconds that the slowest stage may take, rising; alike ones once."""
        least = max(self.least_s)
        found: list[float] = []
        first = 0.0
        for seconds in sorted(s for stage in range(self.stages) for _, s in self._fitting(stage) if s >= least):
            if seconds > first * _ALIKE:
                first = seconds
                found.append(seconds)
            found[-1] = seconds
        return found

    def task(self, width: int, straggler_s: float, micro_batches: int, weights: Weights) -> Task:
        """Return the programme's task: least seconds, or least money, joules (what the weights count)."""
        supplies, of_time = self.space.supplies, not weights.counts_more
        worth = [
            [
                0.0 if of_time else self._worth(weights, supply, stage, straggler_s, micro_batches)
                for stage in range(self.stages)
            ]
            for supply in range(len(supplies))
        ]
        return Task(
            width=width,
            straggler_s=straggler_s,
            seconds=self.seconds,
            degrees=self.degrees,
            worth=worth,
            second_worth=1.0 if of_time else _TIE,
            supplies_by_region=[
                [index for index, supply in enumerate(supplies) if supply.region == region]
                for region in self.space.regions
            ],
            count=[supply.count for supply in supplies],
            left_over={
                (index, degree): supply.left_over(degree)
                for index, (supply, row) in enumerate(zip(supplies, self.degrees, strict=True))
                for degree in set(row)
                if degree
            },
            crossing=self._crossing(width, straggler_s, micro_batches, weights),
        )

    def _worth(self, weights: Weights, supply: int, stage: int, straggler_s: float, micro_batches: int) -> float:
        """Return what a replica costs: rented as long as the straggler takes (equation 2), busy as long as itself."""
        name = self.space.supplies[supply].hosts[0][0]
        one = weights.second_by_device[name] * straggler_s + weights.busy_by_device[name] * self.seconds[supply][stage]
        return self.degrees[supply][stage] * micro_batches * one

    def _crossing(
        self, width: int, straggler_s: float, micro_batches: int, weights: Weights
    ) -> list[list[list[float]]]:
        """Return what the cuts add: their own seconds, those by which they slow the straggler down, and bytes."""
        space = self.space
        rate = self.least_rate(weights, width)
        second = rate if weights.counts_more and isfinite(rate) else 1.0
        ways = [[space.way(region, other, self.stages) for other in space.regions] for region in space.regions]
        found: list[list[list[float]]] = [[[] for _ in space.regions] for _ in space.regions]
        for stage in range(self.stages - 1):
            cut = space.profile.graph.units[space.begins(self.stages)[stage + 1] - 1]
            sizes = (cut.cut_bytes_per_sample, cut.gradient_bytes_per_sample)
            for region, row in enumerate(ways):
                for other, way in enumerate(row):
                    busy = [way.busy_s(width, self.samples * size) for size in sizes]
                    seconds = sum(busy) + 2 * way.latency_s
                    seconds += (micro_batches - 1) * max(0.0, max(busy) - straggler_s)
                    sent = space.job.global_batch * sum(sizes) * weights.per_byte(*way.devices)
                    found[region][other].append(second * seconds + sent)
        return found


def shape_of(
    space: SupplySpace, stages: int, samples: int, micro_batches: int, floors: tuple[int, ...]
) -> SupplyStages | None:
    """Return the stages with at least these tensor-parallel degrees, by kind; None if one fits nowhere.

    A supply whose hosts are smaller has as much as a host allows.
    """
    degrees, seconds = [], []
    floor = dict(zip(space.kinds, floors, strict=True))
    for index, supply in enumerate(space.supplies):
        own = min(floor[supply.kind], supply.largest_degree)
        row = tuple(least and max(least, own) for least in space.least_degrees(index, samples, stages, micro_batches))
        degrees.append(row)
        seconds.append(
            tuple(
                space.seconds(index, degree, samples, stages)[stage] if degree else float("inf")
                for stage, degree in enumerate(row)
            )
        )
    shape = SupplyStages(space=space, samples=samples, seconds=tuple(seconds), degrees=tuple(degrees))
    return None if float("inf") in shape.least_s else shape
