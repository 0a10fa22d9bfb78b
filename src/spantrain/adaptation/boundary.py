"""Between two steps: whether links have changed enough to look for another plan, and which one is worth it.

Every change is simulated with the present links before it is taken, beside what runs under the same links.
"""

import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Protocol

from spantrain.adaptation import network_state
from spantrain.adaptation.search import Forecast, PlanSearch
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.formats.registry import WireFormat


class PlanReplacement(Record):
    """A plan for the steps to come."""

    plan: Plan
    reason: str
    simulated: int = 0
    """Plans that were simulated to find it; where none were, it is there before the next step begins."""


class BoundaryAdapter(Protocol):
    """Decides between steps."""

    def advise(self, step: int, plan: Plan, reports: network_state.Reports, step_s: float) -> PlanReplacement | None:
        """Return what should run instead of the plan that ran this step, in so many seconds; None: leave it."""


class Replanner(Protocol):
    """Plans anew for the same devices, beside training; made for the adapter by whoever has a planner."""

    def ask(self, state: network_state.LinkState) -> None:
        """Begin to plan for these links; what was asked before is forgotten."""

    def answer(self) -> Plan | None:
        """Return the plan that was asked for, once, when it is there; None: not yet, or there is none."""


class AutoSettings(Record):
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
    suffices: float = 1.15
    """A plan near the first one whose step takes at most so many times that of calm links is good enough."""


_CALM_REPORTS = 2
"""Reports of calm links in a row that are believed."""
_BLIND_REPORTS, _LATER = 8, 4
"""Reports that are needed to try links that nothing is known of, and how many times as many to try again."""


