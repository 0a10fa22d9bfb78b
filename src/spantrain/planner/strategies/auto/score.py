"""What is best: among plans that keep the constraints the least value, else the least that is broken."""

from dataclasses import dataclass

from spantrain.core.plan import Plan
from spantrain.errors import PlanError, ScheduleError
from spantrain.planner.request import Constraints, Evaluation, Objective, PlanRequest
from spantrain.planner.strategies.auto.weights import weights_of

_NO_PRICE = 10.0
"""How much is broken, relative to a limit on money, where the money is not known."""


@dataclass(frozen=True, order=True)
class Score:
    """Compared in this order."""

    broken: float
    """By how much limits are broken, each relative to itself; 0 if none is."""
    value: float
    """Of the objective."""


class Scorer:
    """Simulates plans and scores them; asks for each plan once."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        money = (request.constraints.max_usd_per_step, request.constraints.max_usd_per_hour)
        self._usd = None
        if any(limit is not None for limit in money):
            self._usd = weights_of(request.profile.cluster, Objective.COST, request.job.global_batch)
        self._by_devices: dict[frozenset[str], tuple[float, float]] = {}
        self.is_free = request.constraints == Constraints()
        """Whether there are no constraints that a plan could break."""
        self.simulated = 0
        """How many plans have been simulated."""

    def score(self, plan: Plan) -> tuple[Score, Evaluation] | None:
        """Return the score of a plan, lower is better; None if it cannot run, as under a static order without room."""
        self.simulated += 1
        try:
            evaluation = self._request.evaluate(plan)
        except (PlanError, ScheduleError):
            return None
        broken = self.broken_by_devices(plan.devices) + self._broken_by_figures(evaluation)
        broken += len(evaluation.over_memory)
        return Score(broken, evaluation.value(self._request.objective)), evaluation

    def broken_by_devices(self, devices: tuple[str, ...]) -> float:
        """Return how many demands on devices are broken."""
        return float(len(self._request.constraints.broken_by_devices(self._request.profile.cluster, devices)))

    @property
    def most_s(self) -> float:
        """The longest step that keeps the constraints on time."""
        limits = self._request.constraints
        slowest = float("inf") if limits.max_step_s is None else limits.max_step_s
        if limits.min_samples_per_s is not None:
            slowest = min(slowest, self._request.job.global_batch / limits.min_samples_per_s)
        return slowest

    def least_broken(self, devices: tuple[str, ...], step_s: float) -> float:
        """Return by how much a plan on these devices breaks limits at least, if its step takes at least so long."""
        if self.is_free:
            return 0.0
        key = frozenset(devices)
        known = self._by_devices.get(key)
        if known is None:
            usd_per_s = self._usd.per_second(devices) if self._usd is not None else 0.0
            known = self._by_devices[key] = (self.broken_by_devices(devices), usd_per_s)
        broken, usd_per_s = known
        limits = self._request.constraints
        broken += max(0.0, step_s / self.most_s - 1)
        for most, usd in ((limits.max_usd_per_step, usd_per_s * step_s), (limits.max_usd_per_hour, usd_per_s * 3600)):
            if most is not None:
                broken += min(_NO_PRICE, max(0.0, usd / most - 1))
        return broken

    def _broken_by_figures(self, evaluation: Evaluation) -> float:
        limits, step_s, usd = self._request.constraints, evaluation.step_s, evaluation.usd_per_step
        broken = max(0.0, step_s / self.most_s - 1)
        for most, got in (
            (limits.max_usd_per_step, usd),
            (limits.max_usd_per_hour, None if usd is None else usd * 3600 / step_s),
        ):
            if most is not None:
                broken += _NO_PRICE if got is None else max(0.0, got / most - 1)
        return broken
