"""Looks for a plan for links as they are: near the one for calm links, on the same devices, by simulating."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from spantrain.adaptation.network_state import Expects, LinkState
from spantrain.core.plan import Plan, Stage
from spantrain.core.records import Record
from spantrain.formats.registry import WireFormat

_MOVES = (1, -1, 2, -2, 4, -4)
"""Units that go to the stage before, or after."""


Other = tuple[Plan, str]
"""A plan that might run, and what is other in it."""


def with_formats(base: Plan, state: LinkState, allowed: Sequence[WireFormat]) -> Iterator[Other]:
    """Yield the plan with each of the allowed wire formats on its slow cuts, where it has another there."""
    slow = []
    for cut, (before, after) in enumerate(pairwise(base.stages)):
        pairs = ((a.devices[0], b.devices[0]) for a in before.replicas for b in after.replicas)
        if any(min(state.speed(a, b), state.speed(b, a)) < 1 for a, b in pairs):
            slow.append(cut)
    for form in allowed:
        if any(base.stages[cut].wire_format is not form for cut in slow):
            stages = (replace(one, wire_format=form) if cut in slow else one for cut, one in enumerate(base.stages))
            yield replace(base, stages=tuple(stages), hints=None), f"{form} on cut {', '.join(map(str, slow))}"


def moved_units(plan: Plan) -> Iterator[Other]:
    """Yield plans with some units moved over one cut; what was recomputed of them is no longer."""
    for cut in range(0 if plan.interleaved else len(plan.stages) - 1):
        before, after = plan.stages[cut], plan.stages[cut + 1]
        for move in _MOVES:
            edge = before.end_unit + move
            if not before.first_unit < edge < after.end_unit:
                continue
            stages = (
                *plan.stages[:cut],
                _with_units(before, before.first_unit, edge),
                _with_units(after, edge, after.end_unit),
                *plan.stages[cut + 2 :],
            )
            yield replace(plan, stages=stages, hints=None), f"cut {cut} behind unit {edge - 1}"


def _with_units(stage: Stage, first: int, end: int) -> Stage:
    recompute = tuple(unit for unit in stage.recompute if first <= unit < end)
    return replace(stage, first_unit=first, end_unit=end, recompute=recompute)


_HORIZON_STEPS = 20
"""Steps over which the better of two plans must be the faster one, with its toll."""
_TOO_LONG_STEPS = 1.5
"""For so many steps a plan for slow links still runs when those are calm again."""
_FASTER = 0.98
"""A plan whose step takes so much of the first plan's on calm links is for those as well."""
_ROUNDS = 2
"""Times that a cut is moved on top of the best plan so far."""


class Forecast(Expects, Protocol):
    """What a plan would do under some state of the links; made for the adapter by whoever has costs and a simulator."""

    def step_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step; infinite where the plan cannot run or does not fit."""

    def adapted_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step on links that were calm before, with what devices then do by themselves."""

    def tuned(self, plan: Plan, state: LinkState) -> Plan:
        """Return the plan with the micro-batches, and the order of work, that are found to be best in a moment."""

    def move_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        """Return the seconds that it takes to go over to a plan; infinite where that cannot be done."""


class Find(Record):
    """A plan that might run."""

    plan: Plan
    seconds: float
    """Seconds of a step on the links that it was looked for."""
    toll_s: float = 0.0
    """What running it instead of the present plan costs once: the way there and back, and the steps that it still runs
    when links are calm again."""
    stays: bool = False
    """Whether it is faster than the first plan on calm links, too."""
    what: tuple[str, ...] = ()
    """What is other in it."""

    @property
    def spread_s(self) -> float:
        """The seconds of a step, with its part of the toll."""
        return self.seconds + self.toll_s / _HORIZON_STEPS


class PlanSearch:
    """One search: for one state of the links, beside one plan that runs."""

    def __init__(self, forecast: Forecast, base: Plan, running: Plan, state: LinkState) -> None:
        """Begin with what runs, with what devices do by themselves; `base` is for calm links, and comes back then."""
        self._forecast = forecast
        self._base = base
        self.state = state
        """The links that it is looked for."""
        self.simulated = 1
        """Plans that were simulated; micro-batches and order that were looked for count as one."""
        self.running = self.best = Find(plan=running, seconds=forecast.adapted_s(running, state))

    @property
    def gain_s(self) -> float:
        """Seconds that a step gains by the best plan so far."""
        return self.running.seconds - self.best.seconds

    def near(self, allowed: Sequence[WireFormat]) -> None:
        """Look at plans near the base: micro-batches and orders, allowed formats on slow cuts, cuts a few units off."""
        self.try_tuned(self._base, ())
        for plan, what in () if self._base.interleaved else with_formats(self._base, self.state, allowed):
            self.try_tuned(plan, (what,))
        if self._base != self.running.plan:
            self.simulated += 1
            self._take(self._base, self._forecast.adapted_s(self._base, self.state), ("the plan for calm links",))
        for _ in range(_ROUNDS):
            if not self._move_a_cut():
                break

    def try_tuned(self, plan: Plan, what: tuple[str, ...]) -> bool:
        """Look at a plan with micro-batches and an order for these links; return whether it is the best so far."""
        self.simulated += 1
        tuned = self._forecast.tuned(plan, self.state)
        return self.try_plan(tuned, (*what, "micro-batches and order for these links"))

    def try_plan(self, plan: Plan, what: tuple[str, ...]) -> bool:
        """Look at a plan as it is; return whether it is the best so far."""
        return self._take(plan, self._step_s(plan), what)

    def _move_a_cut(self) -> bool:
        """Move a cut of the best plan so far; return whether anything was won."""
        near = (other for other in moved_units(self.best.plan) if self._way_s(other[0], back=False) < math.inf)
        timed = [(self._step_s(plan), plan, what) for plan, what in near]
        seconds, plan, what = min(timed, key=lambda entry: entry[0], default=(math.inf, self.best.plan, ""))
        return seconds < self.best.seconds and self.try_tuned(plan, (*self.best.what, what))

    def _take(self, plan: Plan, seconds: float, what: tuple[str, ...]) -> bool:
        """Take a plan for the best, if it is with its toll."""
        if seconds >= self.best.spread_s:
            return False
        calm_s, base_s, running_s = map(self._calm_s, (plan, self._base, self.running.plan))
        stays = calm_s <= _FASTER * base_s
        toll_s = self._way_s(plan, back=not stays) + _TOO_LONG_STEPS * max(0.0, calm_s - running_s)
        found = Find(plan=plan, seconds=seconds, toll_s=toll_s, stays=stays, what=what)
        if found.spread_s >= self.best.spread_s:
            return False
        self.best = found
        return True

    def _way_s(self, plan: Plan, *, back: bool) -> float:
        """Return the seconds of going over to a plan now, and back when links are calm again."""
        move_s = self._forecast.move_s
        there_s = move_s(self.running.plan, plan, self.state)
        return there_s + move_s(plan, self._base, LinkState()) if back else there_s

    def _calm_s(self, plan: Plan) -> float:
        self.simulated += 1
        return self._forecast.step_s(plan, LinkState())

    def _step_s(self, plan: Plan) -> float:
        self.simulated += 1
        return self._forecast.step_s(plan, self.state)