class AutoBoundary:
    """Looks for a better plan when links have left the dead band around what is expected, and goes back when they are
    as planned; on calm links it compares a few numbers and nothing else.

    The band follows the links: once they are taken to be slow, it is around that. So noise at one threshold does not
    make it go to and fro.
    """

    def __init__(
        self, base: Plan, forecast: Forecast, settings: AutoSettings | None = None, replanner: Replanner | None = None
    ) -> None:
        """Begin with the plan that was made for calm links; without a planner, plans near it are all that is tried."""
        self._base = base
        self._forecast = forecast
        self._replanner = replanner
        self._settings = settings or AutoSettings()
        self.state = network_state.LinkState()
        """What the links are taken to be."""
        self._out: set[tuple[network_state.Pair, bool]] = set()
        """Links that were out of the band after the last step, and whether they were too fast."""
        self._calm_reports = 0
        """Reports of calm links in a row, while they are taken to be slow."""
        self._blind_reports = _BLIND_REPORTS
        """Reports needed to go back to a plan over slow links that the present one does not use."""
        self._watch = network_state.LinkWatch(forecast)
        self._slow_since: int | None = None
        """The first step behind which links were out of the band; None: they are calm."""
        self._calm_since = 0
        self._guess: PlanSearch | None = None
        """What was looked for after the last step, which may have been in the middle of a change."""
        self._waiting: PlanSearch | None = None
        """What has found a plan that is better on the present links, until that would have been worth its toll."""
        self.simulated = 0
        """Plans that were simulated so far."""
        self._calm_s: float | None = None
        """Seconds of a step of the first plan on links as planned, once they were asked for."""

    def advise(self, step: int, plan: Plan, reports: network_state.Reports, step_s: float) -> PlanReplacement | None:
        """Return a better plan for the present links, if it is worth it."""
        rates = self._watch.learn(plan, network_state.measured_rates(reports), self.state)
        known = ((device, link) for device, links in reports.items() for link in links)
        newest = {(device, link.peer): rate for device, link in known if (rate := link.newest_bytes_per_s) is not None}
        matter = network_state.busy_links(reports, self._settings.matters * step_s)
        factors = self._watch.factors(plan, rates, self.state, matter)
        again, sure = self._have_changed(factors, network_state.measured_rates(reports, least=network_state.SURE))
        slow_steps = self._slow_steps(step, changed=again)
        guess, self._guess = self._guess, None
        if self._are_calm_again(plan, rates, matter, sure=sure) or self._have_just_become_calm(plan, newest, matter):
            return self._back(plan)
        if again and guess is not None and not self._outside(self._watch.factors(plan, rates, guess.state, matter)):
            return self._believed(guess, slow_steps, 0)
        if again:  # the links are taken for what reports say of them
            state = self._refined(plan, factors)
            if state.calm:
                return self._back(plan)
            if state == self.state:
                return self._due(slow_steps)
            search = self._searched(plan, state, step_s)
            return None if search is None else self._believed(search, slow_steps, search.simulated)
        if (not self._out if self.state.calm else sure and self.state.changed(factors).calm) and rates:
            return self._back(plan)
        if self._out:
            last = {pair: newest.get(pair, rate) for pair, rate in rates.items()}
            self._guess = self._guessed(plan, self._watch.factors(plan, last, self.state, matter), step_s)
        return self._planned_anew(plan, slow_steps)

    def _searched(self, plan: Plan, state: network_state.LinkState, step_s: float) -> PlanSearch | None:
        """Look for a plan for links, if they explain how long a step took."""
        search = PlanSearch(self._forecast, self._base, plan, state)
        # Where messages are so small that software, not the links, takes their time, it is no guide to a plan.
        wrong, simulated_s = self._settings.believed, search.running.seconds
        explains = simulated_s / wrong <= step_s <= simulated_s * wrong
        if explains:
            search.near(self._settings.allowed)
        self.simulated += search.simulated
        return search if explains else None

    def _guessed(self, plan: Plan, factors: Mapping[network_state.Pair, float], step_s: float) -> PlanSearch | None:
        """Look for a plan for links as the last messages were of a step that may have been in the middle of a change.

        It is there at once if the next report agrees, and forgotten if it does not.
        """
        state = self._refined(plan, factors)
        if state.calm or state == self.state:
            return None
        search = self._searched(plan, state, step_s)
        self._watch.expected(plan, state)
        return search

    def _slow_steps(self, step: int, *, changed: bool) -> int:
        """Return for how many steps links have not been calm."""
        if self.state.calm and not self._out and not changed:
            if self._slow_since is not None:
                self._slow_since, self._calm_since = None, step
            return 0
        if self._slow_since is None:
            if step - self._calm_since > self._blind_reports:
                self._blind_reports = _BLIND_REPORTS
            self._slow_since = step
        return step - self._slow_since + 1

    def _have_changed(
        self, factors: Mapping[network_state.Pair, float], sure: Collection[network_state.Pair]
    ) -> tuple[bool, bool]:
        """Return whether links are out of the band as they were after the step before, and whether some have surely
        become much faster.

        The links of a step in the middle of a change are neither the old ones nor the new ones: a plan that is made for
        those is worse than none. Going back is not.
        """
        out = self._outside(factors)
        far = any(pair in sure and factor >= self._settings.at_once for pair, factor in factors.items())
        again = bool(out & self._out)
        self._out = set() if again else out
        return again, far

    def _outside(self, factors: Mapping[network_state.Pair, float]) -> set[tuple[network_state.Pair, bool]]:
        """Return the links that are out of the band, and whether they are too fast."""
        band = math.log(self._settings.band)
        return {(pair, factor > 1) for pair, factor in factors.items() if abs(math.log(factor)) > band}

    def _are_calm_again(
        self,
        plan: Plan,
        rates: Mapping[network_state.Pair, float],
        matter: Collection[network_state.Pair],
        *,
        sure: bool,
    ) -> bool:
        """Whether links that are taken to be slow have given nearly what calm ones would, in reports in a row; in one,
        if some have surely become much faster and going back moves nothing.

        Links that were seen in the middle of a change may be taken for faster than they were, and full speed then lies
        inside the band around that.
        """
        if self.state.calm or not rates:
            return False
        calm = self._look_calm(plan, rates, matter)
        self._calm_reports = self._calm_reports + 1 if calm else 0
        needed = self._blind_reports if self._is_blind(plan) else _CALM_REPORTS
        if not (sure and calm and self._is_near_base(plan)) and self._calm_reports < needed:
            return False
        self._calm_reports = 0
        if self._is_blind(plan):
            self._blind_reports *= _LATER
        return True

    def _is_blind(self, plan: Plan) -> bool:
        """Whether going back is to slow links that the present plan does not use, so that nobody knows of them.

        It is a trial; when it was in vain, the next one comes later.
        """
        return bool((network_state.used_pairs(self._base) - network_state.used_pairs(plan)) & self.state.speeds.keys())

    def _have_just_become_calm(
        self, plan: Plan, newest: Mapping[network_state.Pair, float], matter: frozenset[network_state.Pair]
    ) -> bool:
        """Whether the last messages of a step say of all links that they are calm, and of some that they are much
        faster than they were; where going back moves nothing, so that it costs little to be wrong.
        """
        if self.state.calm or not matter <= newest.keys() or not self._look_calm(plan, newest, matter):
            return False
        factors = self._watch.factors(plan, newest, self.state, matter)
        return max(factors.values(), default=1.0) >= self._settings.at_once and self._is_near_base(plan)

    def _look_calm(
        self, plan: Plan, rates: Mapping[network_state.Pair, float], matter: Collection[network_state.Pair]
    ) -> bool:
        factors = self._watch.factors(plan, rates, network_state.LinkState(), matter)
        return (
            median(factors.values() or [1.0]) >= self._settings.calm_again
            and min(factors.values(), default=1.0) >= self._settings.each_calm_again
        )

    def _is_near_base(self, plan: Plan) -> bool:
        """Whether going back moves nothing."""
        return self._forecast.move_s(plan, self._base, network_state.LinkState()) == 0

    def _refined(self, plan: Plan, factors: Mapping[network_state.Pair, float]) -> network_state.LinkState:
        """Return the state in which a simulation gives the rates that were reported.

        Messages of links that are slow together wait less for others, and round trips weigh less: so once more.
        """
        first = self.state.changed(factors)
        if first.calm:
            return first
        before, now = self._watch.expected(plan, self.state), self._forecast.rates(plan, first)
        again = {pair: factor * before[pair] / now[pair] for pair, factor in factors.items() if pair in now}
        return first.changed(again)

    def _back(self, plan: Plan) -> PlanReplacement | None:
        self.state, self._out, self._waiting = network_state.LinkState(), set(), None
        if plan.stages == self._base.stages and plan.hints == self._base.hints:
            return None
        return PlanReplacement(plan=self._base, reason="links are as planned again: back to the plan made for them")

    def _believed(self, search: PlanSearch, slow_steps: int, simulated: int) -> PlanReplacement | None:
        """Take the links for what a search was for; have a plan made anew where those near the first do not suffice."""
        self.state, self._waiting = search.state, None
        if self._replanner is not None:
            if self._calm_s is None:
                self._calm_s = self._forecast.step_s(self._base, network_state.LinkState())
            if search.best.seconds > self._settings.suffices * self._calm_s:
                self._replanner.ask(self.state.assumed(search.running.plan))
        return self._judged(search, slow_steps, simulated)

    def _planned_anew(self, plan: Plan, slow_steps: int) -> PlanReplacement | None:
        """Return what the planner has made for the present links, if it has; or what was found before, if it is due."""
        planned = None if self._replanner is None or self.state.calm else self._replanner.answer()
        if planned is None:
            return self._due(slow_steps)
        search = PlanSearch(self._forecast, self._base, plan, self.state.assumed(plan))
        search.try_plan(planned, ("planned anew: plans near the first did not suffice",))
        self.simulated += search.simulated
        return self._judged(search, slow_steps, search.simulated)

    def _judged(self, search: PlanSearch, slow_steps: int, simulated: int) -> PlanReplacement | None:
        """Keep the best plan of a search until it is due, if it saves enough and none that is kept saves more."""
        least_s = max(self._settings.pays * search.running.seconds, self._waiting.gain_s if self._waiting else 0.0)
        if search.gain_s <= least_s:
            return self._due(slow_steps)
        self._waiting = search
        return self._due(slow_steps, simulated)

    def _due(self, slow_steps: int, simulated: int = 0) -> PlanReplacement | None:
        """Return the plan that waits, once links have been slow for so long that it will be worth its toll.

        Nobody knows how long they stay so; what has lasted for some steps is taken to last for as many more. So a
        moment is waited out, and what all waiting and all changes in vain cost is at most some twice the least.
        """
        waiting = self._waiting
        if waiting is None or slow_steps * waiting.gain_s < waiting.best.toll_s:
            return None
        self._waiting, self.state, best = None, waiting.state, waiting.best
        if best.stays:
            self._base, self._calm_s = best.plan, None
        reason = (
            f"{waiting.state}: {'; '.join(best.what)}: {best.seconds:.4g} s a step instead of "
            f"{waiting.running.seconds:.4g} s, simulated with these links"
        )
        return PlanReplacement(plan=best.plan, reason=reason, simulated=simulated)
