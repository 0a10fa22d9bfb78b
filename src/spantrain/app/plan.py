"""Plan a job on a profiled cluster: profile and job in, the best plan with its alternatives out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.predict import predict
from spantrain.config.artefacts import read_profile, reference_to_profile, write_plan
from spantrain.core.plan import Alternative, Plan, Prediction
from spantrain.core.profile import Profile
from spantrain.cost.memory import MemoryCost
from spantrain.planner.baselines import best_single_device, best_single_site
from spantrain.planner.job import JobSpec
from spantrain.planner.spantrain import candidates
from spantrain.sim.engine import SimulationResult

__all__ = ["PlanOutcome", "make_plan", "plan_file"]

_SIMULATED = 12
"""How many of the planner's best are simulated."""


@dataclass(frozen=True, kw_only=True)
class PlanOutcome:
    """A plan, and what it is better than; the JSON that `spantrain plan --json` prints."""

    plan: Plan
    search_s: float
    step_s_predicted: float
    samples_per_s_predicted: float
    peak_bytes: Mapping[str, int]
    best_single_device: Alternative
    best_single_site: Alternative
    reasons: tuple[str, ...]
    single_site_plan: Plan | None
    single_device_plan: Plan | None


def plan_file(profile_path: Path, job: JobSpec, out: Path) -> PlanOutcome:
    """Read a profile, plan, write the plan beside a reference to the profile."""
    profile = read_profile(profile_path)
    outcome = make_plan(profile, job)
    out.parent.mkdir(parents=True, exist_ok=True)
    plan = replace(outcome.plan, profile=reference_to_profile(profile_path, out))
    write_plan(plan, out)
    return replace(outcome, plan=plan)


def make_plan(profile: Profile, job: JobSpec) -> PlanOutcome:
    """Search, re-rank the best candidates by simulation, and compare with one device and one site.

    Raises:
        InfeasiblePlanError: nothing fits; the numbers are in the message.
    """
    started_s = time.monotonic()
    ranked = sorted(
        ((predict(plan, profile), plan) for plan in candidates(profile, job, limit=_SIMULATED)),
        key=lambda entry: entry[0].step_s,
    )
    result, best = ranked[0]
    device_plan, device = _alternative("best single device", best_single_device(profile, job), profile)
    site_plan, site = _alternative("best single site", best_single_site(profile, job), profile)
    # The comparison is part of the search: one site may turn out to be the best plan there is.
    for plan in (site_plan, device_plan):
        if plan is not None and (other := predict(plan, profile)).step_s < result.step_s:
            result, best = other, plan
    reasons = (*_choices(ranked), *best.reasons, *_verdict(result, site, device))
    plan = replace(
        best,
        prediction=_prediction(best, profile, job, result),
        alternatives=(device, site),
        reasons=reasons,
    )
    assert plan.prediction is not None
    return PlanOutcome(
        plan=plan,
        search_s=time.monotonic() - started_s,
        step_s_predicted=result.step_s,
        samples_per_s_predicted=result.samples_per_s,
        peak_bytes=plan.prediction.peak_bytes,
        best_single_device=device,
        best_single_site=site,
        reasons=reasons,
        single_site_plan=site_plan,
        single_device_plan=device_plan,
    )


def _prediction(plan: Plan, profile: Profile, job: JobSpec, result: SimulationResult) -> Prediction:
    return Prediction(
        step_s=result.step_s,
        samples_per_s=result.samples_per_s,
        peak_bytes=MemoryCost(profile, job.optimizer).plan_peak_bytes(plan),
        method="event simulation of the plan's own schedule with the profile's times",
    )


def _alternative(name: str, plan: Plan | str, profile: Profile) -> tuple[Plan | None, Alternative]:
    if isinstance(plan, str):
        return None, Alternative(name=name, devices=(), step_s=None, samples_per_s=None, reason=plan)
    result = predict(plan, profile)
    return plan, Alternative(
        name=name,
        devices=plan.devices,
        step_s=result.step_s,
        samples_per_s=result.samples_per_s,
        reason="; ".join(plan.reasons),
    )


def _choices(ranked: Sequence[tuple[SimulationResult, Plan]]) -> tuple[str, ...]:
    """Say which order and micro-batch size won among the simulated candidates, and by how much."""
    (result, best), others = ranked[0], ranked[1:]
    order, size = _order(best), _size(best)
    lines = []
    for what, chosen, choice_of in (("Order", order, _order), ("Micro-batches of", size, _size)):
        other = next(((r, choice_of(p)) for r, p in others if choice_of(p) != chosen), None)
        if other is not None:
            percent = 100 * (other[0].step_s / result.step_s - 1)
            lines.append(
                f"{what} {chosen}: the next best of {len(ranked)} simulated is {other[1]}, {percent:.0f} % slower."
            )
    return tuple(lines)


def _order(plan: Plan) -> str:
    """Return the sites in the order of the pipeline."""
    sites = [plan.cluster.device_by_name[stage.devices[0]].site for stage in plan.stages]
    return " > ".join(site for index, site in enumerate(sites) if index == 0 or site != sites[index - 1])


def _size(plan: Plan) -> str:
    return f"{plan.stages[0].micro_batches[0].size} samples"


def _verdict(result: SimulationResult, site: Alternative, device: Alternative) -> tuple[str, ...]:
    """Say in plain words what the plan gains over staying in one place."""
    lines = []
    for other in (site, device):
        if other.step_s is None:
            lines.append(f"{other.name}: cannot run ({other.reason})")
        else:
            lines.append(
                f"{other.name} ({', '.join(other.devices)}): {other.step_s:.3f} s a step; "
                f"this plan is {other.step_s / result.step_s:.2f} times as fast"
            )
    return tuple(lines)
