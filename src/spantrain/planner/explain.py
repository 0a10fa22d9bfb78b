"""Why a plan is as it is, and why none fits: sentences with numbers."""

from collections.abc import Callable, Sequence

from spantrain.core.plan import Plan
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.cost.step import StepEstimate
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.cuts import least_largest
from spantrain.planner.assembly.tables import Tables
from spantrain.planner.groups import Groups
from spantrain.planner.strategies.spantrain_dp.search import Candidate, SearchResult


def reasons(
    groups: Groups, found: SearchResult, chosen: Candidate, built: tuple[Plan, StepEstimate]
) -> tuple[str, ...]:
    """Return the sentences: what bounds the step, shares, memory, what was left out."""
    plan, estimate = built
    return (
        _bound_sentence(estimate),
        *_share_sentences(plan),
        *_memory_sentences(plan),
        *_left_out_sentences(groups, found, chosen),
    )


def infeasible(tables: Tables, devices: Sequence[str]) -> InfeasiblePlanError:
    """Return the refusal, with what each device would need in the best even spreading over all of them."""
    job = tables.job
    memory = {name: tables.profile.cluster.device_by_name[name].memory_bytes for name in devices}
    largest_first = sorted(devices, key=lambda name: -memory[name])[: tables.units]
    needs = tables.least_need(largest_first)
    fullest, begins = least_largest([need / memory[name] for need, name in zip(needs, largest_first, strict=True)])
    lines = []
    for name, need, first, end in zip(largest_first, needs, begins[:-1], begins[1:], strict=True):
        mark = " (too much)" if need[first, end] > memory[name] else ""
        lines.append(
            f"{name} needs {format_bytes(need[first, end])} for units {first}-{end - 1}, "
            f"has {format_bytes(memory[name])}{mark}"
        )
    whole = tables.memory.state_bytes(range(tables.units))
    advice = "Use more devices, a lighter optimizer (sgd), or a smaller model."
    if fullest <= 1:
        advice = f"That would fit, {job.micro_batch_sizes()[0]} samples in a micro-batch do not: name smaller ones."
    return InfeasiblePlanError(
        f"{tables.profile.model.name} does not fit on {', '.join(devices)}: parameters, gradients and "
        f"{job.optimizer} state take {format_bytes(whole)} in all, the devices have "
        f"{format_bytes(sum(memory.values()))}; spread out as well as can be, with one sample in flight: "
        f"{'; '.join(lines)}. {advice}"
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


def _left_out_sentences(groups: Groups, found: SearchResult, chosen: Candidate) -> list[str]:
    lines = []
    used = set(chosen.devices)
    for group in groups.first_level:
        missing = [device for device in group.devices if device not in used]
        if missing == list(group.devices):
            lines.append(f"Group {group.name} is left out: {_with_any(found, chosen, missing)}.")
        elif missing:
            lines.append(f"{', '.join(missing)} of {group.name} left out: {_with_any(found, chosen, missing)}.")
    return lines


def _with_any(found: SearchResult, chosen: Candidate, missing: list[str]) -> str:
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


def _best(solved: Sequence[Candidate], wanted: Callable[[Candidate], bool]) -> Candidate | None:
    return next((candidate for candidate in solved if wanted(candidate)), None)


def _slower(other: Candidate, chosen: Candidate) -> str:
    percent = 100 * (other.value_s / chosen.value_s - 1)
    if abs(percent) < 0.5:
        return f"as fast by the dynamic programme's model ({format_seconds(other.value_s)})"
    word = "slower" if percent > 0 else "faster"
    return f"{abs(percent):.0f} % {word} by the dynamic programme's model ({format_seconds(other.value_s)})"
