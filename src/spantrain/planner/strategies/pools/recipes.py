"""Who makes up a stage, by kind: a chain of such, and the seconds and bytes of every stage for every range of units.

Cuts are placed by a dynamic programme over units, on whole rows at a time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from spantrain.cost.span_tables import Array, over_spans
from spantrain.planner.strategies.pools.costs import HopSeconds, PoolCosts, PoolReplica


def least_bottleneck(stages: Sequence[Array]) -> float:
    """Return the least that the slowest stage can take; `stages[s][i, j]` are the seconds of units i to j-1.

    Infinite entries are what does not fit, or no units at all.

    >>> least_bottleneck([np.array([[np.inf, 1, 3], [np.inf, np.inf, 2], [np.inf] * 3])] * 2)
    2.0
    """
    best = stages[0][0]
    for stage in stages[1:]:
        best = np.maximum(best[:, None], stage).min(axis=0)
    return float(best[-1])


def least_sum(stages: Sequence[Array], most_s: float) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of the stages' seconds, none of them over a limit, and the first unit of each stage."""
    best, sources = np.where(stages[0][0] <= most_s, stages[0][0], math.inf), []
    for stage in stages[1:]:
        sums = np.where(stage <= most_s, stage, math.inf) + best[:, None]
        source = sums.argmin(axis=0)
        sources.append(source)
        best = sums[source, np.arange(len(source))]
    here, begins = len(best) - 1, [0]
    for source in reversed(sources):
        here = int(source[here])
        begins.insert(1, here)
    return float(best[-1]), tuple(begins)


_LOOSER = (1.0, 1.02, 1.06, 1.15)
"""Times the least bottleneck: a little more of it can make the whole chain faster."""
_FEW = 3
"""It can where there are at most so many micro-batches for each stage."""
_MAX_TABLES = 6000

Recipe = tuple[tuple[PoolReplica, int], ...]
"""Sorts of replicas with how many of each; the first pool of a kind stands for the kind."""


class StageChain(NamedTuple):
    """A chain of stages without cuts."""

    size: int
    """Samples of a micro-batch of one replica."""
    width: int
    micro_batches: int
    recipes: tuple[Recipe, ...]

    @property
    def devices_by_kind(self) -> Counter[int]:
        """How many devices of each kind it uses."""
        found: Counter[int] = Counter()
        for recipe in self.recipes:
            for member, count in recipe:
                found[member.pool] += member.tp_degree * count
        return found


class Guess(NamedTuple):
    """A candidate with its best cuts, and what that takes by the closed form for even micro-batches."""

    candidate: StageChain
    begins: tuple[int, ...]
    """First unit of each stage."""
    step_s: float


