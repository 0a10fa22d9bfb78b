"""Predict a plan: the event simulator with the costs of a profile; and find the order of work that it should follow.

A plan may not fit over time where more messages wait than its in-flight limits leave room for (`over_time`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.cost.held_sizes import HeldSizes
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost
from spantrain.cost.replicas import ReplicaCost
from spantrain.errors import PlanError, ScheduleError
from spantrain.planner.request import Evaluation, Proposal
from spantrain.planner.strategies.score import structure_of
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import Limited, SearchEffort, taper, with_hints
from spantrain.sim.stale import simulate_stale

if TYPE_CHECKING:
    from spantrain.planner.engine.evaluate import Evaluator
    from spantrain.planner.engine.outcome import Ranking


def costs_of(plan: Plan, profile: Profile, replicas: ReplicaCost | None = None) -> ProfileCosts:
    """Return what everything in a step of a plan costs, as training predicts it and validation checks it.

    `replicas` of the same profile and dtype save working them out again for each of many plans.
    """
    return ProfileCosts(profile, plan, replicas=replicas)


def predict(plan: Plan, profile: Profile, *, optimizer: str | None = None, staleness: int = 0) -> SimulationResult:
    """Return what a plan should do; with an optimizer, bytes over time as well.

    With staleness, steps overlap (`sim.stale`).
    """
    sizes = {} if optimizer is None else _held_sizes(plan, profile, optimizer, staleness)
    run = simulate_stale if staleness else simulate
    return run(plan, costs_of(plan, profile), options=SimulationOptions(held_sizes=sizes))


def _held_sizes(plan: Plan, profile: Profile, optimizer: str, staleness: int = 0) -> Mapping[str, HeldSizes]:
    return MemoryCost(profile, optimizer, plan.dtype, staleness=staleness).plan_held_sizes(plan)


def with_best_order(plan: Plan, profile: Profile, *, effort: SearchEffort | None = None) -> Plan:
    """Return the plan with the order of work for `critical-path` that a search finds; others have an order already."""
    if plan.schedule != "critical-path":
        return replace(plan, hints=None)
    return with_hints(plan, costs_of(plan, profile), effort=effort)


def with_best_spans(
    plan: Plan, profile: Profile, *, effort: SearchEffort | None = None, limited: Limited | None = None
) -> Plan:
    """Return the plan with the micro-batches and the order for `critical-path` that a search finds.

    `limited` gives other micro-batches in-flight limits (`sim.search.search.taper`). Where samples depend on each
    other, micro-batches stay: others would give other losses.
    """
    if plan.schedule != "critical-path" or profile.graph.fewest_samples(range(len(profile.graph.units))):
        return with_best_order(plan, profile, effort=effort)
    return taper(plan, costs_of(plan, profile), effort=effort, limited=limited)


Row = tuple[Proposal, Evaluation]
Ranked = tuple[Row, ...]
"""Best first."""
ORDER_MAY_GAIN = 1.25
"""Plans over the best by more than that (shown, and not) have the plain rule's order: it seldom gains as much."""
_ORDERED_UP_TO = 96
"""Devices in use up to which an order is searched for: with more it takes longer than the rest of planning."""
_EFFORT, _LESS = (SearchEffort(max_runs=runs, max_actions=1_000 * runs) for runs in (60, 12))
"""What an order of work is searched with (with more, plans came out the same), and those of a few plans besides."""
_FURTHER, _FURTHER_ACTIONS, _FURTHER_ACTIONS_OF_ONE = 16, 2_000, 600
"""How many further plans have their order searched, and of how many actions in a step, together and at most of one that
counts (a search has an end), of those that are tried first and of the others."""
_FURTHER_GAINS, _IDLE = 1.2, 0.9
"""By how much they may be over the best with the plain rule's orders, and for which part of its step their devices may
work, in the mean: for more, and there is little to gain."""
_FURTHER_BEST, _LESS_MISSES, _FURTHER_IN_VAIN = 4, 1.03, 4
"""How many of them are searched with more effort: the best with the order found, if not far over the best of all; and
after how many in a row that are further over it none is tried any more."""
_Key = tuple[tuple[Stage, ...], str, int]


def _key(plan: Plan, effort: SearchEffort = _EFFORT) -> _Key:
    return plan.stages, plan.schedule, effort.max_runs


