"""Why a plan was chosen, in sentences: what won among its likes, which sites are in or out, what it gains."""

from collections.abc import Collection, Mapping, Sequence

from spantrain.core.outer.groups import OuterPlan
from spantrain.core.plan import Plan
from spantrain.core.planned.report import Alternative
from spantrain.core.quantities import format_bandwidth, format_seconds, format_speed
from spantrain.planner.engine.outer import Boundary
from spantrain.planner.groups import DeviceGroup
from spantrain.planner.request import Evaluated, Evaluation, Objective, Proposal
from spantrain.planner.strategies.relaxation import StepBound
from spantrain.planner.strategies.score import sites_of

_MANY_TIMES = 3.0
_SITES_APART = 12
"""Sites up to which there is a sentence for each."""
_NAMED = 8
"""Devices, up to which all of them are named."""


def choices(ranked: Sequence[Evaluated], objective: Objective) -> tuple[str, ...]:
    """Say which order and micro-batch size won among a strategy's simulated proposals, and by how much."""
    (best, result), others = ranked[0], ranked[1:]
    lines = []
    for what, chosen, choice_of in (("Order", _order(best), _order), ("Micro-batches of", _size(best), _size)):
        other = next(((found, choice_of(plan)) for plan, found in others if choice_of(plan) != chosen), None)
        if other is not None:
            compared = _compared(other[0].value(objective) / result.value(objective), objective)
            lines.append(f"{what} {chosen}: the next best of {len(ranked)} simulated, {other[1]}, {compared}.")
    return tuple(lines)


def sites_in_and_out(
    proposal: Proposal, result: Evaluation, seen: Sequence[Evaluated], objective: Objective, keep: Collection[str]
) -> tuple[str, ...]:
    """Say of each site why it is in or out, by the best plan without or with it of all that were simulated.

    Sites of which the strategy has said it already are left to it: it may know bounds of plans not simulated.
    """
    lines: list[str] = []
    found_of: dict[tuple[bool, str], list[str]] = {}
    plan, said = proposal.plan, proposal.reasons
    used = sites_of(plan)
    if len(plan.cluster.sites) < 2:
        return ()
    fitting = [(found.value(objective), other, sites_of(other)) for other, found in seen if found.fits]
    for site in plan.cluster.sites:
        if any(text.startswith((f"{site.name} is in", f"{site.name} is out")) for text in said):
            continue
        inside = site.name in used
        others = [(value, other) for value, other, sites in fitting if (site.name in sites) != inside]
        if inside and {site.name, *(device.name for device in plan.cluster.devices_at(site.name))} & {*keep}:
            text = "it was to be kept."
        elif not others:
            text = f"no plan {'without' if inside else 'with'} it that fits and keeps the limits was simulated."
        else:
            value, other = min(others, key=lambda entry: entry[0])
            ratio = value / result.value(objective)
            text = (
                f"the best plan {'without' if inside else 'with'} it of {len(others)} simulated ({_order(other)}) "
                f"{_compared(ratio, objective)}."
            )
        found_of.setdefault((inside, text), []).append(site.name)
    few = len(plan.cluster.sites) <= _SITES_APART
    for (inside, text), names in found_of.items():
        for row in [[name] for name in names] if few else [names]:
            sites, are = ("Site", "is") if len(row) == 1 else ("Sites", "are")
            lines.append(f"{sites} {_names(row)} {are} {'in' if inside else 'out'}: {text}")
    return tuple(lines)


def bounded(plan: Plan, result: Evaluation, bound: StepBound, devices: int) -> str:
    """Say how far a plan's step is over what no plan can be under, and what the rest is."""
    ratio = result.step_s / bound.step_s
    over = f"is {100 * (ratio - 1):.1f} % over it" if ratio < _MANY_TIMES else f"takes {ratio:.3g} times that"
    apart = (
        "" if bound.alone_s in (bound.compute_s, float("inf")) else f", {format_seconds(bound.alone_s)} inside one site"
    )
    return (
        f"No plan can be under {format_seconds(bound.step_s)} a step: all devices in one place would compute for "
        f"{format_seconds(bound.compute_s)}{apart}. This one {over}; its devices wait for "
        f"{100 * result.bubble_ratio:.1f} % of the step (filling the pipeline, messages, sums), and it uses "
        f"{len(plan.devices)} of {devices} devices."
    )


