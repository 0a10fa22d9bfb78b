"""What limits a plan and what would help most: one thing about machines or network changed, and simulated again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any, Literal, TypeVar, get_args

from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.core.cluster import Cluster, Device, Site
from spantrain.core.names import few
from spantrain.core.plan import Plan, Replica
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import SAME_RATIO
from spantrain.cost.step import StepCost
from spantrain.planner.engine.evaluate import LinkLoad, link_loads
from spantrain.planner.engine.predict import costs_of, with_best_order
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import SearchEffort

Line = Literal["uplink", "downlink"]
"""A site's way to all others, or from them."""
_LINES: tuple[Line, ...] = get_args(Line)
T = TypeVar("T")


def _rate(site: Site, line: Line) -> float | None:
    """Return the bytes per second of a site's line; None if the cluster has none."""
    return site.uplink_bandwidth_bytes_per_s if line == "uplink" else site.downlink_bandwidth_bytes_per_s


def _but(entries: Iterable[T], chosen: Callable[[T], bool], change: Callable[[T], T]) -> tuple[T, ...]:
    """Return all entries, those that are chosen changed."""
    return tuple(change(entry) if chosen(entry) else entry for entry in entries)


def with_faster_link(
    profile: Profile, sites: tuple[str, str], bandwidth_factor: float, latency_factor: float = 1.0
) -> Profile:
    """Return a profile whose way between two sites, both directions, or inside one, is faster or nearer.

    Sites' own lines to all others stay as they are: a pair gets no more than they carry.
    """
    cluster, between = profile.cluster, set(sites)
    place = cluster.device_by_name

    def on_the_way(link: LinkMeasurement) -> bool:
        a, b = place[link.source], place[link.target]
        return a.host != b.host and {a.site, b.site} == between

    def faster(link: LinkMeasurement) -> LinkMeasurement:
        a, b = (cluster.site_by_name[place[name].site] for name in (link.source, link.target))
        own = link.bandwidth_bytes_per_s
        wanted = own * bandwidth_factor
        lines = [] if a == b else [_rate(a, "uplink"), _rate(b, "downlink")]
        narrowest = min((rate for rate in lines if rate is not None), default=wanted)
        return replace(
            link,
            bandwidth_bytes_per_s=min(wanted, max(narrowest, own)),
            latency_s=link.latency_s * latency_factor,
            curve=None if bandwidth_factor != 1.0 else link.curve,
        )

    def wider(entry: Any, latency_factor: float = 1.0) -> Any:
        rate = entry.bandwidth_bytes_per_s * bandwidth_factor
        return replace(entry, bandwidth_bytes_per_s=rate, latency_s=entry.latency_s * latency_factor)

    described = _but(
        cluster.links, lambda link: {link.source, link.target} == between, partial(wider, latency_factor=latency_factor)
    )
    places = _but(cluster.sites, lambda site: between == {site.name}, wider)
    links = _but(profile.links, on_the_way, faster)
    return replace(profile, cluster=replace(cluster, links=described, sites=places), links=links)


def with_faster_line(profile: Profile, site: str, line: Line, factor: float) -> Profile:
    """Return a profile whose site has a wider uplink or downlink; the links behind it stay as they are.

    Pairs that were measured to fill the line get what it then carries, up to the link between their sites and the
    line at its other end.

    Raises:
        ValueError: the site has no such line.
    """
    cluster = profile.cluster
    rate = _rate(cluster.site_by_name[site], line)
    if rate is None:
        raise ValueError(f"{site} of {cluster.name} has no {line}: it cannot be made faster")
    more: dict[str, Any] = {f"{line}_bandwidth_bytes_per_s": factor * rate}
    sites = _but(cluster.sites, lambda own: own.name == site, lambda own: replace(own, **more))
    wider = replace(cluster, sites=sites)

    def fills(link: LinkMeasurement) -> bool:
        """Whether a pair passes the line and was measured to fill it."""
        source, target = (cluster.device_by_name[name].site for name in (link.source, link.target))
        passes = source != target and site == (source if line == "uplink" else target)
        return passes and link.bandwidth_bytes_per_s > SAME_RATIO * rate

    def through_it(link: LinkMeasurement) -> LinkMeasurement:
        own, described = link.bandwidth_bytes_per_s, wider.link(link.source, link.target).bandwidth_bytes_per_s
        return replace(link, bandwidth_bytes_per_s=max(own, min(factor * own, described)), curve=None)

    return replace(profile, cluster=wider, links=_but(profile.links, fills, through_it))


