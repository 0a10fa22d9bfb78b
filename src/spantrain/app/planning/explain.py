"""What limits a plan and what would help most: one thing about machines or network changed, and simulated again."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.core.cluster import Cluster, Device, Site
from spantrain.core.plan import Plan, Replica
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import SAME_RATIO
from spantrain.cost.step import StepCost
from spantrain.planner.engine.evaluate import LinkLoad, link_loads
from spantrain.planner.engine.predict import costs_of, with_best_order
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import SearchEffort


class Line(StrEnum):
    """A site's way to all others, or from them."""

    UPLINK = "uplink"
    DOWNLINK = "downlink"


def line_rate(site: Site, line: Line) -> float | None:
    """Return the bytes per second of a site's line; None if the cluster has none."""
    return site.uplink_bandwidth_bytes_per_s if line is Line.UPLINK else site.downlink_bandwidth_bytes_per_s


def with_faster_link(
    profile: Profile, sites: tuple[str, str], bandwidth_factor: float, latency_factor: float = 1.0
) -> Profile:
    """Return a profile whose way between two sites, both directions, or inside one, is faster or nearer.

    Sites' own lines to all others stay as they are: a pair gets no more than they carry.
    """
    cluster, between = profile.cluster, set(sites)
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=_faster(cluster, link, bandwidth_factor),
            latency_s=link.latency_s * latency_factor,
            curve=None if bandwidth_factor != 1.0 else link.curve,
        )
        if _between(cluster, link) == between
        else link
        for link in profile.links
    )
    described = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth_factor,
            latency_s=link.latency_s * latency_factor,
        )
        if {link.source, link.target} == between
        else link
        for link in cluster.links
    )
    places = tuple(
        replace(site, bandwidth_bytes_per_s=site.bandwidth_bytes_per_s * bandwidth_factor)
        if between == {site.name}
        else site
        for site in cluster.sites
    )
    return replace(profile, cluster=replace(cluster, links=described, sites=places), links=links)


def with_faster_line(profile: Profile, site: str, line: Line, factor: float) -> Profile:
    """Return a profile whose site has a wider uplink or downlink; the links behind it stay as they are.

    Pairs that were measured to fill the line get what it then carries, up to the link between their sites and the
    line at its other end.

    Raises:
        ValueError: the site has no such line.
    """
    cluster = profile.cluster
    rate = line_rate(cluster.site_by_name[site], line)
    if rate is None:
        raise ValueError(f"{site} of {cluster.name} has no {line}: it cannot be made faster")
    sites = tuple(_with_line(own, line, factor * rate) if own.name == site else own for own in cluster.sites)
    wider = replace(cluster, sites=sites)
    links = tuple(
        _through_wider_line(link, wider, factor) if _fills(cluster, link, site, line, rate) else link
        for link in profile.links
    )
    return replace(profile, cluster=wider, links=links)


