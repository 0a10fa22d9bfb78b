"""Ranks what strategies propose by what is wanted of a plan, and shows it in figures."""

import time
from collections.abc import Sequence

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.planner.engine.outcome import PlanOptions, StrategyFigures, not_trained_yet
from spantrain.planner.request import Evaluation, Proposal


class Ranking:
    """The order of plans that fit, for one set of wishes."""

    def __init__(self, cluster: Cluster, options: PlanOptions) -> None:
        self._cluster, self._options = cluster, options

    def rank(self, entry: tuple[Proposal, Evaluation]) -> tuple[bool, bool, float, float]:
        """Return what plans are sorted by: what may be chosen first, then the objective, then the step's seconds."""
        plan, evaluation = entry[0].plan, entry[1]
        return bool(self.broken(plan, evaluation)), bool(self.only_to_compare(plan)), *self.value(evaluation)

    def only_to_compare(self, plan: Plan) -> str:
        """Return why a plan gives way to those that can be trained; empty if it need not, or if that was allowed."""
        if self._options.constraints.sharded_state or not not_trained_yet(plan):
            return ""
        return "it divides state among replicas, which training cannot do yet (--allow-sharded-state lets it be chosen)"

    def value(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return the objective, the less the better, and the step's seconds."""
        return evaluation.value(self._options.objective), evaluation.step_s

    def broken(self, plan: Plan, evaluation: Evaluation) -> list[str]:
        """Return what keeps a plan that fits from being chosen."""
        constraints = self._options.constraints
        broken = constraints.broken_by_devices(self._cluster, plan.devices)
        broken += evaluation.broken(constraints)
        if evaluation.value(self._options.objective) == float("inf"):
            broken.append("a device in it has no price")
        return broken

    def figures(self, ranked: Sequence[tuple[Proposal, Evaluation]], plans: int, started_s: float) -> StrategyFigures:
        """Return the figures of a strategy of so many plans, by the best that fits; its search began then."""
        proposal, evaluation = ranked[0]
        own = self._cluster.device_by_name
        return StrategyFigures(
            fits=True,
            reason="; ".join(self.broken(proposal.plan, evaluation)),
            only_to_compare=self.only_to_compare(proposal.plan),
            step_s=evaluation.step_s,
            own_estimate_s=proposal.own_estimate_s,
            samples_per_s=evaluation.samples_per_s,
            money_per_step=evaluation.usd_per_step,
            joules_per_sample=evaluation.joules_per_sample,
            bubble_ratio=evaluation.bubble_ratio,
            peak_bytes=evaluation.peak_bytes,
            peak_memory_share=max(size / own[name].memory_bytes for name, size in evaluation.peak_bytes.items()),
            search_s=time.perf_counter() - started_s,
            devices_used=len(proposal.plan.devices),
            plans=plans,
        )


def no_figures(reason: str, started_s: float) -> StrategyFigures:
    """Return the figures of a strategy that has no plan."""
    return StrategyFigures(fits=False, reason=reason, search_s=time.perf_counter() - started_s)