def with_more_of(plan: Plan, profile: Profile, stage_index: int, template: Replica) -> tuple[Plan, Profile]:
    """Return plan and profile with one more replica in a stage, on a host of its own, like one that is there.

    Its device has the links of that device; it shares the samples as if it had been there, with the same limit.
    """
    old = profile.cluster.device_by_name[template.devices[0]]
    taken = profile.cluster.device_by_name.keys() | profile.cluster.host_by_name.keys()
    name = next(name for name in (f"more-{number}" for number in itertools.count(1)) if name not in taken)
    host = replace(profile.cluster.host_by_name[old.host], name=name, devices=(name,), address=None)
    sites = _but(
        profile.cluster.sites, lambda site: site.name == old.site, lambda site: replace(site, hosts=(*site.hosts, name))
    )
    cluster = replace(
        profile.cluster,
        sites=sites,
        hosts=(*profile.cluster.hosts, host),
        devices=(*profile.cluster.devices, replace(old, name=name, host=name)),
    )
    copied = tuple(_copies(profile, cluster, old, name))
    scores = tuple(replace(score, device=name) for score in profile.scores if score.device == old.name)
    other = replace(profile, cluster=cluster, links=(*profile.links, *copied), scores=(*profile.scores, *scores))
    stage = plan.stages[stage_index]
    more = replace(stage, replicas=(*stage.replicas, replace(template, devices=(name,))))
    # What a replica gets is never more than before, but rounding may make one micro-batch larger than its limit.
    more = more.with_limits(
        max(replica.in_flight_limit, more.largest_of(number), 1) for number, replica in enumerate(more.replicas)
    )
    stages = (*plan.stages[:stage_index], more, *plan.stages[stage_index + 1 :])
    return replace(plan, cluster=cluster, stages=stages, hints=None), other


def _copies(profile: Profile, cluster: Cluster, old: Device, name: str) -> Iterator[LinkMeasurement]:
    """Yield the links of a device as those of its copy in a cluster, and the two between them, as those of the site."""
    if profile.links_described:
        return
    for link in profile.links:
        if link.source == old.name:
            yield replace(link, source=name)
        elif link.target == old.name:
            yield replace(link, target=name)
    yield LinkMeasurement.described(cluster, old.name, name)
    yield LinkMeasurement.described(cluster, name, old.name)


_TWICE = 2.0
_MATTERS = 0.005
"""A what-if that saves a smaller part of the step is not worth a word."""
_EFFORT = SearchEffort(max_runs=60, max_actions=10_000)
"""For the order of work of each what-if."""


class WhatIf(Record):
    """The same plan, were one thing otherwise."""

    change: str
    kind: str
    """`link`, `line` (a site's uplink or downlink), `latency`, `more devices`, `faster devices` or `memory`."""
    step_s: float
    times_as_fast: float


class StageLoad(Record):
    """How a stage spends the step; the mean over its devices."""

    devices: tuple[str, ...]
    busy_ratio: float
    gradient_sum_s: float
    held_by_memory: bool
    """Whether an in-flight limit is under what its samples would fill."""


class Explanation(Record):
    """What a plan's step is made of."""

    step_s: float
    bound_s: float
    """Seconds that no order of work on these devices and links can beat."""
    limited_by: str
    """The largest of the terms that bound the step, and what the order of work adds."""
    stages: tuple[StageLoad, ...]
    links: Mapping[str, LinkLoad]
    helps: tuple[WhatIf, ...]
    """By how much they help; those that do not are left out."""
    tried: int
    """What-ifs that were simulated."""


