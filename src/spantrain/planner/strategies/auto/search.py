"""The search of `auto`: a pool of bounded shapes that grows by small changes, and the simulation of the best of it."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.planner.request import Evaluation
from spantrain.planner.strategies.auto.cuts import Bounded, Cutter, Parts
from spantrain.planner.strategies.auto.moves import Moves
from spantrain.planner.strategies.auto.shape import PlanShape, ShapeBuilder
from spantrain.planner.strategies.score import Score, Scorer, best_inside, few_of_each, looks_of, structure_of

_SAME = 1 - 1e-9
_PATIENCE = 150
"""Simulations without a new best after which the search ends."""
_NEAR = 1.1
_FAR = 1.25
"""What is expected to be so much over the best is not simulated; of n like plans before, so much less by sqrt(n)."""
_TRUSTS = 0.5
"""When nothing is promising any more, so much of what simulation added to plans is expected of others like them."""
_EXPANSIONS, _LAST = 20, 6
"""Around so many plans that are at most that much over the best the search goes on, in the end around so many of them;
around a new best always."""
_CUTS_TRIED = 6
"""Of a plan's other cuts, the most promising, so many are simulated in the end."""
_TO_POLISH = 4
"""What part of the budget is there for moving cuts in the end, if no more is left."""
_SET_UP = 200
"""What a simulation costs before its first action, in actions."""
_BUILT = 20
"""What a plan costs that is built and then not simulated."""
_SIZES_OF_PARTS = 2
"""Sizes of micro-batches of which the best plan inside a site, or without a kind, is simulated in any case."""
_OF_A_STRUCTURE, _SIZES = 2, 4
"""Plans of one structure and micro-batch that are proposed at most; sizes of micro-batches of which the best is."""
_SHARES_OF_BEST = 3
"""How many of the best neighbours have their cuts and shares varied, too."""


class SimulatedPlan(Record):
    """A plan that was simulated."""

    score: Score
    plan: Plan
    evaluation: Evaluation
    shape: PlanShape | None
    """None where the plan is not one that a shape can say."""


class Entry(NamedTuple):
    """What is known of a shape that was not simulated."""

    bound: Score
    """The least that it breaks and costs."""
    expected: Score
    """What it may come to."""
    expected_s: float
    """Seconds of its step, likewise."""


@dataclass(kw_only=True)
class BoundedShapes:
    """All shapes that were looked at, each once."""

    scorer: Scorer
    entries: dict[PlanShape, Entry] = field(default_factory=dict)
    waiting: list[tuple[Score, int, PlanShape]] = field(default_factory=list)
    """A heap of shapes by what is expected of them; of equal ones the first that was found comes first."""
    _count: int = 0

    def add(self, found: Iterable[Bounded]) -> list[tuple[Score, PlanShape]]:
        """Add shapes; return them with what is expected of them, best first."""
        rows = []
        for entry in found:
            known = self.entries.get(entry.shape)
            if known is None:
                broken = likely = 0.0
                if not self.scorer.is_free:
                    devices = entry.shape.devices
                    broken = self.scorer.least_broken(devices, entry.step_s)
                    likely = self.scorer.least_broken(devices, entry.expected_s)
                known = Entry(Score(broken, entry.value), Score(likely, entry.expected_value), entry.expected_s)
                self.entries[entry.shape] = known
                self.wait(known.expected, entry.shape)
            rows.append((known.expected, entry.shape))
        rows.sort(key=lambda row: row[0])
        return rows

    def wait_anew(self) -> None:
        """Put all shapes among those that may be simulated, by what was expected of them first."""
        self.waiting.clear()
        for shape, entry in self.entries.items():
            self.wait(entry.expected, shape)

    def wait(self, expected: Score, shape: PlanShape) -> None:
        """Put a shape among those that may be simulated."""
        self._count += 1
        heapq.heappush(self.waiting, (expected, self._count, shape))


