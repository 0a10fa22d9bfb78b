"""The search over counts of alike devices: guessed on a grid, cut, varied, placed, then reckoned to the micro-batch.

Kinds of one device memory and host size are families; devices of a family stand for each other inside a site. For each
set of sites (`territories`), unless nothing in it can be as good as what is known, every family's stages are counted
out on a grid with perfect cuts (`sketches`), the best are cut by a dynamic programme under memory (`recipes`), varied
stage by stage. The best of all sets of sites are placed on sites and hosts (`placing`), and their cuts moved as long as
that helps. What comes out is ranked by 1F1B gone through action by action; whoever asks has a simulator to choose among
the first few.

Small changes of a candidate: a stage dropped, added, made up otherwise or exchanged with the next.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from spantrain.core.records import Record
from spantrain.planner.strategies.pools.costs import Goal, PoolCosts, PoolPlan, PoolReplica, PoolStage, devices_of
from spantrain.planner.strategies.pools.placing import Placer
from spantrain.planner.strategies.pools.recipes import ChainCosts, Guess, Recipe, StageChain
from spantrain.planner.strategies.pools.sketches import Sketcher
from spantrain.planner.strategies.pools.territories import Territories, Territory
from spantrain.planner.strategies.score import few_of_each

_MAX_MIXED = 12
"""Sorts of replicas up to which stages of two sorts are tried."""


def neighbours(
    candidate: StageChain, available: Mapping[int, int], degrees: Mapping[int, Sequence[int]], units: int
) -> Iterator[StageChain]:
    """Yield candidates that differ in a stage and use no more devices of a kind than there are.

    `available` counts devices by the pool that stands for their kind, `degrees` are those that may be used there.
    """
    recipes = candidate.recipes
    for at in range(len(recipes) - 1):
        if recipes[at] != recipes[at + 1]:
            yield _with(candidate, at, at + 2, recipes[at + 1], recipes[at])
    if len(recipes) > 1:
        for at in range(len(recipes)):
            if not at or recipes[at] != recipes[at - 1]:
                yield _with(candidate, at, at + 1)
    used = candidate.devices_by_kind
    spare = {pool: count - used[pool] for pool, count in available.items()}
    if len(recipes) < units:
        for recipe in _possible(spare, degrees, candidate.width):
            for at in range(len(recipes) + 1):
                if at == len(recipes) or recipes[at] != recipe:
                    yield _with(candidate, at, at, recipe)
    for at, recipe in enumerate(recipes):
        for other in _possible(devices_of(recipe) + Counter(spare), degrees, candidate.width):
            if other != recipe:
                yield _with(candidate, at, at + 1, other)


def _with(candidate: StageChain, first: int, end: int, *recipes: Recipe) -> StageChain:
    size, width, micro_batches, before = candidate
    return StageChain(size, width, micro_batches, (*before[:first], *recipes, *before[end:]))


def _possible(spare: Mapping[int, int], degrees: Mapping[int, Sequence[int]], width: int) -> Iterator[Recipe]:
    """Yield stages of one sort of replica, and of what is left of two kinds where neither is enough."""
    members = [
        PoolReplica(pool, degree) for pool, found in degrees.items() for degree in found if spare[pool] >= degree
    ]
    rooms = {member: spare[member.pool] // member.tp_degree for member in members}
    for member, room in rooms.items():
        if room >= width:
            yield ((member, width),)
            continue
        for other in members if len(members) <= _MAX_MIXED else ():
            if other.pool != member.pool and room + rooms[other] >= width and room >= 1:
                yield ((member, room), (other, width - room))


_CUT, _CUT_AT_ONCE = 300, 100
"""Candidates of a set of sites that are cut."""
_VARIED, _VARIED_OF_MANY, _FEW_TERRITORIES, _ROUNDS = 8, 4, 3, 6
"""Candidates of a set of sites that are varied; fewer where there are more sets of sites than that."""
_PLACED, _POLISHED = 20, 6
_OF_A_SHAPE = 2
_KEPT = 24
"""Plans, of which none that must take longer is gone through."""
_NEAR = 1.05
"""Sets of sites that cannot be under so many times the best known, which is a guess, are not searched."""

_SITES, _NEAR_SITES = 3, 1.5
"""Sites whose best plans are looked at more closely, and how many times more is expected of others at most."""

Score = tuple[float, float, float]


class RankedPlan(Record):
    """A plan with what the search expects of it."""

    plan: PoolPlan
    score: Score
    """Limits broken, value, seconds: compared in this order."""


def contenders(costs: PoolCosts, ranked: Sequence[RankedPlan], count: int) -> list[RankedPlan]:
    """Return what a simulator should choose from: the first, the first on each number of sites, and of the best sites.

    What is expected of plans on more or other sites is wrong by other factors, and more sites push no site's plans out.
    """
    sites = [frozenset(costs.pools[pool].site for pool in entry.plan.devices_by_pool) for entry in ranked]
    broken, value, seconds = ranked[0].score if ranked else (0.0, 0.0, 0.0)
    most = broken, value * _NEAR_SITES, seconds * _NEAR_SITES
    near = [number for number, entry in enumerate(ranked) if entry.score <= most]
    chosen = {*range(min(count, len(ranked)))}
    chosen |= {*few_of_each(near, lambda number: len(sites[number]), most=count)}
    alone = [number for number in near if len(sites[number]) == 1]
    best = {*few_of_each((sites[number] for number in alone), lambda own: own, most=_SITES)}
    inside = [number for number in alone if sites[number] in best]
    chosen |= {*few_of_each(inside, lambda number: sites[number], each=count, most=count * _SITES)}
    return [ranked[number] for number in sorted(chosen)]


class PoolSearch:
    """One search."""

    def __init__(self, costs: PoolCosts, goal: Goal, *, divides: bool = False, deep: bool = False) -> None:
        """Keep what is searched.

        `divides`: micro-batches must divide the global batch, not fill it up; `deep`: stages may hold more
        micro-batches than 1F1B does.
        """
        self._costs, self._goal, self._divides, self._deep = costs, goal, divides, deep
        self._chains = ChainCosts(costs)

    def ranked(self) -> list[RankedPlan]:
        """Return the best plans found, best first; none where nothing fits."""
        found: dict[PoolPlan, RankedPlan] = {}
        best: RankedPlan | None = None
        searched = 0
        for territory in Territories(self._costs):
            # Where no plan on all of these sites can be as good as the best known, which keeps the limits.
            known_s = math.inf if best is None or self._goal.cheapest or best.score[0] > 0 else best.score[2]
            if known_s < math.inf and self._costs.least_step_s(territory.sites) > _NEAR * known_s:
                continue
            searched += 1
            varied = _VARIED if searched <= _FEW_TERRITORIES else _VARIED_OF_MANY
            placer = Placer(self._chains, territory.members, counts_money=self._goal.counts_money, deep=self._deep)
            for across in (None, territory.ends) if territory.ends else (None,):
                for guess in _varied(self._guesses(territory, best, varied, across), _PLACED):
                    for plan in placer.plans(guess):
                        most_s = self._most_to_reckon_s(found) if territory.ends else math.inf
                        if plan not in found and (most_s == math.inf or placer.least_s(plan, most_s) <= most_s):
                            found[plan] = self._reckoned(placer, plan)
            best = min(found.values(), key=lambda entry: entry.score, default=None)
        rows = sorted(found.values(), key=lambda entry: entry.score)
        polished = [self._polished(entry) for entry in contenders(self._costs, rows, _POLISHED)]
        unique = {(entry.plan.micro_batch, entry.plan.stages): entry for entry in (*polished, *rows)}
        return sorted(unique.values(), key=lambda entry: entry.score)

    def _most_to_reckon_s(self, found: Mapping[PoolPlan, RankedPlan]) -> float:
        """Return the longest step that may be among the best: whoever asks looks at a few of them."""
        if self._goal.cheapest or self._goal.has_limits or len(found) < _KEPT:
            return math.inf
        return heapq.nsmallest(_KEPT, (entry.score[2] for entry in found.values()))[-1]

    def _guesses(
        self, territory: Territory, best: RankedPlan | None, varied: int, across: tuple[int, int] | None
    ) -> list[tuple[Score, Guess]]:
        """Return the best cut and varied candidates of a set of sites, those that could beat the best plan known.

        `across`: pools of two sites if sums are to cross sites, and messages not; else nothing is counted for sites.
        """
        sketcher = Sketcher(self._chains, territory.available, self._goal, divides=self._divides, across=across)
        known: dict[StageChain, tuple[Score, Guess] | None] = {}
        most_s, known_value = math.inf, (math.inf, math.inf)
        if best is not None and best.score[0] == 0:
            most_s = self._goal.most_step_to_look_at_s(best.score[2])
            known_value = (best.score[2], best.score[1] if self._goal.cheapest else math.inf)
        candidates = iter(sketcher.best(_CUT, known_value))
        while some := list(islice(candidates, _CUT_AT_ONCE)):
            self._cut(some, known, most_s, across)
            keeping = (row[0][2] for row in map(known.__getitem__, some) if row is not None and row[0][0] == 0)
            most_s = min(most_s, self._goal.most_step_to_look_at_s(min(keeping, default=math.inf)))
        rows = sorted((row for row in known.values() if row is not None), key=lambda row: row[0])
        for start in _varied(rows, varied):
            self._vary(start.candidate, territory, known, across)
        return sorted((row for row in known.values() if row is not None), key=lambda row: row[0])

    def _cut(
        self,
        candidates: Sequence[StageChain],
        known: dict[StageChain, tuple[Score, Guess] | None],
        most_s: float,
        across: tuple[int, int] | None,
    ) -> None:
        """Cut those that are not known yet; none is kept that must take longer than a time."""
        new = list(dict.fromkeys(candidate for candidate in candidates if candidate not in known))
        for candidate, (guess, least_s) in zip(new, self._chains.guesses(new, most_s), strict=True):
            if guess is None or least_s > most_s:
                known[candidate] = None
                continue
            if across is not None and candidate.width > 1:
                stages = np.array(float(len(candidate.recipes)))
                more_s = float(self._costs.sums_across_s(*across, candidate.width, stages))
                guess = guess._replace(step_s=guess.step_s + more_s)
            known[candidate] = self._goal.score(guess.step_s, self._usd_per_s(candidate.devices_by_kind)), guess

    def _usd_per_s(self, devices: Mapping[int, int]) -> float:
        return sum(count * self._costs.usd_per_s(pool) for pool, count in devices.items())

    def _vary(
        self,
        start: StageChain,
        territory: Territory,
        known: dict[StageChain, tuple[Score, Guess] | None],
        across: tuple[int, int] | None,
    ) -> None:
        """Go to the best neighbour as long as it is better."""
        degrees = {pool: self._costs.degrees(pool, start.size) for pool in territory.available}
        here = known[start]
        assert here is not None, "what is varied fits"
        for _ in range(_ROUNDS):
            # What takes longer is no step ahead, unless it is money that counts.
            most_s = math.inf if here[0][0] > 0 or self._goal.cheapest else here[0][2]
            around = tuple(neighbours(here[1].candidate, territory.available, degrees, self._costs.units))
            self._cut(around, known, most_s, across)
            rows = [row for row in map(known.__getitem__, around) if row is not None]
            best = min(rows, key=lambda row: row[0], default=here)
            if best[0] >= here[0]:
                return
            here = best

    def _reckoned(self, placer: Placer, plan: PoolPlan) -> RankedPlan:
        step_s, traffic_usd = placer.timing(plan)
        score = self._goal.score(step_s, self._usd_per_s(plan.devices_by_pool), traffic_usd)
        return RankedPlan(plan=replace(plan, estimate_s=step_s), score=score)

    def _polished(self, entry: RankedPlan) -> RankedPlan:
        """Move cuts by one unit as long as that helps."""
        placer = Placer(self._chains, {}, counts_money=self._goal.counts_money, deep=self._deep)
        while True:
            near = [self._reckoned(placer, plan) for plan in self._other_cuts(entry.plan)]
            best = min(near, key=lambda other: other.score, default=entry)
            if best.score >= entry.score:
                return entry
            entry = best

    def _other_cuts(self, plan: PoolPlan) -> Iterator[PoolPlan]:
        begins = [stage.units.start for stage in plan.stages]
        recipes = tuple(tuple((member, 1) for member, _ in stage.runs) for stage in plan.stages)
        chain = StageChain(size=plan.micro_batch, width=plan.width, micro_batches=plan.micro_batches, recipes=recipes)
        for at in range(1, len(begins)):
            for step in (-1, 1):
                moved = [*begins[:at], begins[at] + step, *begins[at + 1 :]]
                if self._chains.fits(chain, moved):
                    ends = (*moved[1:], self._costs.units)
                    yield replace(
                        plan,
                        stages=tuple(
                            PoolStage(units=range(i, j), runs=stage.runs)
                            for stage, i, j in zip(plan.stages, moved, ends, strict=True)
                        ),
                    )


def _varied(rows: Sequence[tuple[Score, Guess]], most: int) -> list[Guess]:
    """Return the first guesses, few of one micro-batch size, width and number of stages."""

    def shape(guess: Guess) -> tuple[int, int, int]:
        return guess.candidate.size, guess.candidate.width, len(guess.begins)

    return few_of_each((guess for _, guess in rows), shape, each=_OF_A_SHAPE, most=most)
