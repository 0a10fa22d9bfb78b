"""What is wanted of a plan, how plans rank by it, what came of planning, and what training cannot do yet."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from spantrain.core.cluster import Cluster
from spantrain.core.outer.groups import OuterPlan
from spantrain.core.plan import Plan
from spantrain.core.planned.report import Alternative, PlanReport, Prediction
from spantrain.core.records import Record
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.engine.evaluate import LinkLoad
from spantrain.planner.request import (
    Constraints,
    Evaluation,
    JobSpec,
    Objective,
    PlanRequest,
    Proposal,
    Restriction,
    Strategy,
)
from spantrain.planner.strategies.relaxation import StepBound
from spantrain.schedule.joint import joint_refusal

Prefer = Callable[[Sequence[tuple[Plan, Evaluation]]], tuple[int, tuple[str, ...]]]
"""Takes plans that may be chosen, the best by the objective first; returns which one is, and what is said of it."""


class PlanOptions(Record):
    """What is wanted of a plan, beside its job."""

    objective: Objective = Objective.THROUGHPUT
    constraints: Constraints = field(default_factory=Constraints)
    strategies: tuple[str, ...] = ()
    """Names, or `all`; empty: the default one, which then competes with the best site and the best device."""
    any_schedule: bool = False
    """Whether the best plans made for the job's schedule are tried with all others too."""
    allow_outer: bool = False
    """Whether site-local plans joined by an outer optimizer may be chosen; they are shown in any case."""
    outer_every: int = 100
    """Inner steps between two outer ones."""
    restriction: Restriction = Restriction.NONE
    """Which plans are looked at; what is not free is for `auto` alone, and its plans compete with no others."""
    prefer: Prefer | None = None
    """Chooses among plans that keep the constraints, the best by the objective first, and says why; None: the first."""
    heard: Callable[[int], None] | None = None
    """Is told how many plans were simulated, after each."""

    def __post_init__(self) -> None:
        others = [name for name in self.strategies if name != "auto"]
        if self.restriction is not Restriction.NONE and (others or self.any_schedule):
            what = f"the strategies {', '.join(others)}" if others else "every schedule"
            raise PlanError(f"{self.restriction} restricts auto and its order of work; {what} cannot be asked for too")
        if not self.constraints.second_level and self.strategies != ("spantrain",):
            asked = ", ".join(self.strategies) or "the default strategy"
            raise PlanError(
                "only the strategy spantrain can do without second-level groups, and "
                f"{asked} was asked for: --no-second-level goes with --strategy spantrain"
            )
        if self.outer_every < 1:
            raise PlanError(f"an outer step comes after at least 1 inner step, got {self.outer_every}")

    @property
    def counts_money(self) -> bool:
        """Whether which plan is chosen depends on prices."""
        limits = (self.constraints.max_usd_per_step, self.constraints.max_usd_per_hour)
        return self.objective is Objective.COST or any(limit is not None for limit in limits)


class StrategyFigures(Record):
    """The answer of one strategy, simulated; where it has none there is a reason, and no figures."""

    fits: bool
    """Whether it has a plan that fits into memory."""
    reason: str = ""
    """Why it has no plan, or which constraints its best plan breaks; empty if it may be chosen."""
    only_to_compare: str = ""
    """Why its plan is chosen only if no other can be: training cannot do all of it yet."""
    step_s: float | None = None
    own_estimate_s: float | None = None
    """What the strategy's own cost model says."""
    samples_per_s: float | None = None
    money_per_step: float | None = None
    """US dollars; None where a device has no price."""
    joules_per_sample: float | None = None
    bubble_ratio: float | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device."""
    peak_memory_share: float | None = None
    """The fullest device's."""
    search_s: float
    """Seconds until its best plan was known, simulations included."""
    devices_used: int = 0
    plans: int = 0
    """Proposed, and simulated."""


def _times_over(found: Evaluation, limits: Constraints) -> float:
    """Return how many times over a limit on time or money a plan is, of the one that it misses most."""
    usd = math.inf if found.usd_per_step is None else found.usd_per_step
    pairs = (
        (found.step_s, limits.max_step_s),
        (limits.min_samples_per_s or 0.0, found.samples_per_s),
        (usd, limits.max_usd_per_step),
        (usd * 3600 / found.step_s, limits.max_usd_per_hour),
    )
    return max(got / most for got, most in pairs if most is not None)