class PlanOrders:
    """Searches the micro-batches and the order of work of plans, of each once."""

    def __init__(self, profile: Profile, evaluator: "Evaluator", ranking: "Ranking") -> None:
        self._profile, self._evaluator, self._ranking = profile, evaluator, ranking
        self._found: dict[_Key, tuple[float, Plan]] = {}
        """With the seconds that a step was to be under."""

    def ordered(self, proposal: Proposal, evaluation: Evaluation, effort: SearchEffort = _EFFORT) -> Row:
        """Return the proposal with the micro-batches and the order of work that a search finds, if that is better."""
        if len(proposal.plan.stages) == 1:
            return proposal, evaluation
        known = [self._found.get(_key(proposal.plan, one)) for one in (_EFFORT, effort)]
        plan = next((entry[1] for entry in known if entry and entry[0] >= effort.below_s), None)
        if plan is None:
            plan = with_best_spans(proposal.plan, self._profile, effort=effort, limited=self._evaluator.limited)
            self._found[_key(proposal.plan, effort)] = effort.below_s, plan
        if (plan.stages, plan.hints) == (proposal.plan.stages, proposal.plan.hints):
            return proposal, evaluation
        searched = self._evaluator(plan)
        worse = self._ranking.value(searched) >= self._ranking.value(evaluation)
        if worse or not searched.fits or self._ranking.broken(plan, searched):
            return proposal, evaluation
        gain = 100 * (1 - searched.step_s / evaluation.step_s)
        recut = "" if plan.stages == proposal.plan.stages else "other micro-batches and "
        reason = f"Searching {recut}an order of work took {gain:.1f} % off the step."
        plan = replace(proposal.plan, stages=self._evaluator.bucketed(plan).stages, hints=plan.hints)
        return replace(proposal, plan=plan, reasons=(*proposal.reasons, reason)), searched

    def first_ordered(self, ranked: Ranked, below_s: float = math.inf) -> Ranked:
        """Search the order of the best plan that is small and whose schedule has one to search, if near the best."""
        most = ORDER_MAY_GAIN * self._ranking.value(ranked[0][1])[0]
        searched = (row for row in ranked if row[0].plan.hints is None and row[0].plan.schedule == "critical-path")
        first = next((row for row in searched if len(row[0].plan.devices) <= _ORDERED_UP_TO), None)
        if first is None or self._ranking.value(first[1])[0] > most:
            return ranked
        rows = self.ordered(*first, replace(_EFFORT, below_s=below_s)), *(row for row in ranked if row is not first)
        return tuple(sorted(rows, key=self._ranking.rank))

    def further(self, rows: Iterable[Row], best: Row) -> Ranked:
        """Return further plans with an order that was searched, of those that may be better than the best with one.

        They are unlike each other, and their devices wait for a while: with little effort first, then the best few with
        all of it. What an order brings differs from plan to plan, by a tenth and more, and most between plans of other
        numbers of stages and sizes of micro-batches: the best of each of these is tried before all others.
        """
        tried, known = list[tuple[Row, Row]](), best
        for group in self._worth_trying(rows, best):
            left, in_vain = _FURTHER_ACTIONS, 0
            for row in group:
                if left <= 0 or len(tried) >= _FURTHER or in_vain >= _FURTHER_IN_VAIN:
                    break
                actions = 3 * sum(len(stage.replicas) * len(stage.micro_batches) for stage in row[0].plan.stages)
                left -= min(actions, _FURTHER_ACTIONS_OF_ONE)
                below_s = _LESS_MISSES * self._ranking.below_s(best[1])
                tried.append((row, done := self.ordered(*row, replace(_LESS, below_s=below_s))))
                in_vain = in_vain + 1 if self._misses(done, best) else 0
                best = min(best, done, key=self._ranking.rank)
        tried.sort(key=lambda entry: self._ranking.rank(entry[1]))
        near = (row for row, done in tried if not self._misses(done, best) and _key(row[0].plan) not in self._found)
        effort = replace(_EFFORT, below_s=self._ranking.below_s(best[1]))
        found = (best, *(self.ordered(*row, effort) for row in islice(near, _FURTHER_BEST)))
        return tuple(sorted((row for row in found if row is not known), key=self._ranking.rank))

    def _worth_trying(self, rows: Iterable[Row], best: Row) -> tuple[Ranked, Ranked]:
        """Return, best first, the best plan of each number of stages and size of micro-batches, and the others."""
        value, chosen = self._ranking.value, self._ranking.rank(best)[:2]
        plain = [row for row in rows if row[0].plan.hints is None and self._ranking.rank(row)[:2] == chosen]
        least = min((value(evaluation)[0] for _, evaluation in plain), default=0.0)
        looks: set[object] = {plan.stages for _, plan in self._found.values()}
        firsts, others = dict[tuple[int, int], Row](), list[Row]()
        for row in sorted(plain, key=self._ranking.rank):
            (stages, seconds), bubble_ratio = (row[0].plan.stages, value(row[1])[0]), row[1].bubble_ratio
            # What differs in shares alone, and takes as long, is held up by the same devices.
            look = (structure_of(row[0].plan), f"{seconds:.5g}", *(stage.first_unit for stage in stages))
            waits = seconds * (1 - bubble_ratio) < min(_IDLE * least, value(best[1])[0])
            if seconds > _FURTHER_GAINS * least or not waits or len(stages) == 1 or look in looks or stages in looks:
                continue
            looks.add(look)
            if firsts.setdefault((len(stages), stages[0].micro_batches[0].size), row) is not row:
                others.append(row)
        return tuple(firsts.values()), tuple(others)

    def _misses(self, row: Row, best: Row) -> bool:
        """Whether a plan whose order was searched with little effort is too far from the best for more of it."""
        return self._ranking.value(row[1])[0] >= _LESS_MISSES * self._ranking.value(best[1])[0]


_UP_TO = 96
"""Devices up to which a plan is simulated with memory over time."""


def over_time(plan: Plan, profile: Profile, optimizer: str) -> tuple[str, ...]:
    """Return a warning for each device that holds more than it has in the simulated step; none for large plans."""
    if len(plan.devices) > _UP_TO:
        return ()
    try:
        options = SimulationOptions(held_sizes=_held_sizes(plan, profile, optimizer), trace=False)
        peaks = simulate(plan, costs_of(plan, profile), steps=1, options=options).peak_bytes
    except (PlanError, ScheduleError):
        return ()
    own = plan.cluster.device_by_name
    return tuple(
        f"{name} may hold {format_bytes(size)} at its peak and has {format_bytes(own[name].memory_bytes)}: the order "
        f"of work lets more than {BUFFERED_MICRO_BATCHES} messages of a kind wait there; 1f1b may not."
        for name, size in peaks.items()
        if size > own[name].memory_bytes
    )
