"""Which groups an outer optimizer should join, who serves it, and how long an exchange takes.

Groups are the first-level ones of `planner.groups`: two sites with a fast link between them are one, a site whose
network is slow inside is several.

After DiLoCo (Douillard et al., 2023): each group takes H inner steps by itself, then the mean of their
pseudo-gradients is an outer step. Kept: the round, and that all parameters go there and back once in it. Not kept: any
claim on how many samples such training needs. Parameters travel as float32, up to the server all at once and down
again; the server is the group's leader that makes this shortest. Groups get parts of the global batch by their speed,
so that their inner steps end together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from spantrain.core.cluster import Device
from spantrain.core.profile import Profile
from spantrain.core.span import apportion
from spantrain.cost.network import NetworkCost
from spantrain.planner.groups import Group, group_devices

_ALL_SETS_UP_TO = 8
_ALL_PAIRS_UP_TO = 64
"""Devices of a described cluster, up to which the network between all of them is compared."""
_OF_SITE, _OF_HOST = 2, 2
"""Of more, so many hosts of a site, and devices of a host, stand for the others: their links are alike."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The way between two first-level groups, in its slower direction, as their first devices have it."""

    groups: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange at the end of a round."""

    server: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Groups that train by themselves, with their parts of the global batch."""

    samples: Mapping[str, int]
    """By group."""
    exchange: Exchange
    samples_per_s: float
    """If a group's speed were the same for its part as for the whole global batch."""


def clusters_of(profile: Profile, devices: Sequence[str]) -> tuple[Group, ...]:
    """Return the first-level groups of some devices: what an outer optimizer takes for clusters.

    Of many devices of a described cluster a few stand for their sites. A site that falls apart falls into its hosts.
    """
    described = profile.links_described and not profile.links
    if not described or len(devices) <= _ALL_PAIRS_UP_TO:
        return group_devices(profile, devices=devices).first_level
    by_host: dict[tuple[str, str], list[Device]] = {}
    for device in (profile.cluster.device_by_name[name] for name in devices):
        by_host.setdefault((device.site, device.host), []).append(device)
    grouped = group_devices(profile, devices=_standing_for_all(by_host)).first_level
    found = [_whole(group, by_host, profile) for group in grouped]
    seen = {name for group in found for name in group.devices}
    alone = [[device.name for device in host if device.name not in seen] for host in by_host.values()]
    return (*found, *(Group(name=names[0], devices=tuple(names)) for names in alone if names))


def _standing_for_all(by_host: Mapping[tuple[str, str], Sequence[Device]]) -> tuple[str, ...]:
    """Return the first devices of the first hosts of each site."""
    hosts: dict[str, int] = {}
    found: list[str] = []
    for (site, _), devices in by_host.items():
        hosts[site] = hosts.get(site, 0) + 1
        if hosts[site] <= _OF_SITE:
            found += [device.name for device in devices[:_OF_HOST]]
    return tuple(found)


def _whole(group: Group, by_host: Mapping[tuple[str, str], Sequence[Device]], profile: Profile) -> Group:
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
    return Group(name=group.name, devices=tuple(devices))


def boundary_between(network: NetworkCost, a: Group, b: Group) -> Boundary:
    """Return the way between two groups.

    Raises:
        ProfileError: it was not measured.
    """
    ways = [network.link(a.devices[0], b.devices[0]), network.link(b.devices[0], a.devices[0])]
    slower = min(ways, key=lambda way: way.bandwidth_bytes_per_s)
    return Boundary(
        groups=(a.name, b.name), bandwidth_bytes_per_s=slower.bandwidth_bytes_per_s, latency_s=slower.latency_s
    )


def exchange_of(network: NetworkCost, leaders: Sequence[str], parameter_bytes: int) -> Exchange:
    """Return the quickest exchange between leaders of groups, one of which serves.

    Raises:
        ProfileError: a link between two of them was not measured.
    """
    found = []
    for server in leaders:
        up = [(leader, server) for leader in leaders if leader != server]
        down = [(server, leader) for leader, _ in up]
        seconds = sum(
            max(network.latency_s(*pair) + busy_s for pair, busy_s in zip(pairs, busy, strict=True))
            for pairs in (up, down)
            for busy in (network.busy_together_s(pairs, parameter_bytes),)
        )
        found.append(Exchange(server=server, seconds=seconds))
    return min(found, key=lambda exchange: exchange.seconds)


def best_join(
    network: NetworkCost,
    speeds: Mapping[str, float],
    leaders: Mapping[str, str],
    parameter_bytes: int,
    global_batch: int,
    inner_steps: int,
) -> Joined | None:
    """Return the groups (two at least) that do most samples a second; None if no two can share the global batch.

    `speeds` are samples per second by group, `leaders` a device of each that speaks for it. Of many groups, only the
    fastest ones of each number are tried.
    """
    names = sorted(speeds, key=lambda name: -speeds[name])
    if len(names) <= _ALL_SETS_UP_TO:
        sets = [chosen for count in range(2, len(names) + 1) for chosen in combinations(names, count)]
    else:
        sets = [tuple(names[:count]) for count in range(2, len(names) + 1)]
    found = []
    for chosen in sets:
        samples = apportion(global_batch, [speeds[name] for name in chosen])
        if min(samples) == 0:
            continue
        exchange = exchange_of(network, [leaders[name] for name in chosen], parameter_bytes)
        step_s = max(count / speeds[name] for name, count in zip(chosen, samples, strict=True))
        rate = inner_steps * global_batch / (inner_steps * step_s + exchange.seconds)
        joined = Joined(samples=dict(zip(chosen, samples, strict=True)), exchange=exchange, samples_per_s=rate)
        found.append(joined)
    return max(found, key=lambda joined: joined.samples_per_s, default=None)