class Ranking:
    """The order of plans that fit, for one set of options."""

    def __init__(self, cluster: Cluster, options: PlanOptions) -> None:
        self._cluster, self._options = cluster, options

    def rank(self, entry: tuple[Proposal, Evaluation]) -> tuple[bool, bool, float, float]:
        """Return what plans are sorted by: what may be chosen first, then the objective, then the step's seconds.

        What may not is sorted by how far it is over a limit, not by the objective.
        """
        plan, evaluation = entry[0].plan, entry[1]
        broken, only = bool(self.broken(plan, evaluation)), bool(self.only_to_compare(plan))
        value, step_s = self.value(evaluation)
        return broken, only, _times_over(evaluation, self._options.constraints) if broken else value, step_s

    def only_to_compare(self, plan: Plan) -> str:
        """Return why a plan gives way to those that can be trained; empty if it need not."""
        return joint_refusal(plan)

    def value(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return the objective, the less the better, and the step's seconds."""
        return evaluation.value(self._options.objective), evaluation.step_s

    def below_s(self, evaluation: Evaluation) -> float:
        """Return what a step must take less than to be better; infinite where time is not what plans are chosen by."""
        return evaluation.step_s if self._options.objective is Objective.THROUGHPUT else math.inf

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
            fits=True, reason="; ".join(self.broken(proposal.plan, evaluation)),
            only_to_compare=self.only_to_compare(proposal.plan), step_s=evaluation.step_s,
            own_estimate_s=proposal.own_estimate_s, samples_per_s=evaluation.samples_per_s,
            money_per_step=evaluation.usd_per_step, joules_per_sample=evaluation.joules_per_sample,
            bubble_ratio=evaluation.bubble_ratio, peak_bytes=evaluation.peak_bytes,
            peak_memory_share=max(size / own[name].memory_bytes for name, size in evaluation.peak_bytes.items()),
            search_s=time.perf_counter() - started_s, devices_used=len(proposal.plan.devices), plans=plans,
        )  # fmt: skip


def no_figures(reason: str, started_s: float) -> StrategyFigures:
    """Return the figures of a strategy that has no plan."""
    return StrategyFigures(fits=False, reason=reason, search_s=time.perf_counter() - started_s)


class PlanOutcome(Record):
    """A plan, and what it is better than; the JSON that `spantrain plan --json` prints."""

    plan: Plan
    chosen: str
    """The strategy that the plan is of; `outer` where sites train by themselves: then it is that of the leading one."""
    strategies: Mapping[str, StrategyFigures]
    search_s: float
    step_s_predicted: float
    samples_per_s_predicted: float
    bound: StepBound
    """What no plan can be under."""
    peak_bytes: Mapping[str, int]
    links: Mapping[str, LinkLoad]
    """What a step sends over each link between places."""
    best_single_device: Alternative
    best_single_site: Alternative
    report: PlanReport
    """What is said of the plan, to be written with it."""
    outer: OuterPlan | None
    """Site-local plans joined by an outer optimizer; None where no two sites can train the model by themselves."""
    single_site_plan: Plan | None
    outer_plans: Mapping[str, tuple[Plan, PlanReport]]
    """By site, where the outer optimizer was chosen, with what is said of each."""

    def beside_second_level(self, whole: "PlanOutcome") -> "PlanOutcome":
        """Return this one, made without second-level groups, with what came of the same with them."""
        part, of = self.samples_per_s_predicted, whole.samples_per_s_predicted
        said = (
            f"Without second-level groups, as asked: {part:.4g} samples/s; with them {of:.4g}. Leaving them out costs "
            f"{100 * (1 - part / of):.1f} %."
        )
        return replace(
            self,
            strategies={**self.strategies, "spantrain with second level": whole.strategies["spantrain"]},
            search_s=self.search_s + whole.search_s,
            report=replace(self.report, reasons=(said, *self.report.reasons)),
        )


def divides_unasked(plan: Plan, constraints: Constraints) -> bool:
    """Whether replicas of a plan divide state, so that a loss is dearer, and nobody asked for that."""
    return not constraints.sharded_state and any(stage.divides_state for stage in plan.stages)


def is_plain(plan: Plan, job: JobSpec, constraints: Constraints) -> bool:
    """Whether nothing in a plan had to be asked for or to earn its place, which is for strategies to decide on."""
    whole = not (constraints.recompute_all or constraints.sequence_parallel)
    return (
        whole
        and not divides_unasked(plan, constraints)
        and not any(stage.offloads for stage in plan.stages)
        and plan.global_batch == job.global_batch
        and job.schedule in (plan.schedule, JobSpec.schedule)
        and constraints.tensor_parallel.allows_plan(plan)
        and all(
            stage.wire_format is WireFormat.NATIVE and (constraints.recompute or not stage.recompute)
            for stage in plan.stages
        )
    )


def plain_only(strategy: Strategy) -> Strategy:
    """Return a strategy that proposes nothing that has to be asked for.

    Raises:
        InfeasiblePlanError: when it is asked and has nothing else.
    """

    def propose(request: PlanRequest) -> tuple[Proposal, ...]:
        found = tuple(one for one in strategy(request) if is_plain(one.plan, request.job, request.constraints))
        if not found:
            raise InfeasiblePlanError("all its plans have what must be asked for")
        return found

    return propose


def prediction_of(evaluation: Evaluation) -> Prediction:
    """Return what is written of a simulated plan."""
    return Prediction(
        step_s=evaluation.step_s,
        samples_per_s=evaluation.samples_per_s,
        peak_bytes=evaluation.peak_bytes,
        method="event simulation of the plan's own schedule with the profile's times",
    )
