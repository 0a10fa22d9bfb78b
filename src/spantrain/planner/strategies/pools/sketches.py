"""How many stages of which kind: all counts at once, by what perfect cuts would take."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from spantrain.core.records import Record
from spantrain.cost.span_tables import Array
from spantrain.planner.groups import few_orders
from spantrain.planner.strategies.pools.costs import Goal, PoolReplica
from spantrain.planner.strategies.pools.recipes import ChainCosts, Recipe, StageChain

_OF_A_GRID = 4
_OF_A_WIDTH = 6
_TIERS = (0.75, 0.8, 0.85, 0.9, 0.95, 1.02)
"""What a guess uses up of a limit at most; real plans take a little more than their guess, nobody knows how much."""
_ROUNDED = 0.5
"""Units that a stage's cut is off the perfect one, about."""
_DEEP = 12
"""Stages from the end from which on it is no more asked how much less fits."""
_MAX_OPTIONS = {1: 10_000, 2: 64, 3: 14}
_MAX_COMBINATIONS, _MAX_SORTS = 4000, 11
"""Counts of more sorts than three, each with two options at least, and the most sorts, of which the fastest stay."""
_EVERY_WIDTH_UP_TO, _FEW_WIDTHS, _WIDER = 4096, 33, 1.08
"""Micro-batches in all up to which every width is tried, and which of them where there are more."""
_MAX_DEGREES = 100
"""Combinations of tensor-parallel degrees; where there are more, all kinds have about the same."""


