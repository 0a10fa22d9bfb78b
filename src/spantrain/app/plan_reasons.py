"""Why a plan was chosen, in sentences: what won among its likes, which sites are in or out, what it gains."""

from collections.abc import Sequence

from spantrain.core.plan import Alternative, Plan
from spantrain.planner.request import Evaluation, Objective

__all__ = ["choices", "sites_in_and_out", "verdict"]

Evaluated = tuple[Plan, Evaluation]

_MANY_TIMES = 3.0
_NAMED = 8
"""Of more devices than that, only the first few are named."""


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
    plan: Plan, result: Evaluation, seen: Sequence[Evaluated], objective: Objective, said: Sequence[str] = ()
) -> tuple[str, ...]:
    """Say of each site why it is in or out, by the best plan without or with it of all that were simulated.

    Sites of which the strategy has `said` it already are left to it: it may know bounds of plans not simulated.
    """
    lines = []
    used = _sites(plan)
    if len(plan.cluster.sites) < 2:
        return ()
    for site in plan.cluster.sites:
        if any(text.startswith((f"{site.name} is in", f"{site.name} is out")) for text in said):
            continue
        inside = site.name in used
        others = [
            (found.value(objective), other)
            for other, found in seen
            if found.fits and (site.name in _sites(other)) != inside
        ]
        text = f"Site {site.name} is {'in' if inside else 'out'}: "
        if not others:
            text += f"no plan {'without' if inside else 'with'} it that fits and keeps the limits was simulated."
        else:
            value, other = min(others, key=lambda entry: entry[0])
            ratio = value / result.value(objective)
            text += (
                f"the best plan {'without' if inside else 'with'} it of {len(others)} simulated ({_order(other)}) "
                f"{_compared(ratio, objective)}."
            )
        lines.append(text)
    return tuple(lines)


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
            lines.append(f"{other.name}: cannot run ({other.reason})")
        else:
            lines.append(
                f"{other.name} ({_names(other.devices)}): {other.step_s:.3f} s a step; "
                f"this plan is {other.step_s / step_s:.2f} times as fast"
            )
    return tuple(lines)


def _names(devices: Sequence[str]) -> str:
    if len(devices) <= _NAMED:
        return ", ".join(devices)
    return f"{', '.join(devices[: _NAMED - 2])} and {len(devices) - _NAMED + 2} more"


def _sites(plan: Plan) -> frozenset[str]:
    return frozenset(plan.cluster.device_by_name[name].site for name in plan.devices)


def _order(plan: Plan) -> str:
    """Return the sites in the order of the pipeline."""
    sites = [plan.cluster.device_by_name[stage.devices[0]].site for stage in plan.stages]
    return " > ".join(site for index, site in enumerate(sites) if index == 0 or site != sites[index - 1])


def _size(plan: Plan) -> str:
    return f"{plan.stages[0].micro_batches[0].size} samples"