def explain_plan(plan: Plan, profile: Profile) -> Explanation:
    """Simulate a plan and everything that one could change about the machines and the network.

    The plan stays as it is but for that one thing and the order of work: planning anew may gain more.

    Raises:
        PlanError: the plan is of another model than the profile.
        ProfileError: the profile lacks what the plan needs.
    """
    check_fits_profile(plan, profile)
    now = _simulate(plan, profile)
    tried = [
        WhatIf(change=change, kind=kind, step_s=step_s, times_as_fast=now.step_s / step_s)
        for kind, change, step_s in _what_ifs(plan, profile)
    ]
    helps = [entry for entry in tried if entry.step_s < now.step_s * (1 - _MATTERS)]
    helps.sort(key=lambda entry: entry.step_s)
    costs = costs_of(plan, profile)
    bound_s = step_bound_s(plan, costs)
    if plan.interleaved:  # of devices with several stages, the busiest one's work
        busiest = max(now.utilisation, key=now.utilisation.__getitem__)
        text = f"the work of {busiest}, {format_seconds(now.utilisation[busiest] * now.step_s)}"
    else:
        own = StepCost(profile, plan.dtype).estimate(plan)
        text = f"{own.bound_by}: its work and the way there and back take at least {format_seconds(own.bound_s)}"
    if bound_s < now.step_s * (1 - _MATTERS):
        over = 100 * (now.step_s / bound_s - 1)
        text += f"; the order of work takes {over:.1f} % more than the bound of all orders, {format_seconds(bound_s)}"
    return Explanation(
        step_s=now.step_s,
        bound_s=bound_s,
        limited_by=text,
        stages=tuple(
            StageLoad(
                devices=stage.devices,
                busy_ratio=sum(now.utilisation[name] for name in stage.devices) / len(stage.devices),
                gradient_sum_s=costs.gradient_sum_s(index),
                held_by_memory=not plan.interleaved
                and any(one.in_flight_limit < stage.samples_of(k) for k, one in enumerate(stage.replicas)),
            )
            for index, stage in enumerate(plan.stages)
        ),
        links=link_loads(plan, profile),
        helps=tuple(helps),
        tried=len(tried),
    )


def _simulate(plan: Plan, profile: Profile, speed: Mapping[str, SpeedTrace] | None = None) -> SimulationResult:
    options = SimulationOptions(trace=False, device_speed=speed or {})
    return simulate(plan, costs_of(plan, profile), steps=1, options=options)


def _what_ifs(plan: Plan, profile: Profile) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, the change, and the seconds of a step with it."""
    changed = itertools.chain(_network_changes(plan, profile), _device_changes(plan, profile))
    for kind, change, other_plan, other_profile in changed:
        ordered = with_best_order(other_plan, other_profile, effort=_EFFORT)
        yield kind, change, _simulate(ordered, other_profile).step_s
    for crew in plan.crews:
        kinds = sorted({plan.cluster.device_by_name[name].kind for name in crew.devices})
        speed = {replica.devices[0]: SpeedTrace(changes=((0.0, _TWICE),)) for replica in crew.first.replicas}
        change = f"{' and '.join(kinds)} of stage {crew.numbers[0]} twice as fast ({few(crew.devices)})"
        yield "faster devices", change, _simulate(plan, profile, speed).step_s


Change = tuple[str, str, Plan, Profile]


def _network_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield each way between or inside sites with twice the bandwidth, and those between with half the latency.

    And each line of a site that the cluster has with twice the bandwidth.
    """
    places = {plan.cluster.device_by_name[name].site for name in plan.devices}
    used = [site.name for site in plan.cluster.sites if site.name in places]
    for a, b in combinations_with_replacement(used, 2):
        way = f"inside {a}" if a == b else f"{a} <-> {b}"
        yield "link", f"twice the bandwidth {way}", plan, with_faster_link(profile, (a, b), _TWICE)
        if a != b:
            yield "latency", f"half the latency {way}", plan, with_faster_link(profile, (a, b), 1.0, 1 / _TWICE)
    for name, line in product(used if len(used) > 1 else (), _LINES):
        if _rate(plan.cluster.site_by_name[name], line) is not None:
            yield "line", f"twice the {line} of {name}", plan, with_faster_line(profile, name, line, _TWICE)


def _device_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield one more replica like the last of each kind in each stage, and each stage without its memory's limits.

    Of interleaved plans none: their order is of these devices, and another one would have to be searched.
    """
    for index, stage in enumerate(() if plan.interleaved else plan.stages):
        templates = {plan.cluster.device_by_name[r.devices[0]].kind: r for r in stage.replicas if len(r.devices) == 1}
        for kind, template in templates.items():
            change = f"one more {kind} beside {template.devices[0]} in stage {index}"
            yield "more devices", change, *with_more_of(plan, profile, index, template)
        limits = [one.in_flight_limit for one in stage.replicas]
        freed = stage.with_limits(max(limit, stage.samples_of(number)) for number, limit in enumerate(limits))
        if freed != stage:
            other = replace(plan, stages=(*plan.stages[:index], freed, *plan.stages[index + 1 :]), hints=None)
            yield "memory", f"memory for all samples of stage {index}", other, profile
