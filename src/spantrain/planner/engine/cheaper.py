"""Under a limit on money: the same search under lower limits, too, so that a little less money gives a little less.

A search goes by what it expects of plans. Those that it expects just under a limit may all be over it when they are
simulated, and then it ends with little or nothing; and what it finds under a lower limit may be better than all that it
finds under a higher one, which lets in slow devices. So it is asked for the cheapest plan, the fastest, and on rungs
between what these two cost, which do not depend on the limit: a higher limit sees all that a lower one has seen. All
plans that were simulated compete.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from spantrain.core.plan import Plan
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.evaluate import PlanKey, plan_key
from spantrain.planner.request import Constraints, Evaluation, Objective, PlanRequest, Proposal, Strategy
from spantrain.planner.strategies.score import scored

_RUNGS, _RUNGS_OF_MANY, _MANY = 5, 2, 64
"""Between the cheapest plan and the fastest: up to so many devices, and with more of them."""
_BELOW = (0.5, 0.25)
"""Of the cheapest plan's US dollars an hour: that has the least for a step, not for an hour."""
_PROPOSED = 6


def with_cheaper(strategy: Strategy) -> Strategy:
    """Return a strategy that is asked under lower limits, too, where there are limits on money.

    Where time is limited, and what has the least money or energy takes too long, it is asked for the fastest, too.
    """

    def propose(request: PlanRequest) -> tuple[Proposal, ...]:
        limits = request.constraints
        if limits.max_usd_per_step is None and limits.max_usd_per_hour is None:
            found = strategy(request)
            if request.objective is Objective.THROUGHPUT or not all(
                request.evaluate(one.plan).broken(limits) for one in found
            ):
                return found
            return (*found, *strategy(replace(request, objective=Objective.THROUGHPUT)))
        return _Ladder(strategy, request).proposals()

    return propose


class _Ladder:
    def __init__(self, strategy: Strategy, request: PlanRequest) -> None:
        self._strategy, self._request = strategy, request
        self._found: dict[PlanKey, Proposal] = {}
        self._refusal: InfeasiblePlanError | None = None

    def proposals(self) -> tuple[Proposal, ...]:
        """Return the best of all that was simulated on any rung, best first."""
        free = replace(self._request.constraints, max_usd_per_step=None, max_usd_per_hour=None)
        self._ask(self._request.constraints)
        cheapest = self._ask(free, Objective.COST)
        fastest = self._ask(free)
        if cheapest is not None and fastest is not None:
            for limits in self._rungs(free, cheapest, fastest):
                self._ask(limits)
        rows = [row for row in scored(self._request, self._found.values()) if row[0].broken < math.inf]
        if not rows:
            assert self._refusal is not None, "a strategy proposes something or says why not"
            raise self._refusal
        return tuple(proposal for _, proposal in rows[:_PROPOSED])

    def _ask(self, limits: Constraints, objective: Objective | None = None) -> Evaluation | None:
        """Search under these limits; return what the best plan would do, None where there is none."""
        asked = replace(
            self._request, constraints=limits, objective=objective or self._request.objective, evaluate=self._evaluate
        )
        try:
            found = self._strategy(asked)
        except InfeasiblePlanError as error:
            self._refusal = self._refusal or error
            return None
        for proposal in found:
            self._found[plan_key(proposal.plan)] = proposal
        return self._request.evaluate(found[0].plan) if found else None

    def _evaluate(self, plan: Plan) -> Evaluation:
        self._found.setdefault(plan_key(plan), Proposal(plan=plan, own_estimate_s=None))
        return self._request.evaluate(plan)

    def _rungs(self, free: Constraints, cheapest: Evaluation, fastest: Evaluation) -> Iterator[Constraints]:
        """Yield limits under those that are asked for."""
        asked, ends = self._request.constraints, (cheapest.usd_per_step, fastest.usd_per_step)
        if ends[0] is None or ends[1] is None:
            return
        count = _RUNGS if len(self._request.devices) <= _MANY else _RUNGS_OF_MANY
        if asked.max_usd_per_step is not None:
            for usd in _between(ends[0], ends[1], count):
                if usd < asked.max_usd_per_step:
                    yield replace(free, max_usd_per_step=usd)
        if asked.max_usd_per_hour is not None:
            low, high = (usd * 3600 / one.step_s for usd, one in ((ends[0], cheapest), (ends[1], fastest)))
            for usd in (*(part * low for part in _BELOW), low, *_between(low, high, count)):
                if usd < asked.max_usd_per_hour:
                    yield replace(free, max_usd_per_hour=usd)


def _between(low: float, high: float, count: int) -> list[float]:
    """Return so many values between two, each by as much of itself over the one before.

    >>> [round(value, 6) for value in _between(1.0, 16.0, 3)]
    [2.0, 4.0, 8.0]
    """
    return [low * (high / low) ** (step / (count + 1)) for step in range(1, count + 1)] if 0 < low < high else []