class Searcher:
    """Descends along what is expected of plans, then simulates within a budget of actions."""

    def __init__(self, cutter: Cutter, moves: Moves, builder: ShapeBuilder, scorer: Scorer, budget: int) -> None:
        self._cutter, self._moves, self._builder, self._trusts = cutter, moves, builder, 1.0
        self._budget, self._polish_budget, self._expansions = budget, budget // _TO_POLISH, _EXPANSIONS
        self.scorer = scorer
        self.pool = BoundedShapes(scorer=scorer)
        self.simulated: list[SimulatedPlan] = []
        self._done: set[PlanShape] = set()
        self._seen: set[tuple[object, ...]] = set()
        self._looked_around: set[tuple[int, Parts]] = set()
        self._ratio: dict[tuple[object, ...], float] = {}
        self._least_ratio: dict[tuple[int, int], float] = {}
        self._counts: dict[tuple[int, int], int] = {}

    @property
    def best(self) -> SimulatedPlan | None:
        """The best plan simulated so far."""
        return min(self.simulated, key=lambda found: found.score, default=None)

    def unlike(self, most: int) -> list[SimulatedPlan]:
        """Return the best plans, few of the same structure and size: what comes behind may gain more by another order.

        Of those that differ in the names of devices, sites and hosts alone, and take as long, the first stands for all.
        """
        ranked = sorted(self.simulated, key=lambda found: found.score)
        firsts = {looks_of(found.plan, found.score.value): found for found in reversed(ranked)}
        rows = sorted(firsts.values(), key=lambda found: found.score)
        return few_of_each(rows, lambda found: structure_of(found.plan), each=_OF_A_STRUCTURE, most=most)

    def firsts(self) -> list[SimulatedPlan]:
        """Return the best plan inside each of the best sites, and of each of the best sizes of micro-batches."""
        ranked = sorted((one for one in self.simulated if one.evaluation.fits), key=lambda found: found.score)
        of_sizes = few_of_each(ranked, lambda found: found.plan.stages[0].micro_batches[0].size, most=_SIZES)
        return best_inside(((one.score, one) for one in ranked), lambda one: one.plan) + of_sizes

    def descend(self, start: PlanShape, most_rounds: int) -> PlanShape:
        """Go to the most promising neighbour as long as there is a better one; return where that ends."""
        here = start
        score = self._expected(here)
        for _ in range(most_rounds):
            rows = self._around(here)
            if not rows or not rows[0][0] < score:
                break
            score, here = rows[0]
        return here

    def simulate_promising(self) -> None:
        """Simulate what could be the best, most promising first, and look around each new best, within the budget."""
        unchanged = 0
        while self._budget > 0 and unchanged < _PATIENCE:
            shape = self._most_promising()
            if shape is None:
                if not self._look_further():
                    if self._trusts < 1.0:
                        return
                    self._trusts, unchanged = _TRUSTS, 0
                    self.pool.wait_anew()
                continue
            before = self.best
            if not self.simulate(shape):
                continue
            now = self.best
            unchanged = 0 if now is not before else unchanged + 1
            if now is not None and (now is not before or self._expansions > _LAST):
                near = self.simulated[-1].score.value <= _NEAR * now.score.value
                self._expansions -= near
                if near:
                    self._around(shape)

    def polish(self, count: int) -> None:
        """From the best plans of so many structures and sizes, move cuts while simulation says that it helps."""
        self._budget = max(self._budget, self._polish_budget)
        firsts: dict[object, tuple[Score, PlanShape]] = {}
        for found in sorted(self.simulated, key=lambda found: found.score):
            if found.shape is not None:
                firsts.setdefault((found.shape.size, _structure(found.shape)), (found.score, found.shape))
        for first in list(firsts.values())[:count]:
            here: tuple[Score, PlanShape] | None = first
            while here is not None and self._budget > 0:
                here = self._better_near(*here)

    def _better_near(self, score: Score, here: PlanShape) -> tuple[Score, PlanShape] | None:
        """Simulate those with other cuts that could be the best of all; return the best if it is better."""
        first = len(self.simulated)
        for _, shape in self.pool.add(self._cutter.bounded([*self._moves.cuts(here)]))[:_CUTS_TRIED]:
            if not self._is_hopeless(shape, self.best):
                self.simulate(shape)
        rows = [(found.score, found.shape) for found in self.simulated[first:] if found.shape and found.score < score]
        return min(rows, key=lambda row: row[0], default=None)

    def _look_further(self) -> bool:
        """Look around the best plan near the best of all, else the most promising shape, of which that was not done.

        Returns whether there was one.
        """
        most = None if self.best is None else Score(self.best.score.broken, _NEAR * self.best.score.value)
        near = [(one.score, one.shape) for one in self.simulated if one.shape and most and one.score <= most]
        promising = ((entry.expected, shape) for shape, entry in self.pool.entries.items())
        for rows in (near, promising) if self._expansions > 0 else ():
            here = min((row for row in rows if self._is_new(row[1])), key=lambda row: row[0], default=None)
            if here is not None:
                self._expansions -= 1
                self._around(here[1])
                return True
        return False

    def _is_new(self, shape: PlanShape) -> bool:
        return (shape.size, shape.parts) not in self._looked_around

    def simulate(self, shape: PlanShape) -> bool:
        """Simulate a shape if it fits, and neither it nor one with devices that only differ in name was.

        Returns whether it was simulated.
        """
        if shape in self._done:
            return False
        self._done.add(shape)
        plan = self._builder.plan(shape)
        self._budget -= _BUILT
        if plan is None or (looks := _looks_on_sites(plan)) in self._seen:
            return False
        self._seen.add(looks)
        entry = self.pool.entries.get(shape)
        if not self.take(plan, shape):
            return False
        if entry is not None and entry.expected_s > 0:
            self._learn(shape, self.simulated[-1].evaluation.step_s / entry.expected_s)
        return True

    def take(self, plan: Plan, shape: PlanShape | None) -> bool:
        """Simulate a plan, wherever it comes from; return whether it can run."""
        scored = self.scorer.score(plan)
        self._budget -= _SET_UP + 3 * sum(len(sizes) for stage in plan.stages for sizes in stage.sizes_by_replica)
        if shape is not None:
            self._done.add(shape)
        if scored is None:
            return False
        score, evaluation = scored
        self.simulated.append(SimulatedPlan(score=score, plan=plan, evaluation=evaluation, shape=shape))
        return True

    def _expected(self, shape: PlanShape) -> Score:
        if shape not in self.pool.entries:
            self.pool.add(self._cutter.bounded([shape]))
        known = self.pool.entries.get(shape)
        return Score(float("inf"), float("inf")) if known is None else known.expected

    def _around(self, shape: PlanShape) -> list[tuple[Score, PlanShape]]:
        """Add the neighbours of a shape to the pool; return those found now, best first."""
        rows = self.pool.add(self._cutter.bounded([*self._moves.cuts(shape), *self._moves.shares(shape)]))
        if not self._is_new(shape):
            return rows
        self._looked_around.add((shape.size, shape.parts))
        solved = self._cutter.solved(shape.size, self._moves.structures(shape.parts, shape.size))
        for size, parts in self._moves.sizes(shape.parts, shape.size):
            solved += self._cutter.solved(size, [parts])
        rows += self.pool.add(solved)
        rows.sort(key=lambda row: row[0])
        best = [near for _, near in rows[:_SHARES_OF_BEST]]
        nearer = [other for near in best for other in (*self._moves.cuts(near), *self._moves.shares(near))]
        rows += self.pool.add(self._cutter.bounded(nearer))
        rows.sort(key=lambda row: row[0])
        return rows

    def _learn(self, shape: PlanShape, ratio: float) -> None:
        """Note by how much simulation was over what was expected."""
        key = (shape.size, *_structure(shape))
        self._ratio[key] = min(ratio, self._ratio.get(key, ratio))
        alike = (shape.size, len(shape.parts))
        self._least_ratio[alike] = min(ratio, self._least_ratio.get(alike, ratio))
        self._counts[alike] = self._counts.get(alike, 0) + 1

    def _expected_ratio(self, shape: PlanShape) -> float:
        """Return the least of as many stages with such micro-batches, as far as that is trusted.

        Of the same stages half of what they add.
        """
        alike = self._least_ratio.get((shape.size, len(shape.parts)), 1.0)
        known = self._ratio.get((shape.size, *_structure(shape)))
        return 1 + self._trusts * (alike - 1) if known is None else (alike + known) / 2

    def _most_promising(self) -> PlanShape | None:
        """Return the shape of which the least is expected, corrected by what simulation made of like ones before.

        None if by that correction nothing comes near the best.
        """
        best = self.best
        while self.pool.waiting:
            expected, _, shape = heapq.heappop(self.pool.waiting)
            entry = self.pool.entries[shape]
            if shape in self._done or self._is_hopeless(shape, best):
                continue
            ratio, tried = self._expected_ratio(shape), max(1, self._counts.get((shape.size, len(shape.parts)), 0))
            # What takes longer than expected may break a limit that it was expected to keep.
            broken = self.scorer.least_broken(shape.devices, entry.expected_s * ratio)
            guess = Score(broken, entry.expected.value * ratio)
            if guess > expected:
                self.pool.wait(guess, shape)
            elif best is None or guess <= Score(best.score.broken, (1 + (_FAR - 1) / sqrt(tried)) * best.score.value):
                return shape
            elif guess > Score(best.score.broken, _FAR * best.score.value):
                self.pool.wait(guess, shape)
                return None
        return None

    def _is_hopeless(self, shape: PlanShape, best: SimulatedPlan | None) -> bool:
        """Whether a shape of the pool cannot be better than the best by its bound."""
        if best is None:
            return False
        return self.pool.entries[shape].bound >= Score(best.score.broken, best.score.value * _SAME)