class ChainCosts:
    """Cuts of candidates, with tables of stages that are made once."""

    def __init__(self, costs: PoolCosts) -> None:
        self.costs = costs
        below = np.tri(costs.units + 1, dtype=bool)
        self._nothing = np.where(below, math.inf, 0.0)
        self._tables: dict[tuple[object, ...], Array] = {}
        self._hops, self.forward_s, self.backward_s = cache(costs.hop), cache(costs.forward_s), cache(costs.backward_s)
        self.distance_s, self.memory_bytes = cache(costs.site_distance_s), cache(costs.memory_bytes)
        self.work_s = cache(
            lambda member, size: over_spans(self.forward_s(member, size) + self.backward_s(member, size))
        )
        """Seconds of forward and backward of units i to j-1, as [i, j], by (member, size)."""
        self._over = cache(self._over_of)

    def guess(self, candidate: StageChain, most_s: float = math.inf) -> Guess | None:
        """Return a candidate with the cuts that suit it; None where it fits nowhere, or must take longer than that."""
        sorts = [tuple(member for member, _ in recipe) for recipe in candidate.recipes]
        if not self._stays_inside(sorts):
            return None
        chain = list(self._chain(candidate, sorts))
        least_s = least_bottleneck(chain)
        if least_s == math.inf or candidate.micro_batches * least_s > most_s:
            return None
        delays_s = sum(self._delay_s(a, b, candidate) for a, b in pairwise(sorts))
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        few = len(chain) > 1 and candidate.micro_batches <= _FEW * len(chain)
        for looser in _LOOSER if few else _LOOSER[:1]:
            sum_s, begins = least_sum(chain, least_s * looser * (1 + 1e-12))
            ends = (*begins[1:], self.costs.units)
            slowest = max(float(table[i, j]) for table, i, j in zip(chain, begins, ends, strict=True))
            step_s = sum_s + delays_s + (candidate.micro_batches - 1) * slowest
            step_s += max(map(self._sum_s, sorts, begins, ends, [candidate.width] * len(sorts)))
            best = min(best, (step_s, begins))
        return Guess(candidate=candidate, begins=best[1], step_s=best[0])

    def _stays_inside(self, sorts: Sequence[tuple[PoolReplica, ...]]) -> bool:
        """Whether pipelines keep to hosts, where they have to."""
        used: Counter[int] = Counter()
        for row in sorts:
            for member in row:
                used[member.pool] += member.tp_degree
        return all(self.costs.fits_a_host(pool, count) for pool, count in used.items())

    def fits(self, candidate: StageChain, begins: Sequence[int]) -> bool:
        """Whether every stage fits with these cuts, none of them empty."""
        ends = (*begins[1:], self.costs.units)
        rows = zip(candidate.recipes, begins, ends, range(len(begins)), strict=True)
        return all(
            i < j
            and all(
                self._over_memory(member, candidate.size, len(begins) - index, candidate.micro_batches)[i, j] == 0
                for member, _ in recipe
            )
            for recipe, i, j, index in rows
        )

    def hop(self, lower: PoolReplica, upper: PoolReplica, size: int, width: int) -> HopSeconds:
        """Return what messages between two replicas take."""
        return self._hops(lower, upper, size, width if self.costs.width_matters else 1)

    def most_units(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> int:
        """Return the longest range of units that fits anywhere."""
        fits = self._over_memory(member, size, left, micro_batches) == 0
        first, end = np.nonzero(fits)
        return int((end - first).max(initial=0))

    def _chain(self, candidate: StageChain, sorts: Sequence[tuple[PoolReplica, ...]]) -> Iterator[Array]:
        for index, here in enumerate(sorts):
            before = sorts[index - 1] if index else ()
            after = sorts[index + 1] if index + 1 < len(sorts) else ()
            yield self._table((before, here, after), candidate, len(sorts) - index)

    def _table(self, row: tuple[tuple[PoolReplica, ...], ...], candidate: StageChain, left: int) -> Array:
        """Return the seconds of a micro-batch on the slowest sort of replica, as [i, j]; infinite where it fits not.

        `row`: the sorts of the stage before, of this stage, and of the one after.
        """
        (before, here, after), size, micro_batches = row, candidate.size, candidate.micro_batches
        width = candidate.width if self.costs.width_matters else 1
        key = (row, size, width, left, min(left, micro_batches))
        found = self._tables.get(key)
        if found is not None:
            return found
        if len(self._tables) > _MAX_TABLES:
            self._tables.clear()
        found = self._nothing
        for member in here:
            table = self.work_s(member, size) + self._over_memory(member, size, left, micro_batches)
            for lower in before:
                hop = self.hop(lower, member, size, width)
                table = np.maximum(table + (hop.upper_forward_s + hop.upper_backward_s)[:, None], hop.link_s[:, None])
            for upper in after:
                hop = self.hop(member, upper, size, width)
                table = table + (hop.lower_forward_s + hop.lower_backward_s)[None, :]
            found = np.maximum(found, table)
        self._tables[key] = found
        return found

    def _over_memory(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        """Return 0 where units i to j-1 fit, infinity where not."""
        return self._over(member, size, left, min(left, micro_batches))

    def _over_of(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        over = self.costs.need_bytes(member, size, left, micro_batches) > self.costs.memory_bytes(member.pool)
        return np.where(over | (self._nothing > 0), math.inf, 0.0)

    def _delay_s(self, lower: Sequence[PoolReplica], upper: Sequence[PoolReplica], candidate: StageChain) -> float:
        hops = [self.hop(a, b, candidate.size, candidate.width) for a in lower for b in upper]
        return max(float(hop.delay_forward_s.max() + hop.delay_backward_s.max()) for hop in hops)

    def _sum_s(self, sorts: Sequence[PoolReplica], first: int, end: int, width: int) -> float:
        if width < 2:
            return 0.0
        found = [self.costs.sums_s(member, width) for member in sorts]
        return max(float(sums[end] - sums[first]) for sums in found)
