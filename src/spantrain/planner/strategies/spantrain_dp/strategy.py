"""`spantrain-dp`: groups, then search, then the few best in full (SpanTrain, Chinese paper, sections 2.2 and 2.3).

Kept: equations 1-5, the dynamic programme over layers and domains, two-level groups, samples divided by capacity inside
a stage. Added: memory as a hard limit, a bound that leaves hopeless candidates unsolved, cuts moved by a finer
estimate. Quotas are kept by leaving devices out before the search begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.span import equal_spans
from spantrain.cost.step import StepEstimate
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import draft_stage, infeasible, with_limits
from spantrain.planner.groups import DeviceGroups, group_devices
from spantrain.planner.request import JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.spantrain_dp.search import DomainCandidate, SearchResult, search
from spantrain.planner.strategies.spantrain_dp.tables import Slot, SlotTables


def reasons(
    groups: DeviceGroups, found: SearchResult, chosen: DomainCandidate, built: tuple[Plan, StepEstimate]
) -> tuple[str, ...]:
    """Return the sentences: what bounds the step, shares, memory, what was left out."""
    plan, estimate = built
    return (
        _bound_sentence(estimate),
        *_share_sentences(plan),
        *_memory_sentences(plan),
        *_left_out_sentences(groups, found, chosen),
    )


def _bound_sentence(estimate: StepEstimate) -> str:
    tied = f", {format_seconds(estimate.tied_s)} of it for shared parameters" if estimate.tied_s else ""
    return f"By the closed form, the step of {format_seconds(estimate.step_s)}{tied} is bound by {estimate.bound_by}."


def _share_sentences(plan: Plan) -> list[str]:
    lines = []
    for index, stage in enumerate(plan.stages):
        if len({replica.sample_share for replica in stage.replicas}) > 1:
            parts = ", ".join(f"{replica.devices[0]} {replica.sample_share:g}" for replica in stage.replicas)
            lines.append(f"Stage {index} divides each micro-batch by capacity: {parts}.")
    return lines


def _memory_sentences(plan: Plan) -> list[str]:
    lines = []
    for index, stage in enumerate(plan.stages):
        for number, replica in enumerate(stage.replicas):
            share = sum(span.size for span in stage.replica_spans(number))
            if replica.in_flight_limit < share:
                lines.append(
                    f"Memory of {replica.devices[0]} (stage {index}) holds {replica.in_flight_limit} of its {share} "
                    "samples at once; later forwards wait."
                )
    return lines


def _left_out_sentences(groups: DeviceGroups, found: SearchResult, chosen: DomainCandidate) -> list[str]:
    lines = []
    used = set(chosen.devices)
    for group in groups.first_level:
        missing = [device for device in group.devices if device not in used]
        if missing == list(group.devices):
            lines.append(f"Group {group.name} is left out: {_with_any(found, chosen, missing)}.")
        elif missing:
            lines.append(f"{', '.join(missing)} of {group.name} left out: {_with_any(found, chosen, missing)}.")
    return lines


def _with_any(found: SearchResult, chosen: DomainCandidate, missing: list[str]) -> str:
    """Say what the best candidate costs that keeps what is used and adds something missing, else any with it."""
    used = set(chosen.devices)
    other = _best(found.solved, lambda candidate: used < set(candidate.devices))
    if other is None or not set(other.devices) & set(missing):
        other = _best(found.solved, lambda candidate: bool(set(candidate.devices) & set(missing)))
    if other is not None:
        # Devices of one kind stand for each other, so a missing one may have only a twin in the search.
        return f"the best plan with it ({' > '.join(other.order)}) is {_slower(other, chosen)}"
    bounds = [found.least_bound_s[device] for device in missing if device in found.least_bound_s]
    if bounds:
        return f"no plan with it can be under {format_seconds(min(bounds))} a step"
    return "a device of the same kind takes its place in every candidate"


def _best(solved: Sequence[DomainCandidate], wanted: Callable[[DomainCandidate], bool]) -> DomainCandidate | None:
    return next((candidate for candidate in solved if wanted(candidate)), None)


def _slower(other: DomainCandidate, chosen: DomainCandidate) -> str:
    percent = 100 * (other.value_s / chosen.value_s - 1)
    if abs(percent) < 0.5:
        return f"as fast by the dynamic programme's model ({format_seconds(other.value_s)})"
    word = "slower" if percent > 0 else "faster"
    return f"{abs(percent):.0f} % {word} by the dynamic programme's model ({format_seconds(other.value_s)})"


STRATEGY = "spantrain-dp"


def build_plan(tables: SlotTables, candidate: DomainCandidate) -> tuple[Plan, StepEstimate] | None:
    """Return the plan of a solved candidate with its estimate, or None if a replica's samples do not fit."""
    stages = []
    for slot, first, end in zip(candidate.slots, candidate.begins[:-1], candidate.begins[1:], strict=True):
        units = range(first, end)
        stage = _stage(tables, slot, units, candidate.size, tables.shares(slot, units, candidate.size))
        if stage is None:
            # Shares over the whole model were checked for memory by the dynamic programme.
            whole = tables.shares(slot, range(tables.units), candidate.size)
            stage = _stage(tables, slot, units, candidate.size, whole)
        if stage is None:
            return None
        stages.append(stage)
    plan = tables.job.plan_of(tables.profile, stages, strategy=STRATEGY)
    return plan, tables.step_cost.estimate(plan)


