"""Between two steps: whether links have changed enough to look for another plan, and which one is worth it.

Every change is simulated with the present links before it is taken, beside what runs under the same links. What links
should give is taken from a simulation, too: its messages go through the same monitors as live ones, so what those get
wrong they get wrong on both sides.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from spantrain.core.plan import Plan, WireFormat
from spantrain.policy.adapter.candidates import Candidate, by_stage, formats_and_cuts, moved_units
from spantrain.policy.adapter.state import SURE, LinkState, Pair, Reports, busy_links, measured_rates

__all__ = ["AutoBoundary", "AutoSettings", "BoundaryAdapter", "Forecast", "Proposal", "Replanner"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan for the steps to come."""

    plan: Plan
    reason: str
    simulated: int = 0
    """Plans that were simulated to find it; where none were, it is there before the next step begins."""


class BoundaryAdapter(Protocol):
    """Decides between steps."""

    def advise(self, step: int, plan: Plan, reports: Reports, step_s: float) -> Proposal | None:
        """Return what should run instead of the plan that ran this step, in so many seconds; None: leave it."""


class Forecast(Protocol):
    """What a plan would do under some state of the links; made for the adapter by whoever has costs and a simulator."""

    def step_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step; infinite where the plan cannot run or does not fit."""

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        """Return the rates that monitors would report, in bytes per second."""

    def ordered(self, plan: Plan, state: LinkState) -> Plan:
        """Return the plan with the best order of work that can be found in a moment."""

    def move_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        """Return the seconds that it takes to go over to a plan; infinite where that cannot be done."""


class Replanner(Protocol):
    """Plans anew for the same devices, beside training; made for the adapter by whoever has a planner."""

    def ask(self, state: LinkState) -> None:
        """Begin to plan for these links; what was asked before is forgotten."""

    def answer(self) -> Plan | None:
        """Return the plan that was asked for, once, when it is there; None: not yet, or there is none."""


@dataclass(frozen=True, kw_only=True)
class AutoSettings:
    """How eager the adapter is."""

    band: float = 1.2
    """Rates within this factor of what is expected are as expected: nothing is looked at."""
    at_once: float = 1.5
    """Links that are surely faster by this factor, and calm again, are believed after one step; all else after two."""
    calm_again: float = 0.92
    """Links whose median gives this part of what calm ones would, in two reports in a row, are calm, ..."""
    each_calm_again: float = 0.87
    """... if none gives less than this part: with many links, noise is always on some."""
    believed: float = 1.6
    """A simulation that is off by more than this factor is not believed."""
    matters: float = 0.1
    """Links that are busy for less than this part of a step are left alone, however slow they seem."""
    pays: float = 0.02
    """Another plan must save this part of a step."""
    allowed: tuple[WireFormat, ...] = ()
    """Wire formats that the user allows on slow cuts, besides the plan's own."""
    orders: int = 2
    """Candidates for which orders of work are searched."""
    rounds: int = 2
    """Times that single stages, and cuts, are changed on top of the best found."""
    horizon_steps: int = 20
    """In so many steps what is saved must pay for going over."""
    suffices: float = 1.15
    """A plan near the first one whose step takes at most so many times that of calm links is good enough."""


_LEARNING = 3
"""Reports of a link after which it is known how this runtime measures its expected rate: their median, ..."""
_CALM_REPORTS = 2
_KEPT = 3
"""Simulated states of the links: the calm one, the present one, and one that is looked at."""
_TRUSTED = 1.5
"""... within this factor; a link that is slow by more than that from the first step on is noticed all the same."""


@dataclass(kw_only=True)
class _Best:
    running: Plan
    plan: Plan
    seconds: float
    """Of its step."""
    moving_s: float = 0.0
    """Of going over to it: a part of each of the steps in which it must pay."""
    what: list[str] = field(default_factory=list)