def lowest(rows: Sequence[tuple[Score, PlanShape]], count: int) -> list[PlanShape]:
    """Return the first shapes with different sets of devices in their stages."""
    return few_of_each((shape for _, shape in rows), _structure, most=count)


def best_of_parts(cluster: Cluster, solved: list[list[tuple[Score, PlanShape]]]) -> list[PlanShape]:
    """Return the best inside each site and without each kind: what is expected of them may be less by mistake.

    Of each the best of its best sizes of micro-batches: what is expected of those is wrong by other factors.
    """
    rows = sorted((row for found in solved for row in found), key=lambda row: row[0])
    every, found = {device.kind for device in cluster.devices}, dict[tuple[str, ...], dict[int, PlanShape]]()
    for _, shape in rows:
        devices = [cluster.device_by_name[name] for name in shape.devices]
        sites, absent = {device.site for device in devices}, every - {device.kind for device in devices}
        for key in (*((site,) for site in sites if len(sites) == 1), *(("without", kind) for kind in absent)):
            of_sizes = found.setdefault(key, {})
            if len(of_sizes) < _SIZES_OF_PARTS:
                of_sizes.setdefault(shape.size, shape)
    return list(dict.fromkeys(shape for of_sizes in found.values() for shape in of_sizes.values()))


def _structure(shape: PlanShape) -> tuple[tuple[str, ...], ...]:
    return tuple(part.devices for part in shape.parts)


def _looks_on_sites(plan: Plan) -> tuple[object, ...]:
    """Return what tells a plan from others but the names of devices, if links between the same places are alike."""
    devices, hosts = plan.cluster.device_by_name, dict[tuple[str, str], int]()
    found: list[object] = [plan.stages[0].micro_batches[0].size]
    for stage in plan.stages:
        found.append(stage.first_unit)
        for replica in stage.replicas:
            device = devices[replica.devices[0]]
            host = hosts.setdefault((device.site, device.host), len(hosts))
            found.append((device.kind, device.site, host, replica.sample_share, replica.in_flight_limit))
    return tuple(found)
