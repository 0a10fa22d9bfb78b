"""Why the plan of `auto` is as it is: a sentence for each site, with figures."""

from collections.abc import Callable

from spantrain.core.quantities import format_seconds
from spantrain.planner.request import Objective, PlanRequest
from spantrain.planner.strategies.auto.score import Score
from spantrain.planner.strategies.auto.search import Found, Searcher


def reasons_of(request: PlanRequest, search: Searcher, chosen: Found) -> tuple[str, ...]:
    """Return a sentence for each site: why it is in or out; then what the search did."""
    cluster = request.profile.cluster
    allowed = set(request.devices)
    lines = []
    for site in cluster.sites:
        names = [device.name for device in cluster.devices_at(site.name)]
        used = [name for name in names if name in chosen.plan.devices]
        if not allowed & set(names):
            lines.append(f"{site.name} is out: it was to be left out.")
        elif used:
            lines.append(_why_in(request, search, chosen, site.name, used, len(names)))
        else:
            lines.append(_why_out(request, search, chosen, site.name))
    lines.append(
        f"{len(search.pool.entries)} plans were bounded, {len(search.simulated)} simulated, the best bound is "
        f"{_figure(request, min(entry.bound for entry in search.pool.entries.values()).value)}."
        if search.pool.entries
        else f"{len(search.simulated)} plans were simulated."
    )
    return tuple(lines)


def _why_in(request: PlanRequest, search: Searcher, chosen: Found, site: str, used: list[str], count: int) -> str:
    stages = [
        f"{stage.first_unit}-{stage.end_unit - 1}" if len(stage.units) > 1 else str(stage.first_unit)
        for stage in chosen.plan.stages
        if set(stage.devices) & set(used)
    ]
    head = f"{site} is in with {len(used)} of {count} devices (units {', '.join(stages)}): "
    here = _at(request, site)
    if set(request.devices) <= here:
        why = "it is the only site."
    else:
        why = _compared(request, search, chosen, lambda devices: not set(devices) & here, "without it")
    if len(used) == len(here & set(request.devices)):
        return head + why
    more = _compared(request, search, chosen, lambda devices: len(set(devices) & here) > len(used), "with more of it")
    return f"{head}{why} {more[0].upper()}{more[1:]}"


def _why_out(request: PlanRequest, search: Searcher, chosen: Found, site: str) -> str:
    wanted = _at(request, site)
    return f"{site} is out: " + _compared(
        request, search, chosen, lambda devices: bool(set(devices) & wanted), "with it"
    )


def _at(request: PlanRequest, site: str) -> set[str]:
    return {device.name for device in request.profile.cluster.devices_at(site)}


def _compared(
    request: PlanRequest, search: Searcher, chosen: Found, fits: Callable[[tuple[str, ...]], bool], what: str
) -> str:
    """Say what the best simulated plan of some kind comes to, else what no plan looked at can be under."""
    simulated = min((found.score for found in search.simulated if fits(found.plan.devices)), default=None)
    bound = min((entry.bound for shape, entry in search.pool.entries.items() if fits(shape.devices)), default=None)
    if simulated is not None:
        return f"the best plan {what} that was simulated {_against(request, simulated, chosen.score)}."
    if bound is not None:
        return f"of the plans {what} that were looked at none {_against(request, bound, chosen.score, least=True)}."
    return f"no plan {what} fits into memory."


def _against(request: PlanRequest, other: Score, chosen: Score, *, least: bool = False) -> str:
    figure = _figure(request, other.value)
    percent = 100 * (other.value / chosen.value - 1) if 0 < chosen.value < float("inf") else None
    more = "" if percent is None else f", {abs(percent):.0f} % {'less' if percent < 0 else 'more'}"
    broken = ", and breaks a limit" if other.broken > chosen.broken else ""
    return f"can be under {figure}{more}{broken}" if least else f"takes {figure}{more}{broken}"


def _figure(request: PlanRequest, value: float) -> str:
    match request.objective:
        case Objective.THROUGHPUT:
            return f"{format_seconds(value)} a step"
        case Objective.COST:
            return f"{value:.4g} USD a step"
        case Objective.ENERGY:
            return f"{value:.4g} J a sample"