class _Sort(Record):
    """What one sort of replica does with the whole model."""

    member: PoolReplica
    replicas: int
    work_s: float
    messages_s: float
    """Seconds of messages of a stage inside the pipeline."""
    fitting: Array
    """Entry k: how many units k stages of it can hold at most."""
    usd_per_s: float
    """US dollars of a replica's second."""

    def options(self, width: int, units: int, most: int) -> Array:
        """Return numbers of stages to try, not more than so many of them."""
        top = min(self.replicas // width, units)
        if top + 1 <= most:
            return np.arange(top + 1.0)
        return np.unique(np.round(np.linspace(0, top, most)))


class _StageCounts(NamedTuple):
    """Counts of stages, with what perfect cuts would take."""

    tier: int
    step_s: float
    usd: float
    size: int
    width: int
    micro_batches: int
    runs: tuple[tuple[_Sort, int], ...]
    """Sorts of replicas with how many stages of each; or how many replicas, if they are in line."""
    in_line: int = 0
    """Stages that a line of replicas is cut into; 0: whole stages of one sort each."""


class Sketcher:
    """Guesses for families, sizes, widths, degrees and counts of stages, the best of each grid of counts."""

    def __init__(
        self,
        chains: ChainCosts,
        available: Mapping[int, int],
        goal: Goal,
        *,
        divides: bool,
        across: tuple[int, int] | None,
    ) -> None:
        """Keep what is counted.

        `available`: by the pool that stands for a family, how many devices of it may be used, wherever they are;
        `across`: pools of two sites that all sums cross.
        """
        self._across = across
        self._chains, self._available, self._goal, self._divides = chains, available, goal, divides
        self._costs = chains.costs

    def best(self, limit: int, known: tuple[float, float] = (math.inf, math.inf)) -> Iterator[StageChain]:
        """Yield the candidates with the best values, best first, each in the orders worth trying.

        `known`: seconds and US dollars of a plan that is known already.

        So many in all; where there are limits, they are shared out by how much of a limit guesses use up.
        """
        most = limit // len(_TIERS) * 2 if self._goal.has_limits else limit
        taken: Counter[tuple[int, int, int]] = Counter()
        chosen: Counter[int] = Counter()
        for row in sorted(self._sketches(known), key=lambda row: self._goal.value(row.step_s, row.usd)):
            key = (row.tier, row.size, row.width)
            taken[key] += 1
            if taken[key] > _OF_A_WIDTH or chosen[row.tier] >= most:
                continue
            chosen[row.tier] += 1
            for runs in few_orders(row.runs, by=lambda run: self._chains.memory_bytes(run[0].member.pool)):
                recipes: tuple[Recipe, ...] = sum(((((s.member, row.width),),) * n for s, n in runs), ())
                if row.in_line:
                    recipes = _in_line(runs, row.width, row.in_line)
                yield StageChain(size=row.size, width=row.width, micro_batches=row.micro_batches, recipes=recipes)

    def widths(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield widths with the micro-batches of each replica; of widths with as many only the smallest."""
        most = sum(self._available.values())
        whole = -(-self._costs.global_batch // size)
        last = 0
        for micro_batches in self._micro_batches(whole, most):
            width = -(-whole // micro_batches)
            uneven = self._costs.global_batch % (size * width) != 0
            if width > most or width == last or (self._divides and uneven):
                continue
            last = width
            yield width, -(-self._costs.global_batch // (size * width))

    def _micro_batches(self, whole: int, most: int) -> Iterable[int]:
        """Return, falling, in how many micro-batches so many in all may be done, beside each other by `most` at most.

        Of very many: few ones, those that go evenly, those that leave no device out, and steps of a few per cent.
        """
        if whole <= _EVERY_WIDTH_UP_TO:
            return range(whole, 0, -1)
        widths = {*range(1, _FEW_WIDTHS), *(max(1, most // stages) for stages in range(1, self._costs.units + 1))}
        steps = math.ceil(math.log(whole) / math.log(_WIDER))
        widths |= {round(_WIDER**power) for power in range(steps)}
        found = {-(-whole // width) for width in widths} | set(range(1, _FEW_WIDTHS))
        small = (part for part in range(1, math.isqrt(whole) + 1) if whole % part == 0)
        found |= {one for part in small for one in (part, whole // part)}
        return sorted(found, reverse=True)

    def _sketches(self, best: tuple[float, float]) -> Iterator[_StageCounts]:
        for size in reversed(self._costs.sizes()):
            rows = [
                [self._sort(pool, degree, size) for degree in self._costs.degrees(pool, size)]
                for pool in self._available
            ]
            for width, micro_batches in self.widths(size):
                for sorts in self._combinations([self._worth(row, width) for row in rows]):
                    if not sorts:
                        continue
                    least = self._least(sorts, width, micro_batches)
                    if self._goal.hopeless(*least, best):
                        continue
                    shape = (sorts, size, width, micro_batches)
                    for sketch in (*self._grid(*shape), *self._lines(*shape)):
                        if sketch.tier == 0 and self._goal.value(sketch.step_s, sketch.usd) < self._goal.value(*best):
                            best = (sketch.step_s, sketch.usd)
                        yield sketch

    def _combinations(self, rows: Sequence[Sequence[_Sort | None]]) -> Iterator[list[_Sort]]:
        """Yield one sort of each family: of all degrees or about the same one; of many families the fastest."""
        combinations: Iterable[tuple[_Sort | None, ...]] = product(*rows)
        if math.prod(map(len, rows)) > _MAX_DEGREES:
            longest = max(map(len, rows))
            combinations = (tuple(row[min(at, len(row) - 1)] for row in rows) for at in range(longest))
        for combination in combinations:
            sorts = [sort for sort in combination if sort is not None]
            if len(sorts) > _MAX_SORTS:
                sorts = sorted(sorts, key=lambda sort: -sort.replicas / sort.work_s)[:_MAX_SORTS]
            yield sorts

    def _least(self, sorts: Sequence[_Sort], width: int, micro_batches: int) -> tuple[float, float]:
        """Return the least seconds, and the least US dollars, with any number of stages."""
        speed = sum(min(sort.replicas / width, self._costs.units) / sort.work_s for sort in sorts)
        if not speed:
            return math.inf, math.inf
        usd = micro_batches * width * min(sort.work_s * sort.usd_per_s for sort in sorts)
        return micro_batches / speed, usd

    def _worth(self, sorts: Sequence[_Sort], width: int) -> list[_Sort | None]:
        """Return the degrees at which a family can run any stage, or parts of one; None: it is left out."""
        whole: list[_Sort | None] = [sort for sort in sorts if sort.replicas >= width]
        parts: list[_Sort | None] = [sort for sort in sorts if 0 < sort.replicas < width]
        return [*whole, *parts] or [None]

    def _sort(self, pool: int, degree: int, size: int) -> _Sort:
        member, units = PoolReplica(pool, degree), self._costs.units
        hop = self._chains.hop(member, member, size, 1)
        parts = (hop.lower_forward_s, hop.upper_forward_s, hop.upper_backward_s, hop.lower_backward_s)
        fitting = [self._chains.most_units(member, size, left, units) for left in range(1, min(units, _DEEP) + 1)]
        fitting += fitting[-1:] * (units - len(fitting))
        return _Sort(
            member=member,
            replicas=self._available[pool] // degree,
            work_s=float(self._chains.work_s(member, size)[0, units]),
            messages_s=sum(float(part[units // 2]) for part in parts),
            fitting=np.cumsum([0.0, *fitting]),
            usd_per_s=degree * self._costs.usd_per_s(pool),
        )

    def _grid(self, sorts: Sequence[_Sort], size: int, width: int, micro_batches: int) -> Iterator[_StageCounts]:
        units = self._costs.units
        most = _MAX_OPTIONS.get(len(sorts)) or max(2, int(_MAX_COMBINATIONS ** (1 / len(sorts))))
        options = [sort.options(width, units, most) for sort in sorts]
        counts: list[Array] = [grid.ravel() for grid in np.meshgrid(*options, indexing="ij")]
        stages: Array = sum(counts[1:], counts[0])
        holds = sum((s.fitting[k.astype(int)] for s, k in zip(sorts, counts, strict=True)), np.zeros(1))
        possible = (stages >= 1) & (stages <= units) & (holds >= units)
        chosen = [count[possible] for count in counts]
        if not len(chosen[0]):
            return
        step_s = self._step_s(sorts, chosen, width, micro_batches)
        usd_per_s: Array = np.zeros_like(step_s)
        for sort, count in zip(sorts, chosen, strict=True):
            # A price that is not known is infinite, but only for what is used.
            usd_per_s[count > 0] += sort.usd_per_s * width * count[count > 0]
        usd, tiers = step_s * usd_per_s, self._tiers(step_s, usd_per_s)
        values = self._goal.value(step_s, usd)
        for tier in range(len(_TIERS)) if self._goal.has_limits else (0,):
            here = np.flatnonzero(tiers == tier)
            for at in here[np.argsort(values[here])[:_OF_A_GRID]]:
                yield _StageCounts(
                    tier=tier,
                    step_s=float(step_s[at]),
                    usd=float(usd[at]),
                    size=size,
                    width=width,
                    micro_batches=micro_batches,
                    runs=tuple((s, int(k[at])) for s, k in zip(sorts, chosen, strict=True) if k[at]),
                )

    def _tiers(self, step_s: Array, usd_per_s: Array) -> Array:
        """Return the tier of each guess; one more than there are: it breaks a limit."""
        if not self._goal.has_limits:
            return np.zeros_like(step_s)
        return np.searchsorted(np.array(_TIERS), self._goal.tightness(step_s, usd_per_s)).astype(np.float64)

    def _step_s(self, sorts: Sequence[_Sort], counts: Sequence[Array], width: int, micro_batches: int) -> Array:
        """Return the seconds of a step whose stages are all equally slow."""
        stages: Array = sum(counts[1:], counts[0])
        speed, messages, sums = np.zeros(1), np.zeros(1), np.zeros(1)
        for sort, count in zip(sorts, counts, strict=True):
            speed = speed + count / sort.work_s
            messages = messages + count * (sort.messages_s / sort.work_s)
            if width > 1:
                sums = np.maximum(sums, np.where(count > 0, float(self._costs.sums_s(sort.member, width)[-1]), 0.0))
        uneven = 1 + _ROUNDED * (stages - 1) / self._costs.units
        slowest_s = uneven * (1 + messages * (stages - 1) / stages) / speed
        found: Array = (micro_batches - 1 + stages) * slowest_s + sums / stages
        if self._across is not None and width > 1:
            found = found + self._costs.sums_across_s(*self._across, width, stages)
        return found

    def _lines(self, sorts: Sequence[_Sort], size: int, width: int, micro_batches: int) -> Iterator[_StageCounts]:
        """Yield all replicas in a line, cut into stages, where that makes more stages than whole ones of a kind."""
        stages = min(sum(sort.replicas for sort in sorts) // width, self._costs.units)
        if len(sorts) < 2 or stages <= sum(sort.replicas // width for sort in sorts):
            return
        shares = [np.array([sort.replicas / width]) for sort in sorts]
        step_s = self._step_s(sorts, shares, width, micro_batches)
        usd_per_s = np.array([sum(sort.replicas * sort.usd_per_s for sort in sorts)])
        tier = int(self._tiers(step_s, usd_per_s)[0])
        if tier < len(_TIERS):
            yield _StageCounts(
                tier=tier,
                step_s=float(step_s[0]),
                usd=float(step_s[0] * usd_per_s[0]),
                size=size,
                width=width,
                micro_batches=micro_batches,
                runs=tuple((sort, sort.replicas) for sort in sorts),
                in_line=stages,
            )


def _in_line(runs: Sequence[tuple[_Sort, int]], width: int, stages: int) -> tuple[Recipe, ...]:
    """Return so many replicas of each sort one after the other, cut into stages; what is too much is left out."""
    recipes: list[list[tuple[PoolReplica, int]]] = [[]]
    room = width
    for sort, left in runs:
        while left and len(recipes) <= stages:
            taken = min(left, room)
            recipes[-1].append((sort.member, taken))
            left, room = left - taken, room - taken
            if not room:
                recipes.append([])
                room = width
    return tuple(map(tuple, recipes[:stages]))
