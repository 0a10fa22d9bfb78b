"""Plan a job on a profiled cluster: strategies propose, the event simulator ranks, the best one is chosen."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spantrain.app.evaluate import Evaluator, LinkLoad, link_loads
from spantrain.app.plan_reasons import choices, sites_in_and_out, verdict
from spantrain.app.predict import with_best_spans
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.core.plan import Alternative, Plan, Prediction
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError, PlanError, ProfileError, ScheduleError
from spantrain.planner.job import JobSpec
from spantrain.planner.request import Constraints, Evaluation, Objective, PlanRequest, Proposal
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY, STRATEGIES, strategies_named
from spantrain.schedule.registry import SCHEDULE_NAMES

__all__ = ["PlanOutcome", "PlanWishes", "StrategyFigures", "make_plan", "plan_file"]

_METHOD = "event simulation of the plan's own schedule with the profile's times"
_RESCHEDULED = 3
"""How many of a strategy's best are tried with other schedules, where that is wished."""
_COMPARED = ("single-site", "single-device")
"""What every plan is shown beside (DESIGN idea 6)."""
_COMPARED_UP_TO = 32
"""Devices, up to which the best site is searched for on its own."""


@dataclass(frozen=True, kw_only=True)
class PlanWishes:
    """What is wanted of a plan, beside its job."""

    objective: Objective = Objective.THROUGHPUT
    constraints: Constraints = field(default_factory=Constraints)
    strategies: tuple[str, ...] = ()
    """Names, or `all`; empty: the default one, which then competes with the best site and the best device."""
    any_schedule: bool = False
    """Whether the best plans made for the job's schedule are tried with all others too."""


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """The answer of one strategy, simulated; where it has none there is a reason, and no figures."""

    fits: bool
    """Whether it has a plan that fits into memory."""
    reason: str = ""
    """Why it has no plan, or which constraints its best plan breaks; empty if it may be chosen."""
    step_s: float | None = None
    own_estimate_s: float | None = None
    """By the strategy's own cost model."""
    samples_per_s: float | None = None
    money_per_step: float | None = None
    """US dollars; None where a device has no price."""
    joules_per_sample: float | None = None
    bubble_ratio: float | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device."""
    peak_memory_share: float | None = None
    """Of the fullest device."""
    search_s: float
    """Seconds until its best plan was known, simulations included."""
    devices_used: int = 0
    plans: int = 0
    """Proposed, and simulated."""


@dataclass(frozen=True, kw_only=True)
class PlanOutcome:
    """A plan, and what it is better than; the JSON that `spantrain plan --json` prints."""

    plan: Plan
    chosen: str
    """The strategy that the plan is of."""
    strategies: Mapping[str, StrategyFigures]
    search_s: float
    step_s_predicted: float
    samples_per_s_predicted: float
    peak_bytes: Mapping[str, int]
    links: Mapping[str, LinkLoad]
    """What a step sends over each link between places."""
    best_single_device: Alternative
    best_single_site: Alternative
    reasons: tuple[str, ...]
    single_site_plan: Plan | None
    single_device_plan: Plan | None


def plan_file(profile: Profile, profile_path: Path | None, job: JobSpec, wishes: PlanWishes, out: Path) -> PlanOutcome:
    """Plan, and write the plan beside a reference to its profile; one that is in no file is written next to the plan.

    Raises:
        UsageError: as `make_plan`; or a file cannot be written.
    """
    outcome = make_plan(profile, job, wishes)
    out.parent.mkdir(parents=True, exist_ok=True)
    if profile_path is None:
        profile_path = out.with_name(f"{out.stem}.profile.json")
        write_profile(profile, profile_path)
    plan = replace(outcome.plan, profile=reference_to_profile(profile_path, out))
    write_plan(plan, out)
    return replace(outcome, plan=plan)


def make_plan(profile: Profile, job: JobSpec, wishes: PlanWishes | None = None) -> PlanOutcome:
    """Ask the strategies, evaluate what they propose, choose the best.

    Raises:
        UsageError: there is no such strategy.
        PlanError: constraints contradict each other or ask for what the cluster does not have.
        ProfileError: the profile lacks a kind of device, or a link.
        InfeasiblePlanError: nothing fits, or nothing keeps the constraints; the closest misses are in the message.
    """
    return _Planning(profile, job, wishes or PlanWishes()).run()


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a strategy came up with: its best proposal, and the runners-up for the reasons."""

    figures: StrategyFigures
    ranked: tuple[tuple[Proposal, Evaluation], ...] = ()
    """Those that fit, best first."""

    @property
    def plan(self) -> Plan | None:
        return self.ranked[0][0].plan if self.ranked else None


