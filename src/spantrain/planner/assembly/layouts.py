"""Ways to set a domain's devices up as slots (future stages), and orders of domains."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

from spantrain.core.profile import Profile
from spantrain.planner.groups import Group, Groups, message_seconds

Slot = tuple[str, ...]
"""Devices that will be the replicas of one stage."""
Layout = tuple[Slot, ...]

_ALL_ORDERS_UP_TO = 5
_ALL_SUBGROUP_ORDERS_UP_TO = 3


def domain_orders(groups: Groups, profile: Profile) -> tuple[tuple[Group, ...], ...]:
    """Return the orders of first-level groups to try: every permutation of every non-empty subset, up to five.

    Beyond five: from every group, the chain that goes on to the nearest group not yet in it, cut at every length,
    in both directions.
    """
    first = groups.first_level
    if len(first) <= _ALL_ORDERS_UP_TO:
        return tuple(order for count in range(1, len(first) + 1) for order in permutations(first, count))
    metric = message_seconds(profile, groups.message_bytes)
    found: dict[tuple[Group, ...], None] = {}
    for start in first:
        chain = [start]
        while len(chain) < len(first):
            rest = [group for group in first if group not in chain]
            here = chain[-1]
            chain.append(min(rest, key=lambda group, here=here: _mean_seconds(here, group, metric)))  # type: ignore[misc]
        for count in range(1, len(chain) + 1):
            found[tuple(chain[:count])] = None
            found[tuple(reversed(chain[:count]))] = None
    return tuple(found)


def _mean_seconds(a: Group, b: Group, metric: dict[tuple[str, str], float]) -> float:
    values = [metric.get((x, y), float("inf")) for x in a.devices for y in b.devices]
    return sum(values) / len(values)


def domain_layouts(group: Group, profile: Profile, exhaustive_up_to: int = 2) -> tuple[Layout, ...]:
    """Return the layouts of a first-level group to try, most devices first, equal ones once.

    Few devices: every way to put every subset of them into ordered slots. Many (Chinese paper, section 2.3): all of
    them, all but the slowest, all but the slowest second-level group, each second-level group, each host and the
    fastest device alone; each as one stage of unequal replicas, a stage for each second-level group, host or
    device, equal chunks, or figure 7(b): lone devices together beside the larger second-level groups.
    """
    few = len(group.devices) <= exhaustive_up_to
    layouts = _all_layouts(group.devices) if few else _chosen_layouts(group, profile)
    distinct: dict[object, Layout] = {}
    for layout in layouts:
        distinct.setdefault(_signature(layout, profile), layout)
    return tuple(sorted(distinct.values(), key=lambda layout: -sum(len(slot) for slot in layout)))


def _all_layouts(devices: Sequence[str]) -> Iterator[Layout]:
    for count in range(len(devices), 0, -1):
        for subset in combinations(devices, count):
            yield from _ordered_partitions(subset)


def _ordered_partitions(devices: tuple[str, ...]) -> Iterator[Layout]:
    if not devices:
        yield ()
        return
    for count in range(len(devices), 0, -1):
        for slot in combinations(devices, count):
            rest = tuple(device for device in devices if device not in slot)
            for tail in _ordered_partitions(rest):
                yield (slot, *tail)


def _chosen_layouts(group: Group, profile: Profile) -> Iterator[Layout]:
    for devices in _device_sets(group, profile):
        keep = set(devices)
        subgroups = [tuple(d for d in part.devices if d in keep) for part in group.subgroups]
        for order in _subgroup_orders([part for part in subgroups if part]):
            yield from _partitions(order, profile)


def _device_sets(group: Group, profile: Profile) -> Iterator[tuple[str, ...]]:
    yield group.devices
    by_speed = sorted(group.devices, key=lambda name: profile.score_by_device.get(name, 0.0))
    yield tuple(device for device in group.devices if device != by_speed[0])
    if len(group.subgroups) > 1:
        slowest = group.subgroups[-1].devices
        yield tuple(device for device in group.devices if device not in slowest)
    for part in group.subgroups:
        yield part.devices
    hosts = _by_host(group.devices, profile)
    if len(hosts) > 1:
        yield from hosts
    yield (by_speed[-1],)


def _subgroup_orders(subgroups: list[Slot]) -> Iterable[tuple[Slot, ...]]:
    if len(subgroups) <= _ALL_SUBGROUP_ORDERS_UP_TO:
        return permutations(subgroups)
    return (tuple(subgroups), tuple(reversed(subgroups)))


def _partitions(subgroups: tuple[Slot, ...], profile: Profile) -> Iterator[Layout]:
    devices = tuple(device for part in subgroups for device in part)
    if not devices:
        return
    yield (devices,)
    yield tuple((device,) for device in devices)
    yield subgroups
    yield tuple(_by_host(devices, profile))
    for count in (2, 3, 4, 6, 8):
        if len(devices) % count == 0:
            size = len(devices) // count
            yield tuple(devices[k * size : (k + 1) * size] for k in range(count))
    lone = tuple(device for part in subgroups if len(part) == 1 for device in part)
    if len(lone) > 1 and len(lone) < len(devices):
        large = tuple(part for part in subgroups if len(part) > 1)
        yield (*large, lone)
        yield (lone, *large)


def _by_host(devices: Sequence[str], profile: Profile) -> list[Slot]:
    hosts: dict[str, list[str]] = {}
    for name in devices:
        hosts.setdefault(profile.cluster.device_by_name[name].host, []).append(name)
    return [tuple(members) for members in hosts.values()]


def _signature(layout: Layout, profile: Profile) -> object:
    """Name kinds and memories, and hosts by first appearance: what tells layouts apart for the cost models."""
    hosts: dict[str, int] = {}
    slots = []
    for slot in layout:
        members = []
        for name in slot:
            device = profile.cluster.device_by_name[name]
            number = hosts.setdefault(device.host, len(hosts))
            members.append((device.kind, device.memory_bytes, device.backend, device.site, number))
        slots.append(tuple(sorted(members)))
    return tuple(slots)
