"""The true optimum of small cases, for tests: every plan is simulated that a proven bound does not rule out.

The space: every subset of devices, every ordered partition of it into stages (devices of a stage are replicas), every
placement of cuts, every micro-batch size of the job, shares by capacity and those that differ by one sample moved
(`exhaustive_space.share_choices`), in-flight limits as large as memory allows, the job's schedule. Bounds are those of
`auto_bound`; a plan whose bound is over what has been found is not simulated, since its simulation could not be lower.
"""

import heapq
from collections.abc import Iterator

from spantrain.core.plan import Plan
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.request import Objective, PlanRequest, Proposal
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.score import Score, Scorer, weights_of
from spantrain.planner.strategies.auto.shape import ShapeBuilder
from spantrain_studies.planners.exhaustive.space import Candidates, PlanSpace

MAX_DEVICES = 6
MAX_UNITS = 12
_SAME = 1 - 1e-9
"""Bounds must be under the best by rounding errors at least."""
_FIRST = 40
"""So many of the lowest bounds of each micro-batch size are kept to begin with."""


def exhaustive(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plan there is, alone.

    Raises:
        PlanError: there are too many devices or units for it.
        InfeasiblePlanError: nothing fits into memory.
    """
    devices, units = request.devices, len(request.profile.graph.units)
    if len(devices) > MAX_DEVICES or units > MAX_UNITS:
        raise PlanError(
            f"exhaustive takes up to {MAX_DEVICES} devices and {MAX_UNITS} units, got {len(devices)} and {units}; "
            "leave devices out, or use auto"
        )
    search = _WholeSpaceSearch(request)
    search.look_at_promising()
    search.finish()
    if search.best is None:
        raise InfeasiblePlanError(
            f"{request.profile.model.name}: of all ways to place it on {', '.join(devices)} none fits into memory; "
            "use more devices, a lighter optimizer (sgd), smaller micro-batches or a smaller model"
        )
    score, plan = search.best
    reason = f"The least of {search.seen} plans that could be the best, {search.simulated} of them simulated."
    return (Proposal(plan=plan, own_estimate_s=None, reasons=(reason,) if score.broken == 0 else ()),)


class _WholeSpaceSearch:
    """Branch and bound over the whole space."""

    def __init__(self, request: PlanRequest) -> None:
        profile, job = request.profile, request.job
        weights = weights_of(profile.cluster, request.objective, job.global_batch)
        self._costs = PartCosts(request, weights, range(len(profile.graph.units) + 1), exact_sums=True)
        self._builder = ShapeBuilder(request, self._costs, "exhaustive")
        self._scorer = Scorer(request)
        self._space = PlanSpace(self._costs, profile, request.devices)
        self._sizes = job.micro_batch_sizes()
        self._time_only = request.objective is Objective.THROUGHPUT
        self._done: set[tuple[int, object, object]] = set()
        self.best: tuple[Score, Plan] | None = None
        self.seen = 0

    @property
    def simulated(self) -> int:
        """How many plans have been simulated."""
        return self._scorer.simulated

    def look_at_promising(self) -> None:
        """Simulate the few plans with the lowest bounds, so that most others need not be."""
        lowest = heapq.nsmallest(_FIRST * len(self._sizes), self._all(float("inf")), key=lambda entry: entry[0])
        for value, group, index in lowest:
            self._look_at(value, group, index)

    def finish(self) -> None:
        """Simulate all plans whose bounds are under the best, lowest first."""
        rest = sorted(self._all(self._limit), key=lambda entry: entry[0])
        self.seen = len(rest)
        for value, group, index in rest:
            self._look_at(value, group, index)

    @property
    def _limit(self) -> float:
        """The value that a plan must be under to be of interest; no limit as long as constraints are broken."""
        return float("inf") if self.best is None or self.best[0].broken > 0 else self.best[0].value * _SAME

    def _all(self, most: float) -> Iterator[tuple[float, Candidates, int]]:
        most_s = self._scorer.most_s if self.best is not None and self.best[0].broken == 0 else float("inf")
        if self._time_only:
            most_s = min(most_s, most)
        for size in self._sizes:
            for group in self._space.candidates(size, most_s, most):
                order = group.value.argsort(kind="stable")
                chosen = order[:_FIRST] if self.best is None else order
                yield from ((float(group.value[index]), group, int(index)) for index in chosen)

    def _look_at(self, value: float, group: Candidates, index: int) -> None:
        if value > self._limit:
            return
        shape = group.shape(index)
        key = (shape.size, shape.parts, shape.begins)
        if key in self._done or self._scorer.broken_by_devices(shape.devices):
            return
        self._done.add(key)
        plan = self._builder.plan(shape)
        if plan is None:
            return
        scored = self._scorer.score(plan)
        if scored is not None and (self.best is None or scored[0] < self.best[0]):
            self.best = (scored[0], plan)
