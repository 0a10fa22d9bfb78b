"""Groups that could each train by themselves: devices by what the network does between them, at any size."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from spantrain.core.cluster import Cluster, Device
from spantrain.core.profile import Profile
from spantrain.planner.groups import ALIKE_RATIO, MESSAGE_BYTES, DeviceGroup, group_devices, seconds_inside

_ALL_PAIRS_UP_TO = 64
"""Devices of a described cluster, up to which the network between all of them is compared."""
_SITES_ONE_BY_ONE = 16
"""Sites of a described cluster, up to which devices stand for them; more are compared as sites."""
_OF_SITE, _OF_HOST = 2, 2
"""How many hosts of a site, and devices of a host, stand for the others: their links are alike."""


def clusters_of(profile: Profile, devices: Sequence[str]) -> tuple[DeviceGroup, ...]:
    """Return the first-level groups of some devices: what an outer optimizer takes for clusters.

    Of many devices of a described cluster a few stand for their sites. A site that falls apart falls into its hosts.
    """
    described = profile.links_described and not profile.links
    if not described or len(devices) <= _ALL_PAIRS_UP_TO:
        return group_devices(profile, devices=devices)
    if len({profile.cluster.device_by_name[name].site for name in devices}) > _SITES_ONE_BY_ONE:
        return _sites_alone(profile.cluster, devices)
    by_host: dict[tuple[str, str], list[Device]] = {}
    for device in (profile.cluster.device_by_name[name] for name in devices):
        by_host.setdefault((device.site, device.host), []).append(device)
    grouped = group_devices(profile, devices=_standing_for_all(by_host))
    found = [_whole(group, by_host, profile) for group in grouped]
    seen = {name for group in found for name in group.devices}
    alone = [[device.name for device in host if device.name not in seen] for host in by_host.values()]
    return (*found, *(DeviceGroup(name=names[0], devices=tuple(names)) for names in alone if names))


def _standing_for_all(by_host: Mapping[tuple[str, str], Sequence[Device]]) -> tuple[str, ...]:
    """Return the first devices of the first hosts of each site."""
    hosts: dict[str, int] = {}
    found: list[str] = []
    for (site, _), devices in by_host.items():
        hosts[site] = hosts.get(site, 0) + 1
        if hosts[site] <= _OF_SITE:
            found += [device.name for device in devices[:_OF_HOST]]
    return tuple(found)


def _whole(group: DeviceGroup, by_host: Mapping[tuple[str, str], Sequence[Device]], profile: Profile) -> DeviceGroup:
    """Return a group of devices that stand for others with those: all of a site, or only of the hosts in it."""
    own = {profile.cluster.device_by_name[name].host for name in group.devices}
    standing: dict[str, set[str]] = {}
    for site, host in by_host:
        if len(standing.setdefault(site, set())) < _OF_SITE:
            standing[site].add(host)
    devices = [
        device.name
        for (site, host), found in by_host.items()
        if host in own or standing[site] <= own
        for device in found
    ]
    return DeviceGroup(name=group.name, devices=tuple(devices))


def _sites_alone(cluster: Cluster, devices: Sequence[str]) -> tuple[DeviceGroup, ...]:
    """Return groups of whole sites: those are together that are joined about as fast as both are inside."""
    at: dict[str, list[str]] = {}
    for name in devices:
        at.setdefault(cluster.device_by_name[name].site, []).append(name)
    used_to = {site: seconds_inside(cluster.site_by_name[site]) for site in at}
    leads = {site: site for site in at}
    for a, b in combinations(at, 2):
        ways = (cluster.link_between(a, b), cluster.link_between(b, a))
        seconds = sum(way.latency_s + MESSAGE_BYTES / way.bandwidth_bytes_per_s for way in ways) / 2
        if seconds <= ALIKE_RATIO * min(used_to[a], used_to[b]) and leads[a] != leads[b]:
            leads = {site: leads[a] if lead == leads[b] else lead for site, lead in leads.items()}
    rows: dict[str, list[str]] = {}
    for site, lead in leads.items():
        rows.setdefault(lead, []).append(site)
    return tuple(
        DeviceGroup(name="+".join(sites), devices=tuple(name for site in sites for name in at[site]))
        for sites in rows.values()
    )


def looks_of(cluster: Cluster, devices: Sequence[str]) -> tuple[object, ...]:
    """Return what tells some devices from others but their names: kinds, hosts, the networks of their sites.

    Devices of several sites look like no others.
    """
    own = [cluster.device_by_name[name] for name in devices]
    hosts = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in own))}
    sites = {device.site for device in own}
    rows = tuple((*device.make, hosts[device.host]) for device in own)
    if len(sites) > 1:
        return (*sorted(sites), *rows)
    site = cluster.site_by_name[own[0].site]
    return (site.bandwidth_bytes_per_s, site.latency_s, *rows)
