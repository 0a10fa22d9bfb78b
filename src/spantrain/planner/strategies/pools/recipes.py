"""Who makes up a stage, by kind: a chain of such, and the seconds and bytes of every stage for every range of units.

Cuts are placed by a dynamic programme over units (`cutting`), of many chains at a time.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from spantrain.cost.span_tables import Array, over_spans
from spantrain.planner.strategies.pools.costs import HopSeconds, PoolCosts, PoolReplica, Runs, devices_of
from spantrain.planner.strategies.pools.cutting import TableStack, least_bottlenecks, least_sums, ranges

_LOOSER = (1.0, 1.02, 1.06, 1.15)
"""Times the least bottleneck: a little more of it can make the whole chain faster."""
_FEW = 3
"""It can where there are at most so many micro-batches for each stage."""
_MAX_TABLES, _MAX_KNOWN, _AT_ONCE = 6000, 100_000, 2**16
"""Tables and candidates that are remembered, and entries of tables of one stage that are gone through at once."""

_ROUNDING = 1e-9
_BITS = 16
"""Of each of the numbers that together say what a table is of."""

Recipe = Runs
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
        return devices_of(run for recipe in self.recipes for run in recipe)

    @property
    def has_few_micro_batches(self) -> bool:
        """Whether a slower slowest stage may make the whole chain faster."""
        return len(self.recipes) > 1 and self.micro_batches <= _FEW * len(self.recipes)


class Guess(NamedTuple):
    """A candidate with its best cuts, and what that takes by the closed form for even micro-batches."""

    candidate: StageChain
    begins: tuple[int, ...]
    """First unit of each stage."""
    step_s: float


class Cut(NamedTuple):
    """What came of a candidate."""

    guess: Guess | None
    """None where it fits nowhere, or must take longer than what was asked."""
    least_s: float
    """Seconds that its slowest stage takes at least; infinite where it fits nowhere."""


class ChainCosts:
    """Cuts of candidates, with tables of stages that are made once."""

    def __init__(self, costs: PoolCosts) -> None:
        self.costs = costs
        below = np.tri(costs.units + 1, dtype=bool)
        self._nothing = np.where(below, math.inf, 0.0)
        self._tables, self._sums = TableStack(costs.units + 1), TableStack(costs.units + 1)
        self._known: dict[StageChain, Cut] = {}
        self._reference: dict[int, PoolReplica] = {}
        self._sorts, self._places = _Sorts(), dict[tuple[int, int], dict[int, int]]()
        self._hop_s, self._speed, self._sum_place = cache(self._hop_of), cache(self._speed_of), cache(self._sum_table)
        self._hops, self.forward_s, self.backward_s = cache(costs.hop), cache(costs.forward_s), cache(costs.backward_s)
        self.distance_s, self.memory_bytes = cache(costs.site_distance_s), cache(costs.memory_bytes)
        self.work_s = cache(
            lambda member, size: over_spans(self.forward_s(member, size) + self.backward_s(member, size))
        )
        """Seconds of forward and backward of units i to j-1, as [i, j], by (member, size)."""
        self._over = cache(self._over_of)

    def guesses(self, candidates: Sequence[StageChain], most_s: float = math.inf) -> list[Cut]:
        """Return what comes of candidates, each in its place; of those that must take longer than a time no guess."""
        found = {candidate: self._known[candidate] for candidate in candidates if candidate in self._known}
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        by_depth: dict[tuple[int, bool], list[StageChain]] = {}
        for candidate in candidates:
            cut, depth = found.get(candidate), len(candidate.recipes)
            if cut is None and (least_s := self._least_s(candidate)) > most_s:
                found[candidate] = Cut(None, least_s)
            elif cut is None or (cut.guess is None and cut.least_s <= most_s and cut.least_s < math.inf):
                by_depth.setdefault((depth, candidate.has_few_micro_batches), []).append(candidate)
        for (depth, few), rows in by_depth.items():
            most = max(1, _AT_ONCE // ((self.costs.units - depth + 1) ** 2 * (len(_LOOSER) if few else 1)))
            for first in range(0, len(rows), most):
                found.update(self._cut_all(rows[first : first + most], most_s, few=few))
        self._known.update(found)
        return [found[candidate] for candidate in candidates]

    def _least_s(self, candidate: StageChain) -> float:
        """Return what a candidate takes at least, if units could be divided, and the widest cut were everywhere."""
        speed = sum(self._speed(self._sorts[recipe], candidate.size) for recipe in candidate.recipes)
        carried_s = max((link_s for _, link_s in self._hops_of(candidate)), default=0.0)
        return (1 - _ROUNDING) * candidate.micro_batches * max(1 / speed, carried_s)

    def _speed_of(self, sorts: int, size: int) -> float:
        """Return the micro-batches per second that a stage would do with all units, as if all were its best."""
        members = self._sorts.members(sorts)
        reference = self._reference.setdefault(size, members[0])
        whole = np.diff(self.forward_s(reference, size) + self.backward_s(reference, size))
        counts = whole > 0
        each = (np.diff(self.forward_s(member, size) + self.backward_s(member, size)) for member in members)
        slowest = max(float((own[counts] / whole[counts]).min(initial=math.inf)) for own in each)
        return 1 / (slowest * float(whole[counts].sum())) if 0 < slowest < math.inf else math.inf

    def _cut_all(self, rows: Sequence[StageChain], most_s: float, *, few: bool) -> dict[StageChain, Cut]:
        """Return what comes of candidates of as many stages."""
        if len(self._tables) > _MAX_TABLES:
            self._tables.clear()
            self._places.clear()
        if len(self._sums) > _MAX_TABLES:
            self._sums.clear()
            self._sum_place.cache_clear()
        depth, units = len(rows[0].recipes), self.costs.units
        tables = np.array([self._chain(candidate) for candidate in rows])
        stages = [self._tables.taken(tables[:, s], *ranges(units, depth, s)) for s in range(depth)]
        slowest_s = least_bottlenecks(stages)
        counts = np.array([candidate.micro_batches for candidate in rows])
        least_s = counts * slowest_s
        going = np.flatnonzero((slowest_s < math.inf) & (least_s <= most_s) & [self._stays_inside(row) for row in rows])
        found = {row: Cut(None, float(least)) for row, least in zip(rows, least_s, strict=True)}
        if not len(going):
            return found
        looser = np.array(_LOOSER if few else _LOOSER[:1])
        limits = slowest_s[going, None] * looser * (1 + 1e-12)
        sums_s, begins = least_sums([stage[going] for stage in stages], limits)
        ends = np.concatenate((begins[..., 1:], np.full((*begins.shape[:2], 1), units)), axis=-1)
        chosen = [rows[index] for index in going.tolist()]
        taken_s = self._tables.entries(tables[going][:, None], begins, ends).max(axis=-1)
        delays_s = np.array([sum(delay_s for delay_s, _ in self._hops_of(row)) for row in chosen])[:, None]
        step_s = sums_s + delays_s + (counts[going, None] - 1) * taken_s
        tables = np.array([[self._sum_place(self._sorts[r], row.width) for r in row.recipes] for row in chosen])
        step_s += self._sums.entries(tables[:, None], begins, ends).max(axis=-1)
        best = step_s.argmin(axis=-1)
        for number, (row, at) in enumerate(zip(chosen, best.tolist(), strict=True)):
            guess = Guess(row, tuple(begins[number, at].tolist()), float(step_s[number, at]))
            found[row] = Cut(guess, found[row].least_s)
        return found

    def _stays_inside(self, candidate: StageChain) -> bool:
        """Whether pipelines keep to hosts, where they have to."""
        if not self.costs.inside_hosts:
            return True
        used = devices_of((member, 1) for recipe in candidate.recipes for member, _ in recipe)
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

    def _chain(self, candidate: StageChain) -> list[int]:
        """Return which tables the stages have."""
        size, width, micro_batches, recipes = candidate
        numbers = [self._sorts[recipe] for recipe in recipes]
        known = self._places.setdefault((size, width if self.costs.width_matters else 1), {})
        found, before, left = [], 0, len(recipes)
        for here, after in pairwise((*numbers, 0)):
            # One number says what is before, here and after, how many stages are left, and what each holds.
            key = ((before << _BITS | here) << _BITS | after) << _BITS | left
            place = known.get(key << _BITS | min(left, micro_batches))
            if place is None:
                place = known[key << _BITS | min(left, micro_batches)] = self._table(
                    (before, here, after, left), candidate
                )
            found.append(place)
            before, left = here, left - 1
        return found

    def _table(self, row: tuple[int, int, int, int], candidate: StageChain) -> int:
        """Make the table of the seconds of a micro-batch on the slowest sort of replica, as [i, j]; return its place.

        Infinite where it does not fit. `row`: the sorts of replicas before, here and after; the stages from here on.
        """
        before, here, after = map(self._sorts.members, row[:3])
        size, width, micro_batches, _ = candidate
        found = self._nothing
        for member in here:
            table = self.work_s(member, size) + self._over_memory(member, size, row[3], micro_batches)
            for lower in before:
                hop = self.hop(lower, member, size, width)
                table = np.maximum(table + (hop.upper_forward_s + hop.upper_backward_s)[:, None], hop.link_s[:, None])
            for upper in after:
                hop = self.hop(member, upper, size, width)
                table = table + (hop.lower_forward_s + hop.lower_backward_s)[None, :]
            found = np.maximum(found, table)
        return self._tables.add(found)

    def _over_memory(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        """Return 0 where units i to j-1 fit, infinity where not."""
        return self._over(member, size, left, min(left, micro_batches))

    def _over_of(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        over = self.costs.need_bytes(member, size, left, micro_batches) > self.costs.memory_bytes(member.pool)
        return np.where(over | (self._nothing > 0), math.inf, 0.0)

    def _hops_of(self, candidate: StageChain) -> list[tuple[float, float]]:
        """Return of the messages between stages what nothing hides, there and back, and for how long a link is taken.

        The latter is that of the cut at which it is least.
        """
        size, width, _, recipes = candidate
        numbers = [self._sorts[recipe] for recipe in recipes]
        return [self._hop_s(*pair, size, width) for pair in pairwise(numbers)]

    def _hop_of(self, lower: int, upper: int, size: int, width: int) -> tuple[float, float]:
        pairs = product(self._sorts.members(lower), self._sorts.members(upper))
        hops = [self.hop(*pair, size, width) for pair in pairs]
        delay_s = max(float(hop.delay_forward_s.max() + hop.delay_backward_s.max()) for hop in hops)
        return delay_s, max(float(hop.link_s[1:-1].min(initial=math.inf)) for hop in hops)

    def _sum_table(self, sorts: int, width: int) -> int:
        found = np.zeros_like(self._nothing)
        if width > 1:
            rows = [self.costs.sums_s(member, width) for member in self._sorts.members(sorts)]
            found = np.maximum.reduce([over_spans(row) for row in rows])
        return self._sums.add(found)


class _Sorts(dict[Recipe, int]):
    """The sorts of replicas of stages, each with a number; 0 is none."""

    def __init__(self) -> None:
        super().__init__()
        self._members: list[tuple[PoolReplica, ...]] = [()]
        self._numbers: dict[tuple[PoolReplica, ...], int] = {}

    def members(self, number: int) -> tuple[PoolReplica, ...]:
        """Return one replica of each sort."""
        return self._members[number]

    def __missing__(self, recipe: Recipe) -> int:
        members = tuple(member for member, _ in recipe)
        number = self._numbers.get(members)
        if number is None:
            number = self._numbers[members] = len(self._members)
            self._members.append(members)
        self[recipe] = number
        return number