def _with_line(site: Site, line: Line, bandwidth_bytes_per_s: float) -> Site:
    if line is Line.UPLINK:
        return replace(site, uplink_bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return replace(site, downlink_bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def _fills(cluster: Cluster, link: LinkMeasurement, site: str, line: Line, rate: float) -> bool:
    """Whether a pair passes a line and was measured to fill it."""
    source, target = (cluster.device_by_name[name].site for name in (link.source, link.target))
    passes = source != target and site == (source if line is Line.UPLINK else target)
    return passes and link.bandwidth_bytes_per_s > SAME_RATIO * rate


def _through_wider_line(link: LinkMeasurement, wider: Cluster, factor: float) -> LinkMeasurement:
    own = link.bandwidth_bytes_per_s
    described = wider.link(link.source, link.target).bandwidth_bytes_per_s
    return replace(link, bandwidth_bytes_per_s=max(own, min(factor * own, described)), curve=None)


def _faster(cluster: Cluster, link: LinkMeasurement, factor: float) -> float:
    """Return what a pair gets when the link between its places is faster: no more than the lines before and behind."""
    wanted = link.bandwidth_bytes_per_s * factor
    a, b = (cluster.site_by_name[cluster.device_by_name[name].site] for name in (link.source, link.target))
    lines = [] if a == b else [a.uplink_bandwidth_bytes_per_s, b.downlink_bandwidth_bytes_per_s]
    narrowest = min((rate for rate in lines if rate is not None), default=wanted)
    return min(wanted, max(narrowest, link.bandwidth_bytes_per_s))


def _between(cluster: Cluster, link: LinkMeasurement) -> set[str] | None:
    a, b = cluster.device_by_name[link.source], cluster.device_by_name[link.target]
    return None if a.host == b.host else {a.site, b.site}


def with_more_of(plan: Plan, profile: Profile, stage_index: int, template: Replica) -> tuple[Plan, Profile]:
    """Return plan and profile with one more replica in a stage, on a host of its own, like one that is there.

    Its device has the links of that device; it shares the samples as if it had been there, with the same limit.
    """
    old = profile.cluster.device_by_name[template.devices[0]]
    taken = profile.cluster.device_by_name.keys() | profile.cluster.host_by_name.keys()
    name = next(name for name in (f"more-{number}" for number in itertools.count(1)) if name not in taken)
    cluster = _with_host(profile.cluster, old, replace(old, name=name, host=name))
    copied = tuple(_copies(profile, old, name))
    scores = tuple(replace(score, device=name) for score in profile.scores if score.device == old.name)
    other = replace(profile, cluster=cluster, links=(*profile.links, *copied), scores=(*profile.scores, *scores))
    stage = plan.stages[stage_index]
    more = replace(stage, replicas=(*stage.replicas, replace(template, devices=(name,))))
    # What a replica gets is never more than before, but rounding may make one micro-batch larger than its limit.
    limits = [max((span.size for span in more.replica_spans(n)), default=1) for n in range(len(more.replicas))]
    replicas = tuple(
        replace(replica, in_flight_limit=max(replica.in_flight_limit, limit))
        for replica, limit in zip(more.replicas, limits, strict=True)
    )
    stages = (*plan.stages[:stage_index], replace(more, replicas=replicas), *plan.stages[stage_index + 1 :])
    return replace(plan, cluster=cluster, stages=stages, hints=None), other


def _with_host(cluster: Cluster, old: Device, new: Device) -> Cluster:
    host = replace(cluster.host_by_name[old.host], name=new.host, devices=(new.name,), address=None)
    sites = tuple(
        replace(site, hosts=(*site.hosts, new.host)) if site.name == old.site else site for site in cluster.sites
    )
    return replace(cluster, sites=sites, hosts=(*cluster.hosts, host), devices=(*cluster.devices, new))


def _copies(profile: Profile, old: Device, name: str) -> Iterator[LinkMeasurement]:
    """Yield the links of a device as those of its copy, and the two between them: as to its nearest other host."""
    if profile.links_described:
        return
    for link in profile.links:
        if link.source == old.name:
            yield replace(link, source=name)
        elif link.target == old.name:
            yield replace(link, target=name)
    site = profile.cluster.site_by_name[old.site]
    for source, target in ((old.name, name), (name, old.name)):
        yield LinkMeasurement(
            source=source,
            target=target,
            latency_s=site.latency_s,
            bandwidth_bytes_per_s=site.bandwidth_bytes_per_s,
            payload_bytes=0,
            rounds=0,
        )


_TWICE = 2.0
_MATTERS = 0.005
"""A what-if that saves a smaller part of the step is not worth a word."""
_EFFORT = SearchEffort(max_runs=60, max_actions=10_000)
"""For the order of work of each what-if."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The same plan, were one thing otherwise."""

    change: str
    kind: str
    """`link`, `line` (a site's uplink or downlink), `latency`, `more devices`, `faster devices` or `memory`."""
    step_s: float
    times_as_fast: float


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """How a stage spends the step; the mean over its devices."""

    devices: tuple[str, ...]
    busy_ratio: float
    gradient_sum_s: float
    held_by_memory: bool
    """Whether an in-flight limit is under what its samples would fill."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
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
    bound_s = step_bound_s(plan, costs_of(plan, profile))
    return Explanation(
        step_s=now.step_s,
        bound_s=bound_s,
        limited_by=_limited_by(plan, profile, now, bound_s),
        stages=_stage_loads(plan, profile, now),
        links=link_loads(plan, profile),
        helps=tuple(helps),
        tried=len(tried),
    )


def _simulate(plan: Plan, profile: Profile, speed: Mapping[str, SpeedTrace] | None = None) -> SimulationResult:
    options = SimulationOptions(trace=False, device_speed=speed or {})
    return simulate(plan, costs_of(plan, profile), steps=1, options=options)


def _limited_by(plan: Plan, profile: Profile, now: SimulationResult, bound_s: float) -> str:
    estimate = StepCost(profile, plan.dtype).estimate(plan)
    text = f"{estimate.bound_by}: its work and the way there and back take at least {format_seconds(estimate.bound_s)}"
    if bound_s < now.step_s * (1 - _MATTERS):
        over = 100 * (now.step_s / bound_s - 1)
        text += f"; the order of work takes {over:.1f} % more than the bound of all orders, {format_seconds(bound_s)}"
    return text


def _stage_loads(plan: Plan, profile: Profile, now: SimulationResult) -> tuple[StageLoad, ...]:
    costs = costs_of(plan, profile)
    return tuple(
        StageLoad(
            devices=stage.devices,
            busy_ratio=sum(now.utilisation[name] for name in stage.devices) / len(stage.devices),
            gradient_sum_s=costs.gradient_sum_s(index),
            held_by_memory=any(
                replica.in_flight_limit < sum(span.size for span in stage.replica_spans(number))
                for number, replica in enumerate(stage.replicas)
            ),
        )
        for index, stage in enumerate(plan.stages)
    )


def _what_ifs(plan: Plan, profile: Profile) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, the change, and the seconds of a step with it."""
    for kind, change, make in (*_network_changes(plan, profile), *_device_changes(plan, profile)):
        other_plan, other_profile = make()
        ordered = with_best_order(other_plan, other_profile, effort=_EFFORT)
        yield kind, change, _simulate(ordered, other_profile).step_s
    for index, stage in enumerate(plan.stages):
        kinds = sorted({plan.cluster.device_by_name[name].kind for name in stage.devices})
        speed = {replica.devices[0]: SpeedTrace(changes=((0.0, _TWICE),)) for replica in stage.replicas}
        change = f"{' and '.join(kinds)} of stage {index} twice as fast ({_few(stage.devices)})"
        yield "faster devices", change, _simulate(plan, profile, speed).step_s


Change = tuple[str, str, Callable[[], tuple[Plan, Profile]]]


def _network_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield each way between or inside sites with twice the bandwidth, and those between with half the latency.

    And each line of a site that the cluster has with twice the bandwidth.
    """
    used = [site.name for site in plan.cluster.sites if any(_site(plan, name) == site.name for name in plan.devices)]
    for number, a in enumerate(used):
        for b in used[number:]:
            way = f"inside {a}" if a == b else f"{a} <-> {b}"
            for kind, change, factors in (
                ("link", f"twice the bandwidth {way}", (_TWICE, 1.0)),
                ("latency", f"half the latency {way}", (1.0, 1 / _TWICE)),
            ):
                if kind == "link" or a != b:
                    yield (
                        kind,
                        change,
                        partial(_on, plan, partial(with_faster_link, profile, (a, b), *factors)),
                    )
    for name in used if len(used) > 1 else ():
        for line in Line:
            if line_rate(plan.cluster.site_by_name[name], line) is not None:
                wider = partial(with_faster_line, profile, name, line, _TWICE)
                yield "line", f"twice the {line} of {name}", partial(_on, plan, wider)


def _device_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield one more replica like the last of each kind in each stage, and each stage without its memory's limits."""
    for index, stage in enumerate(plan.stages):
        templates = {plan.cluster.device_by_name[r.devices[0]].kind: r for r in stage.replicas if len(r.devices) == 1}
        for kind, template in templates.items():
            change = f"one more {kind} beside {template.devices[0]} in stage {index}"
            yield (
                "more devices",
                change,
                partial(with_more_of, plan, profile, index, template),
            )
        shares = [sum(span.size for span in stage.replica_spans(number)) for number in range(len(stage.replicas))]
        if any(replica.in_flight_limit < share for replica, share in zip(stage.replicas, shares, strict=True)):
            freed = tuple(
                replace(replica, in_flight_limit=max(share, replica.in_flight_limit))
                for replica, share in zip(stage.replicas, shares, strict=True)
            )
            stages = (*plan.stages[:index], replace(stage, replicas=freed), *plan.stages[index + 1 :])
            other = replace(plan, stages=stages, hints=None)
            yield "memory", f"memory for all samples of stage {index}", partial(_on, other, lambda: profile)


def _on(plan: Plan, profile: Callable[[], Profile]) -> tuple[Plan, Profile]:
    return plan, profile()


def _site(plan: Plan, device: str) -> str:
    return plan.cluster.device_by_name[device].site


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