class _Planning:
    def __init__(self, profile: Profile, job: JobSpec, wishes: PlanWishes) -> None:
        self._started_s = time.perf_counter()
        self._profile, self._job, self._wishes = profile, job, wishes
        self._evaluator = Evaluator(profile, job)
        self._request = PlanRequest(
            profile=profile,
            job=job,
            objective=wishes.objective,
            constraints=wishes.constraints,
            evaluate=self._evaluator,
        )

    def run(self) -> PlanOutcome:
        asked = strategies_named(self._wishes.strategies or (DEFAULT_STRATEGY,))
        _check_kinds(self._profile, self._request.devices, self._job)
        small = len(self._request.devices) <= _COMPARED_UP_TO
        answers = {
            name: self._answer(name) for name in dict.fromkeys((*asked, *(_COMPARED if small else _COMPARED[1:])))
        }
        answers.setdefault(_COMPARED[0], self._best_seen_in_one_site())
        competing = answers if not self._wishes.strategies else {name: answers[name] for name in asked}
        chosen = self._best(competing)
        return self._outcome(chosen, answers, tuple(competing))

    def _answer(self, name: str) -> _Answer:
        started_s = time.perf_counter()
        try:
            proposals = STRATEGIES[name].propose(self._request)
        except InfeasiblePlanError as error:
            return _Answer(figures=_no_figures(str(error), started_s))
        ranked: list[tuple[Proposal, Evaluation]] = []
        refusals: list[str] = []
        for proposal in proposals:
            self._take(proposal, ranked, refusals)
        if not ranked:
            return _Answer(figures=_no_figures("; ".join(dict.fromkeys(refusals)), started_s))
        ranked.sort(key=self._rank)
        if self._wishes.any_schedule:
            for proposal, _ in ranked[:_RESCHEDULED]:
                for other in self._other_schedules(proposal):
                    self._take(other, ranked, refusals)
            ranked.sort(key=self._rank)
        ranked[0] = self._ordered(*ranked[0])
        return _Answer(figures=self._figures(ranked, len(proposals), started_s), ranked=tuple(ranked))

    def _best_seen_in_one_site(self) -> _Answer:
        """Return the best plan inside one site that strategies had simulated: a search of its own would take long."""
        started_s = time.perf_counter()
        site = {device.name: device.site for device in self._profile.cluster.devices}
        ranked = [
            (Proposal(plan=plan, own_estimate_s=None), evaluation)
            for plan, evaluation in self._evaluator.seen()
            if evaluation.fits and len({site[name] for name in plan.devices}) == 1
        ]
        if not ranked:
            reason = f"not searched: over {_COMPARED_UP_TO} devices; --strategy single-site,NAME does"
            return _Answer(figures=_no_figures(reason, started_s))
        ranked.sort(key=self._rank)
        return _Answer(figures=self._figures(ranked, len(ranked), started_s), ranked=tuple(ranked))

    def _take(self, proposal: Proposal, ranked: list[tuple[Proposal, Evaluation]], refusals: list[str]) -> None:
        """Evaluate a proposal; add it to those that fit, or why it does not to the refusals."""
        try:
            evaluation = self._evaluator(proposal.plan)
        except (PlanError, ScheduleError) as error:
            refusals.append(str(error))
            return
        if evaluation.fits:
            ranked.append((proposal, evaluation))
        else:
            refusals.append(f"over the memory of {', '.join(evaluation.over_memory)}")

    def _other_schedules(self, proposal: Proposal) -> Iterator[Proposal]:
        """Yield a plan made for the job's schedule with each other one; a paper's own schedule stays."""
        if proposal.plan.schedule == self._job.schedule:
            for name in SCHEDULE_NAMES:
                if name != self._job.schedule:
                    yield replace(proposal, plan=replace(proposal.plan, schedule=name))

    def _rank(self, entry: tuple[Proposal, Evaluation]) -> tuple[bool, float, float]:
        return bool(self._broken(entry[0].plan, entry[1])), *self._value(entry[1])

    def _value(self, evaluation: Evaluation) -> tuple[float, float]:
        return evaluation.value(self._wishes.objective), evaluation.step_s

    def _broken(self, plan: Plan, evaluation: Evaluation) -> list[str]:
        """Return what keeps a plan that fits from being chosen."""
        constraints = self._wishes.constraints
        broken = constraints.broken_by_devices(self._profile.cluster, plan.devices)
        broken += evaluation.broken(constraints)
        if evaluation.value(self._wishes.objective) == float("inf"):
            broken.append("a device in it has no price (cost/prices.yaml)")
        return broken

    def _figures(self, ranked: Sequence[tuple[Proposal, Evaluation]], plans: int, started_s: float) -> StrategyFigures:
        proposal, evaluation = ranked[0]
        own = self._profile.cluster.device_by_name
        return StrategyFigures(
            fits=True,
            reason="; ".join(self._broken(proposal.plan, evaluation)),
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

    def _best(self, answers: Mapping[str, _Answer]) -> str:
        """Return the name of the best answer that may be chosen."""
        possible = [name for name, answer in answers.items() if answer.ranked and not answer.figures.reason]
        if possible:
            return min(possible, key=lambda name: self._value(answers[name].ranked[0][1]))
        misses = dict.fromkeys(f"{name}: {answer.figures.reason}" for name, answer in answers.items())
        if any(answer.ranked for answer in answers.values()):
            raise InfeasiblePlanError(
                f"no plan keeps the constraints; the closest: {'; '.join(misses)}. Loosen one of them, or ask more "
                "strategies (--strategy all)"
            )
        if len(answers) > 1 and not self._wishes.strategies:
            # The default strategy's refusal is about all devices; those of one site or device add nothing to it.
            raise InfeasiblePlanError(next(iter(answers.values())).figures.reason)
        raise InfeasiblePlanError("; ".join(misses))

    def _outcome(self, chosen: str, answers: Mapping[str, _Answer], shown: Sequence[str]) -> PlanOutcome:
        proposal, evaluation = answers[chosen].ranked[0]
        (site_plan, site), (device_plan, device) = (self._alternative(answers[name], name) for name in _COMPARED)
        constraints, own_reasons = self._wishes.constraints, proposal.reasons or proposal.plan.reasons
        seen = [entry for entry in self._evaluator.seen() if not self._broken(*entry)]
        reasons = (
            *([f"Left out as asked: {', '.join(constraints.leave_out)}."] if constraints.leave_out else []),
            *choices([(entry.plan, figures) for entry, figures in answers[chosen].ranked], self._wishes.objective),
            *own_reasons,
            *sites_in_and_out(proposal.plan, evaluation, seen, self._wishes.objective, own_reasons),
            *verdict(evaluation.step_s, (site, device)),
        )
        prediction = Prediction(
            step_s=evaluation.step_s,
            samples_per_s=evaluation.samples_per_s,
            peak_bytes=evaluation.peak_bytes,
            method=_METHOD,
        )
        plan = replace(
            proposal.plan, prediction=prediction, alternatives=(device, site), reasons=reasons, strategy=chosen
        )
        return PlanOutcome(
            plan=plan,
            chosen=chosen,
            strategies={name: answers[name].figures for name in shown},
            search_s=time.perf_counter() - self._started_s,
            step_s_predicted=evaluation.step_s,
            samples_per_s_predicted=evaluation.samples_per_s,
            peak_bytes=evaluation.peak_bytes,
            links=link_loads(plan, self._profile),
            best_single_device=device,
            best_single_site=site,
            reasons=reasons,
            single_site_plan=site_plan,
            single_device_plan=device_plan,
        )

    def _ordered(self, proposal: Proposal, evaluation: Evaluation) -> tuple[Proposal, Evaluation]:
        """Return the proposal with the micro-batches and the order of work that a search finds, if that is better."""
        plan = with_best_spans(proposal.plan, self._profile)
        if plan == proposal.plan:
            return proposal, evaluation
        searched = self._evaluator(plan)
        worse = not searched.fits or self._broken(plan, searched) or self._value(searched) >= self._value(evaluation)
        if worse:
            return proposal, evaluation
        gain = 100 * (1 - searched.step_s / evaluation.step_s)
        recut = "" if plan.stages == proposal.plan.stages else "other micro-batches and "
        reason = f"Searching {recut}an order of work took {gain:.1f} % off the step."
        return replace(proposal, plan=plan, reasons=(*(proposal.reasons or proposal.plan.reasons), reason)), searched

    def _alternative(self, answer: _Answer, name: str) -> tuple[Plan | None, Alternative]:
        called = f"best {name.replace('-', ' ')}"
        if answer.plan is None:
            reason = answer.figures.reason
            return None, Alternative(name=called, devices=(), step_s=None, samples_per_s=None, reason=reason)
        plan = replace(answer.plan, strategy=name)
        return plan, Alternative(
            name=called,
            devices=plan.devices,
            step_s=answer.figures.step_s,
            samples_per_s=answer.figures.samples_per_s,
            reason="; ".join(plan.reasons),
        )


def _no_figures(reason: str, started_s: float) -> StrategyFigures:
    return StrategyFigures(fits=False, reason=reason, search_s=time.perf_counter() - started_s)


def _check_kinds(profile: Profile, devices: Sequence[str], job: JobSpec) -> None:
    """Refuse a profile that lacks the times of a kind of device that may be used."""
    dtype = job.dtype or profile.dtype
    known = {(timing.unit_class, timing.kind) for timing in profile.timings if timing.dtype == dtype}
    classes = {unit.unit_class for unit in profile.graph.units}
    kinds = dict.fromkeys(profile.cluster.device_by_name[name].kind for name in devices)
    missing = {kind: sorted(unit for unit in classes if (unit, kind) not in known) for kind in kinds}
    lacking = [f"{kind} ({len(units)} of {len(classes)} unit classes)" for kind, units in missing.items() if units]
    if lacking:
        raise ProfileError(
            f"the profile lacks {dtype} times of {profile.model.name} for {', '.join(lacking)}; measure them with "
            f"`spantrain profile --cluster FILE --model {profile.model.name} --dtype {dtype} --out DIR`, or leave "
            "these devices out with --leave-out"
        )
