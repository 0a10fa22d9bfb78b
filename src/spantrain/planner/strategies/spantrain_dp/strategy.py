"""`spantrain-dp`: groups, then search, then the few best in full (SpanTrain, Chinese paper, sections 2.2 and 2.3).

Kept: equations 1-5, the dynamic programme over layers and domains, two-level groups, samples divided by capacity inside
a stage. Added: memory as a hard limit, a bound that leaves hopeless candidates unsolved, cuts moved by a finer
estimate. Quotas are kept by leaving devices out before the search begins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.records import Record
from spantrain.cost.step import StepCost, StepEstimate
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.groups import DeviceGroup, group_devices
from spantrain.planner.request import JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.score import few_of_each
from spantrain.planner.strategies.spantrain.strategy import build_plan
from spantrain.planner.strategies.spantrain.tables import WayTables
from spantrain.planner.strategies.spantrain_dp.search import DomainCandidate, SearchResult, search


class _BuiltCandidate(Record):
    """A solved candidate as a plan, with its estimate."""

    candidate: DomainCandidate
    plan: Plan
    estimate: StepEstimate


def _reasons(groups: Sequence[DeviceGroup], found: SearchResult, built: _BuiltCandidate) -> Iterator[str]:
    """Yield the sentences: what bounds the step, shares, memory, what was left out."""
    estimate, used = built.estimate, set(built.candidate.devices)
    tied = f", {format_seconds(estimate.tied_s)} of it for shared parameters" if estimate.tied_s else ""
    yield f"By the closed form, the step of {format_seconds(estimate.step_s)}{tied} is bound by {estimate.bound_by}."
    for index, stage in enumerate(built.plan.stages):
        if len({replica.sample_share for replica in stage.replicas}) > 1:
            parts = ", ".join(f"{replica.devices[0]} {replica.sample_share:g}" for replica in stage.replicas)
            yield f"Stage {index} divides each micro-batch by capacity: {parts}."
    for index, stage in enumerate(built.plan.stages):
        for number, replica in enumerate(stage.replicas):
            share = stage.samples_of(number)
            if replica.in_flight_limit < share:
                yield (
                    f"Memory of {replica.devices[0]} (stage {index}) holds {replica.in_flight_limit} of its {share} "
                    "samples at once; later forwards wait."
                )
    for group in groups:
        missing = [device for device in group.devices if device not in used]
        if missing:
            what = (
                f"Group {group.name} is"
                if len(missing) == len(group.devices)
                else f"{', '.join(missing)} of {group.name}"
            )
            yield f"{what} left out: {_with_any(found, built.candidate, missing)}."


def _with_any(found: SearchResult, chosen: DomainCandidate, missing: list[str]) -> str:
    """Say what the best candidate costs that keeps what is used and adds something missing, else any with it."""
    used = set(chosen.devices)
    other = next((candidate for candidate in found.solved if used < set(candidate.devices)), None)
    if other is None or not set(other.devices) & set(missing):
        other = next((candidate for candidate in found.solved if set(candidate.devices) & set(missing)), None)
    if other is not None:
        # Devices of one kind stand for each other, so a missing one may have only a twin in the search.
        return f"the best plan with it ({' > '.join(other.order)}) is {_slower(other, chosen)}"
    bounds = [found.least_bound_s[device] for device in missing if device in found.least_bound_s]
    if bounds:
        return f"no plan with it can be under {format_seconds(min(bounds))} a step"
    return "a device of the same kind takes its place in every candidate"


def _slower(other: DomainCandidate, chosen: DomainCandidate) -> str:
    percent = 100 * (other.value_s / chosen.value_s - 1)
    if abs(percent) < 0.5:
        return f"as fast by the dynamic programme's model ({format_seconds(other.value_s)})"
    word = "slower" if percent > 0 else "faster"
    return f"{abs(percent):.0f} % {word} by the dynamic programme's model ({format_seconds(other.value_s)})"


def _built(tables: WayTables, cost: StepCost, candidate: DomainCandidate) -> _BuiltCandidate | None:
    """Return a solved candidate as a plan, with its estimate; None if a replica's samples do not fit."""
    plan = build_plan(tables, candidate.slots, candidate.begins, candidate.size)
    if plan is None:
        return None
    plan = replace(plan, strategy="spantrain-dp")
    return _BuiltCandidate(candidate=candidate, plan=plan, estimate=cost.estimate(plan))


def _with_better_cuts(tables: WayTables, cost: StepCost, best: _BuiltCandidate) -> _BuiltCandidate:
    """Move one cut by one unit as long as the estimate falls: it knows more than the dynamic programme."""
    moved = True
    while moved:
        moved = False
        for index in range(1, len(best.candidate.begins) - 1):
            for by in (-1, 1):
                begins = list(best.candidate.begins)
                begins[index] += by
                if not begins[index - 1] < begins[index] < begins[index + 1]:
                    continue
                other = _built(tables, cost, replace(best.candidate, begins=tuple(begins)))
                if other is not None and other.estimate.step_s < best.estimate.step_s * (1 - 1e-6):
                    best, moved = other, True
    return best


_PROPOSED = 12
"""How many are simulated."""
_MAX_DEVICES = 128
_BUILD, _SIZES = 96, 3
"""Candidates that are made plans of, and micro-batch sizes of one set of slots among them."""


def spantrain_dp(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the dozen that its closed form likes best.

    Raises:
        InfeasiblePlanError: nothing fits into memory; the numbers are in the message.
        ProfileError: the profile lacks a timing or a link.
    """
    devices = request.devices_within_quotas
    if len(devices) > _MAX_DEVICES:
        raise InfeasiblePlanError(f"groups devices by pairs, {_MAX_DEVICES} devices at most, got {len(devices)}")
    return candidates(request.profile, request.job, devices, limit=_PROPOSED)


def candidates(profile: Profile, job: JobSpec, devices: Sequence[str], limit: int = 8) -> tuple[Proposal, ...]:
    """Return up to `limit` different plans that use none but some devices, best estimate first.

    Raises:
        InfeasiblePlanError: nothing fits into memory.
    """
    tables, cost = WayTables(profile, job), StepCost(profile, job.dtype)
    groups = group_devices(profile, devices=devices)
    found = search(tables, groups)
    solved = few_of_each(found.solved, attrgetter("slots"), each=_SIZES, most=max(_BUILD, 3 * limit))
    built = [made for candidate in solved if (made := _built(tables, cost, candidate)) is not None]
    if not built:
        raise infeasible(profile, job, devices)
    improved: dict[tuple[Stage, ...], _BuiltCandidate] = {}
    for entry in sorted(built, key=lambda entry: entry.estimate.step_s):
        better = _with_better_cuts(tables, cost, entry)
        improved.setdefault(better.plan.stages, better)
        if len(improved) == limit:
            break
    return tuple(
        Proposal(plan=entry.plan, own_estimate_s=entry.estimate.step_s, reasons=tuple(_reasons(groups, found, entry)))
        for entry in sorted(improved.values(), key=lambda entry: entry.estimate.step_s)
    )