class AutoBoundary:
    """Looks for a better plan when links have left the dead band around what is expected, and goes back when they are
    as planned; on calm links it compares a few numbers and nothing else.

    The band follows the links: once they are taken to be slow, it is around that. So noise at one threshold does not
    make it go to and fro.
    """

    def __init__(
        self,
        base: Plan,
        forecast: Forecast,
        settings: AutoSettings | None = None,
        replanner: Replanner | None = None,
    ) -> None:
        """Begin with the plan that was made for calm links; without a planner, plans near it are all that is tried."""
        self._base = base
        self._forecast = forecast
        self._replanner = replanner
        self._settings = settings or AutoSettings()
        self._state = LinkState()
        self._out: set[tuple[Pair, bool]] = set()
        """Links that were out of the band after the last step, and whether they were too fast."""
        self._calm_reports = 0
        """In a row, while the links are taken to be slow."""
        self._expected: list[tuple[Plan, LinkState, Mapping[Pair, float]]] = []
        """What was simulated last, the newest at the end."""
        self._first: dict[Pair, list[float]] = {}
        """Of each pair's first reports: how many times the expected rate it was."""
        self.simulated = 0
        """Plans that were simulated so far."""
        self._calm_s: float | None = None

    @property
    def state(self) -> LinkState:
        """What the links are taken to be."""
        return self._state

    def advise(self, step: int, plan: Plan, reports: Reports, step_s: float) -> Proposal | None:  # noqa: ARG002 - no count
        """Return a better plan for the present links, if it is worth it."""
        rates = self._learned(plan, measured_rates(reports))
        matter = busy_links(reports, self._settings.matters * step_s)
        factors = self._factors(plan, rates, self._state, matter)
        again, sure = self._have_changed(factors, measured_rates(reports, least=SURE))
        if self._are_calm_again(plan, rates, matter, sure=sure):
            return self._back(plan)
        if not again:
            calm = not self._out if self._state.calm else sure and self._state.changed(factors).calm
            return self._back(plan) if rates and calm else self._planned_anew(plan)
        before, self._state = self._state, self._refined(plan, factors)
        if self._state == before:
            return None
        if self._state.calm:
            return self._back(plan)
        if not self._explains(plan, step_s):
            self._state = before
            return None
        return self._search(plan)

    def _explains(self, plan: Plan, step_s: float) -> bool:
        """Whether a simulation with these links takes about as long as the step did: else it is no guide to a plan.

        So it is where messages are so small that software, not the links, takes their time.
        """
        simulated_s = self._step_s(plan)
        return simulated_s / self._settings.believed <= step_s <= simulated_s * self._settings.believed

    def _have_changed(self, factors: Mapping[Pair, float], sure: Collection[Pair]) -> tuple[bool, bool]:
        """Return whether links are out of the band as they were after the step before, and whether some have surely
        become much faster.

        The links of a step in the middle of a change are neither the old ones nor the new ones: a plan that is made for
        those is worse than none. Going back is not.
        """
        off = {pair: math.log(factor) for pair, factor in factors.items()}
        out = {(pair, by > 0) for pair, by in off.items() if abs(by) > math.log(self._settings.band)}
        far = any(pair in sure and by >= math.log(self._settings.at_once) for pair, by in off.items())
        again = bool(out & self._out)
        self._out = set() if again else out
        return again, far

    def _are_calm_again(self, plan: Plan, rates: Mapping[Pair, float], matter: Collection[Pair], *, sure: bool) -> bool:
        """Whether links that are taken to be slow have given nearly what calm ones would, in reports in a row; in one,
        if some have surely become much faster and going back moves nothing.

        Links that were seen in the middle of a change may be taken for faster than they were, and full speed then lies
        inside the band around that.
        """
        if self._state.calm or not rates:
            return False
        factors = self._factors(plan, rates, LinkState(), matter)
        calm = (
            median(factors.values() or [1.0]) >= self._settings.calm_again
            and min(factors.values(), default=1.0) >= self._settings.each_calm_again
        )
        self._calm_reports = self._calm_reports + 1 if calm else 0
        at_once = sure and calm and self._forecast.move_s(plan, self._base, LinkState()) == 0
        if not at_once and self._calm_reports < _CALM_REPORTS:
            return False
        self._calm_reports = 0
        return True

    def _learned(self, plan: Plan, rates: Mapping[Pair, float]) -> dict[Pair, float]:
        """Return the rates of links of which it is known how this runtime measures them; learn of the others.

        While links are taken to be slow nothing is learnt: whether a link is fast again, or a link in use for the first
        time slow, is what is asked. It is taken for measured as the others are.
        """
        expected = self._rates(plan, self._state)
        learned = {}
        for pair, rate in rates.items():
            first = self._first.setdefault(pair, [])
            if len(first) == _LEARNING or not self._state.calm:
                learned[pair] = rate
            elif pair in expected:
                first.append(rate / expected[pair])
        return learned

    def _usual(self, pair: Pair) -> float:
        """Return how many times the expected rate is measured of a link when all is well."""
        known = {other: median(first) for other, first in self._first.items() if len(first) == _LEARNING}
        usual = known[pair] if pair in known else median(known.values()) if known else 1.0
        return min(_TRUSTED, max(1 / _TRUSTED, usual))

    def _factors(
        self, plan: Plan, rates: Mapping[Pair, float], state: LinkState, matter: Collection[Pair]
    ) -> dict[Pair, float]:
        """Return how many times the rate of a state each link gives.

        Links that are not slow in it get no faster, and those that do not matter no slower: what is measured of them is
        mostly software.
        """
        expected = self._rates(plan, state)
        factors = {}
        for pair in rates.keys() & expected.keys():
            factors[pair] = rates[pair] / expected[pair] / self._usual(pair)
        return {
            pair: factor
            for pair, factor in factors.items()
            if (pair in matter if factor < 1 else state.speed(*pair) < 1)
        }

    def _rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        for known_plan, known_state, known in self._expected:
            if known_state == state and known_plan.stages == plan.stages:
                return known
        found = self._forecast.rates(plan, state)
        self._expected = [*self._expected[-_KEPT + 1 :], (plan, state, found)]
        return found

    def _refined(self, plan: Plan, factors: Mapping[Pair, float]) -> LinkState:
        """Return the state in which a simulation gives the rates that were reported.

        Messages of links that are slow together wait less for others, and round trips weigh less: so once more.
        """
        first = self._state.changed(factors)
        if first.calm:
            return first
        before, now = self._rates(plan, self._state), self._forecast.rates(plan, first)
        again = {pair: factor * before[pair] / now[pair] for pair, factor in factors.items() if pair in now}
        return first.changed(again)

    def _back(self, plan: Plan) -> Proposal | None:
        self._state, self._out = LinkState(), set()
        if plan.stages == self._base.stages and plan.hints == self._base.hints:
            return None
        return Proposal(plan=self._base, reason="links are as planned again: back to the plan made for them")

    def _search(self, plan: Plan) -> Proposal | None:
        """Look at plans near the first one; have a new one made where they do not suffice."""
        settings, simulated = self._settings, self.simulated
        best = self._running(plan)
        now_s = best.seconds
        for seconds, candidate in self._quick()[: settings.orders]:
            ordered = self._forecast.ordered(candidate.plan, self._state)
            self._take_better(best, ordered, seconds if ordered is candidate.plan else None, [candidate.what])
        for _ in range(settings.rounds):
            if not self._refine(best, plan):
                break
        if self._replanner is not None and best.seconds > settings.suffices * self._calm_step_s():
            self._replanner.ask(self._state.assumed(plan))
        return self._worthwhile(best, now_s, simulated)

    def _planned_anew(self, plan: Plan) -> Proposal | None:
        """Return what the planner has made for the present links, if it has, and if it is worth it."""
        planned = None if self._replanner is None or self._state.calm else self._replanner.answer()
        if planned is None:
            return None
        before, self._state = self._state, self._state.assumed(plan)
        simulated, best = self.simulated, self._running(plan)
        now_s = best.seconds
        self._take_better(best, planned, None, ["planned anew: plans near the first did not suffice"])
        proposal = self._worthwhile(best, now_s, simulated)
        if proposal is None:
            self._state = before
        elif self._forecast.step_s(planned, LinkState()) <= (1 - self._settings.pays) * self._calm_step_s():
            self._base, self._calm_s = planned, None
        return proposal

    def _running(self, plan: Plan) -> _Best:
        return _Best(running=plan, plan=plan, seconds=self._step_s(plan))

    def _calm_step_s(self) -> float:
        """Return the seconds of a step of the first plan on links as planned."""
        if self._calm_s is None:
            self._calm_s = self._forecast.step_s(self._base, LinkState())
        return self._calm_s

    def _worthwhile(self, best: _Best, now_s: float, simulated: int) -> Proposal | None:
        if now_s - best.seconds <= self._settings.pays * now_s:
            return None
        reason = (
            f"{self._state}: {'; '.join(best.what)}: {best.seconds:.4g} s a step in the place of {now_s:.4g} s, "
            f"simulated with these links"
        )
        return Proposal(plan=best.plan, reason=reason, simulated=self.simulated - simulated)

    def _quick(self) -> list[tuple[float, Candidate]]:
        """Return all candidates near the base that can run, by their seconds in a plain order; the fastest first."""
        base = Candidate(plan=self._base, what="the plan for calm links")
        plain = Candidate(plan=replace(self._base, hints=None), what="micro-batches as planned")
        others = formats_and_cuts(self._base, self._state, self._settings.allowed)
        timed = [(self._step_s(candidate.plan), candidate) for candidate in (base, plain, *others)]
        return sorted((entry for entry in timed if entry[0] < math.inf), key=lambda entry: entry[0])

    def _refine(self, best: _Best, running: Plan) -> bool:
        """Change single stages and cuts of the best plan so far; return whether anything was won."""
        timed = [(self._step_s(candidate.plan), candidate) for candidate in self._near(best.plan)]
        won = False
        for seconds, candidate in sorted(timed, key=lambda entry: entry[0])[:1]:
            if seconds < best.seconds and self._can_move(running, candidate.plan):
                ordered = self._forecast.ordered(candidate.plan, self._state)
                won = self._take_better(best, ordered, None, [*best.what, candidate.what])
        return won

    def _near(self, plan: Plan) -> Iterator[Candidate]:
        yield from by_stage(plan)
        yield from (candidate for candidate in moved_units(plan) if self._can_move(plan, candidate.plan))

    def _can_move(self, before: Plan, after: Plan) -> bool:
        return self._forecast.move_s(before, after, self._state) < math.inf

    def _take_better(self, best: _Best, plan: Plan, seconds: float | None, what: Sequence[str]) -> bool:
        """Take a plan for the best, if it is with its part of the way to it."""
        seconds = self._step_s(plan) if seconds is None else seconds
        if seconds >= best.seconds + best.moving_s:
            return False
        moving_s = self._forecast.move_s(best.running, plan, self._state) / self._settings.horizon_steps
        if seconds + moving_s >= best.seconds + best.moving_s:
            return False
        best.plan, best.seconds, best.moving_s, best.what = plan, seconds, moving_s, list(what)
        return True

    def _step_s(self, plan: Plan) -> float:
        self.simulated += 1
        return self._forecast.step_s(plan, self._state)
