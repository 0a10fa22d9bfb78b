"""Profiles and plans with one thing changed: a faster link, a wider line of a site, one more device."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from spantrain.core.cluster import Cluster, Device, Site
from spantrain.core.plan import Plan, Replica
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.cost.network import SAME_RATIO


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