def outer_groups(groups: Sequence[DeviceGroup], outer: OuterPlan, other: str, samples_per_s: float) -> tuple[str, ...]:
    """Say what the outer optimizer that was chosen gains over the best plan without, and what each group does in it."""
    lines = [
        f"An outer optimizer every {outer.inner_steps} steps does {format_speed(outer.samples_per_s)} samples/s, the "
        f"best plan without ({other}) {format_speed(samples_per_s)}. It was allowed; it does not compute what one "
        "device would."
    ]
    joined = {group.name: group for group in outer.groups}
    for name in (group.name for group in groups):
        if name not in joined:
            lines.append(f"{name} is out: no outer optimizer that joins it too does more samples a second.")
            continue
        part = joined[name]
        lines.append(
            f"{name} is in: by itself it does {part.global_batch} of the {outer.global_batch} samples of an "
            f"inner step, in {format_seconds(part.step_s)} ({part.stages})."
        )
    return tuple(lines)


def boundaries(
    best: Evaluated,
    seen: Sequence[Evaluated],
    ways: Sequence[Boundary],
    group_of: Mapping[str, str],
    rates: Mapping[frozenset[str], float],
    inner_steps: int,
    outer: OuterPlan | None,
) -> tuple[str, ...]:
    """Say of each slow boundary between groups what three ways come to: across it, on one side, an outer optimizer.

    `group_of` is by device; `rates` are samples per second of two groups that an outer optimizer joins; `outer` is
    there if it was chosen.
    """
    known = [(found.samples_per_s, _groups(other, group_of)) for other, found in (best, *seen) if found.fits]
    used = _groups(best[0], group_of)
    lines = []
    for way in ways:
        ends = frozenset(way.groups)
        across = max((rate for rate, groups in known if ends <= groups), default=None)
        one_side = (entry for entry in known if len(ends & entry[1]) == 1)
        alone = max(one_side, key=lambda entry: entry[0], default=None)
        said = ["a pipeline across it was not worth simulating"]
        if across is not None:
            said = [f"a pipeline across it does {format_speed(across)} samples/s"]
        if alone is None:
            said.append("neither side can do without the other")
        else:
            said.append(f"without {', '.join(ends - alone[1])} {format_speed(alone[0])}")
        if ends in rates:
            rate = f"{format_speed(rates[ends])} (what it costs in learning is not reckoned)"
            said.append(f"an outer optimizer every {inner_steps} steps {rate}")
        else:
            said.append("an outer optimizer cannot join them, no plan inside each of them is known to fit")
        lines.append(
            f"{' | '.join(way.groups)} ({format_bandwidth(way.bandwidth_bytes_per_s)}, "
            f"{format_seconds(way.latency_s)}): {', '.join(said)}; {_taken(ends, used, outer)}."
        )
    return tuple(lines)


def _groups(plan: Plan, group_of: Mapping[str, str]) -> frozenset[str]:
    return frozenset(group_of[name] for name in plan.devices if name in group_of)


def _taken(ends: frozenset[str], used: frozenset[str], outer: OuterPlan | None) -> str:
    """Say which way was taken over a boundary."""
    if outer is not None:
        joined = ends <= {group.name for group in outer.groups}
        return "the outer optimizer is taken" if joined else "it is not crossed"
    if ends <= used:
        return "the pipeline is taken"
    out = sorted(ends - used)
    return f"{' and '.join(out)} {'is' if len(out) == 1 else 'are'} left out"


def _compared(ratio: float, objective: Objective) -> str:
    if ratio == float("inf"):
        return "has no known price"
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "is as good"
    words = {
        Objective.THROUGHPUT: ("takes", "longer", "less", "as long"),
        Objective.COST: ("costs", "more", "less", "as much"),
        Objective.ENERGY: ("needs", "more energy", "less energy", "the energy"),
    }
    verb, more, less, times = words[objective]
    if ratio >= _MANY_TIMES:
        return f"{verb} {ratio:.3g} times {times}"
    return f"{verb} {abs(percent):.1f} % {more if percent > 0 else less}"


def verdict(step_s: float, others: Sequence[Alternative]) -> tuple[str, ...]:
    """Say in plain words what the plan gains over staying in one place."""
    lines = []
    for other in others:
        if other.step_s is None:
            lines.append(f"{other.name}: cannot run ({other.reason.split('; ')[0]})")
        else:
            lines.append(
                f"{other.name} ({_names(other.devices)}): {format_seconds(other.step_s)} a step; "
                f"this plan is {other.step_s / step_s:.2f} times as fast"
            )
    return tuple(lines)


def _names(devices: Sequence[str]) -> str:
    if len(devices) <= _NAMED:
        return ", ".join(devices)
    return f"{', '.join(devices[: _NAMED - 2])} and {len(devices) - _NAMED + 2} more"


def _order(plan: Plan) -> str:
    """Return the sites in the order of the pipeline."""
    sites = [plan.cluster.device_by_name[stage.devices[0]].site for stage in plan.stages]
    return " > ".join(site for index, site in enumerate(sites) if index == 0 or site != sites[index - 1])


def _size(plan: Plan) -> str:
    return f"{plan.stages[0].micro_batches[0].size} samples"
