"""Why a plan of `spantrain-dp` is as it is: sentences with numbers."""

from collections.abc import Callable, Sequence

from spantrain.core.plan import Plan
from spantrain.core.quantities import format_seconds
from spantrain.cost.step import StepEstimate
from spantrain.planner.groups import DeviceGroups
from spantrain.planner.strategies.spantrain_dp.search import DomainCandidate, SearchResult


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