def improve_cuts(
    tables: SlotTables, candidate: DomainCandidate, built: tuple[Plan, StepEstimate]
) -> tuple[Plan, StepEstimate]:
    """Move one cut by one unit as long as the estimate falls: it knows more than the dynamic programme."""
    best = built
    moved = True
    while moved:
        moved = False
        for index in range(1, len(candidate.begins) - 1):
            for by in (-1, 1):
                begins = list(candidate.begins)
                begins[index] += by
                if not begins[index - 1] < begins[index] < begins[index + 1]:
                    continue
                tried = replace(candidate, begins=tuple(begins))
                other = build_plan(tables, tried)
                if other is not None and other[1].step_s < best[1].step_s * (1 - 1e-6):
                    best, candidate, moved = other, tried, True
    return best


def _stage(tables: SlotTables, devices: Slot, units: range, size: int, shares: tuple[int, ...]) -> Stage | None:
    """Return a slot's stage; None if a device would get no sample, or cannot hold its part."""
    if min(shares) == 0:
        return None
    rows = (((device,), share, (1.0,)) for device, share in zip(devices, shares, strict=True))
    draft = draft_stage(units, equal_spans(tables.job.global_batch, size), rows)
    return with_limits(draft, tables.memory, tables.job.splits_backward)


_PROPOSED = 12
"""How many are simulated."""
_MAX_DEVICES = 128
_BUILD = 96


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    candidate: DomainCandidate
    plan: Plan
    estimate: StepEstimate


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
    tables, groups = SlotTables(profile, job), group_devices(profile, devices=devices)
    found, ranked = _rank(tables, groups, devices, limit)
    return tuple(
        Proposal(
            plan=entry.plan,
            own_estimate_s=entry.estimate.step_s,
            reasons=reasons(groups, found, entry.candidate, (entry.plan, entry.estimate)),
        )
        for entry in ranked
    )


def _rank(
    tables: SlotTables, groups: DeviceGroups, devices: Sequence[str], limit: int
) -> tuple[SearchResult, tuple[_Ranked, ...]]:
    found = search(tables, groups)
    built: list[_Ranked] = []
    for candidate in _varied(found.solved, max(_BUILD, 3 * limit)):
        made = build_plan(tables, candidate)
        if made is not None:
            built.append(_Ranked(candidate=candidate, plan=made[0], estimate=made[1]))
    if not built:
        raise infeasible(tables.profile, tables.job, devices)
    built.sort(key=lambda entry: entry.estimate.step_s)
    improved: dict[tuple[Stage, ...], _Ranked] = {}
    for entry in built:
        plan, estimate = improve_cuts(tables, entry.candidate, (entry.plan, entry.estimate))
        improved.setdefault(plan.stages, _Ranked(candidate=entry.candidate, plan=plan, estimate=estimate))
        if len(improved) == limit:
            break
    return found, tuple(sorted(improved.values(), key=lambda entry: entry.estimate.step_s))


def _varied(solved: Sequence[DomainCandidate], limit: int) -> list[DomainCandidate]:
    """Take the best, but of one set of slots at most three micro-batch sizes."""
    taken: list[DomainCandidate] = []
    sizes: dict[tuple[tuple[str, ...], ...], int] = {}
    for candidate in solved:
        if sizes.get(candidate.slots, 0) < 3:
            sizes[candidate.slots] = sizes.get(candidate.slots, 0) + 1
            taken.append(candidate)
        if len(taken) >= limit:
            break
    return taken
