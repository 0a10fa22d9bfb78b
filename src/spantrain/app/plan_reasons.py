"""Why a plan was chosen, in sentences: what won among its likes, which sites are in or out, what it gains."""

from collections.abc import Collection, Mapping, Sequence

from spantrain.core.cluster import Cluster, Link
from spantrain.core.outer import OuterPlan
from spantrain.core.plan import Alternative, Plan
from spantrain.core.quantities import format_bandwidth, format_seconds
from spantrain.planner.request import Evaluation, Objective

__all__ = ["boundaries", "choices", "outer_sites", "sites_in_and_out", "verdict"]

Evaluated = tuple[Plan, Evaluation]

_MANY_TIMES = 3.0
_BOUNDARIES = 6
"""Of more slow boundaries than that, the slowest are told of."""
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


def outer_sites(cluster: Cluster, outer: OuterPlan, other: str, samples_per_s: float) -> tuple[str, ...]:
    """Say what an outer optimizer that was chosen gains over another strategy's plan, and what each site does in it."""
    lines = [
        f"An outer optimizer every {outer.inner_steps} steps does {_speed(outer.samples_per_s)} samples/s, the best "
        f"plan without ({other}) {_speed(samples_per_s)}. It was allowed; it does not compute what one device would."
    ]
    groups = {group.name: group for group in outer.groups}
    for site in cluster.sites:
        group = groups.get(site.name)
        if group is None:
            lines.append(f"{site.name} is out: no outer optimizer that joins it too does more samples a second.")
        else:
            lines.append(
                f"{site.name} is in: by itself it does {group.global_batch} of the {outer.global_batch} samples of an "
                f"inner step, in {format_seconds(group.step_s)} ({group.stages})."
            )
    return tuple(lines)


def boundaries(
    best: Evaluated,
    seen: Sequence[Evaluated],
    rates: Mapping[frozenset[str], float],
    inner_steps: int,
    outer: OuterPlan | None,
    out: Collection[str] = (),
) -> tuple[str, ...]:
    """Say of each slow boundary between sites what the three ways come to: across it, on one side, an outer optimizer.

    `rates` are samples per second of two sites that an outer optimizer joins; `outer` is there if it was chosen.
    Of sites that are to be left `out` nothing is said.
    """
    plan = best[0]
    known = [(found.samples_per_s, other) for other, found in (best, *seen) if found.fits]
    lines = []
    for link in _slow_links(plan.cluster, out):
        ends = frozenset((link.source, link.target))
        across = max((rate for rate, other in known if ends <= _sites(other)), default=None)
        alone = max(((rate, other) for rate, other in known if len(ends & _sites(other)) == 1), key=_rate, default=None)
        ways = ["a pipeline across it was not worth simulating"]
        if across is not None:
            ways = [f"a pipeline across it does {_speed(across)} samples/s"]
        if alone is None:
            ways.append("neither side can do without the other")
        else:
            ways.append(f"without {', '.join(ends - _sites(alone[1]))} {_speed(alone[0])}")
        if ends in rates:
            rate = f"{_speed(rates[ends])} (what it costs in learning is not reckoned)"
            ways.append(f"an outer optimizer every {inner_steps} steps {rate}")
        else:
            ways.append("an outer optimizer cannot join them, one holds no whole model")
        lines.append(
            f"{link.source} | {link.target} ({format_bandwidth(link.bandwidth_bytes_per_s)}, "
            f"{format_seconds(link.latency_s)}): {', '.join(ways)}; {_taken(ends, plan, outer)}."
        )
    return tuple(lines)


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:.4g}" if samples_per_s < 1000 else f"{samples_per_s:,.0f}"


def _rate(entry: tuple[float, Plan]) -> float:
    return entry[0]


def _taken(ends: frozenset[str], plan: Plan, outer: OuterPlan | None) -> str:
    """Say which way was taken over a boundary."""
    if outer is not None:
        joined = ends <= {group.name for group in outer.groups}
        return "the outer optimizer is taken" if joined else "it is not crossed"
    return "the pipeline is taken" if ends <= _sites(plan) else _left(ends, plan)


def _left(ends: frozenset[str], plan: Plan) -> str:
    out = sorted(ends - _sites(plan))
    return f"{' and '.join(out)} {'is' if len(out) == 1 else 'are'} left out"


def _slow_links(cluster: Cluster, out: Collection[str]) -> list[Link]:
    """Return for each two sites the slower direction between them, the slowest first; of many only the first few.

    Slow is what carries less than either site does inside.
    """
    found = []
    inside = {site.name: site.bandwidth_bytes_per_s for site in cluster.sites}
    for link in cluster.links:
        if {link.source, link.target} & set(out):
            continue
        back = next(other for other in cluster.links if (other.source, other.target) == (link.target, link.source))
        slower = link.bandwidth_bytes_per_s < back.bandwidth_bytes_per_s
        first = link.bandwidth_bytes_per_s == back.bandwidth_bytes_per_s and link.source < link.target
        if (slower or first) and link.bandwidth_bytes_per_s < min(inside[link.source], inside[link.target]):
            found.append(link)
    return sorted(found, key=lambda link: link.bandwidth_bytes_per_s)[:_BOUNDARIES]


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


def _sites(plan: Plan) -> frozenset[str]:
    return frozenset(plan.cluster.device_by_name[name].site for name in plan.devices)


def _order(plan: Plan) -> str:
    """Return the sites in the order of the pipeline."""
    sites = [plan.cluster.device_by_name[stage.devices[0]].site for stage in plan.stages]
    return " > ".join(site for index, site in enumerate(sites) if index == 0 or site != sites[index - 1])


def _size(plan: Plan) -> str:
    return f"{plan.stages[0].micro_batches[0].size} samples"
