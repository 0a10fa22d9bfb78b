"""First- and second-level groups of devices (SpanTrain, English paper, section 3.2.2), by network and by make."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, permutations
from typing import TypeVar

from spantrain.core.cluster import Site
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.core.records import Record

_T = TypeVar("_T")
Members = tuple[str, ...]
Distance = Callable[[Members, Members], float]
MayMerge = Callable[[Members, Members, float], bool]
_ALL_ORDERS_UP_TO = 3
_SAME = 1e-12
MESSAGE_BYTES = 2**20
"""Of the message by whose seconds networks are compared."""
ALIKE_RATIO = 1.25
"""How many times as slow a network, or as fast a device, counts as alike: over what noise of ±10 % makes, 1.1 / 0.9."""


class DeviceGroup(Record):
    """Devices that belong together; `subgroups` are its second-level groups (empty inside those)."""

    name: str
    devices: tuple[str, ...]
    subgroups: tuple["DeviceGroup", ...] = ()


def message_seconds(profile: Profile, devices: Sequence[str] | None = None) -> dict[tuple[str, str], float]:
    """Return the network metric of every measured pair, or those of some devices: seconds of `MESSAGE_BYTES`.

    Latency plus size over bandwidth, the mean of both directions, under both orders of the pair. (The paper's
    p_t = α + β/m mixes the symbols of its payloads; this is what it is taken to mean.)
    """
    if devices is None or len(devices) == len(profile.cluster.devices):
        links = profile.link_by_pair
    else:  # of a large cluster that is described, no other links are made for their sake
        some = {pair: profile.link(*pair) for pair in permutations(devices, 2)}
        links = {pair: link for pair, link in some.items() if link is not None}
    one_way = {pair: link.latency_s + MESSAGE_BYTES / link.bandwidth_bytes_per_s for pair, link in links.items()}
    return {(a, b): (seconds + one_way.get((b, a), seconds)) / 2 for (a, b), seconds in one_way.items()}


def group_devices(profile: Profile, *, devices: Sequence[str] | None = None) -> tuple[DeviceGroup, ...]:
    """Group devices by network, and inside each group by kind and memory, the fastest first.

    Agglomeration: every device begins alone, the nearest pair of groups is taken from a heap and merged if it may be,
    means are updated. What comes out does not depend on the order of devices.

    First level, by the mean time of a message, inside sites: the way between two groups may take `ALIKE_RATIO` times
    what the slower-connected of them is used to, which is the mean between its hosts; for one host, its nearest path.
    So a site that is slow inside falls apart. Then what came of the sites, by the same ratio of what the
    better-connected of two is used to: sites whose link is as good as their inside (edge and end at 1 Gbit/s and small
    latency, as in the Chinese paper's table 1) merge, to the network they are one place; and no slow site is drawn
    into a fast one. A host that has its site for itself is used to what the site's network is said to be, since a way
    to elsewhere is all that can be measured of it.

    Noise of ±10 % parts nothing that is alike and joins nothing that takes 1.53 times as long, whatever it does.

    Second level: devices of one kind and memory. The paper clusters scores; here times are those of kinds, so that
    scores which differ among devices of one kind tell nothing apart that is planned with.
    """
    names = tuple(devices) if devices is not None else tuple(d.name for d in profile.cluster.devices)
    return group_levels(profile, names, most=0)[0]


def group_levels(profile: Profile, devices: Members, *, most: int) -> tuple[tuple[DeviceGroup, ...], ...]:
    """Return the first-level groups, then other divisions of the same network into at most so many groups.

    These are the pieces of sites, and what comes of joining the nearest two of them, again and again, down to two.
    """
    distance, in_site, across = _network_rules(profile, devices)
    pieces = _site_pieces(profile, devices, distance, in_site)
    first = _last(_merges(pieces, distance, across))
    others = (row for row in _merges(pieces, distance, lambda *_: True) if 1 < len(row) <= most)
    found = dict.fromkeys(map(tuple, (first, *others)))
    return tuple(_groups_of(profile, devices, parts) for parts in found)


def _merges(parts: Iterable[Members], distance: Distance, may_merge: MayMerge) -> Iterator[list[Members]]:
    """Agglomerate, nearest pair first, from a heap whose stale entries are skipped; yield the parts as they change."""
    alive = set(parts)
    yield sorted(alive)
    heap = [(distance(a, b), a, b) for a, b in combinations(sorted(alive), 2)]
    heapq.heapify(heap)
    while heap:
        value, a, b = heapq.heappop(heap)
        if a not in alive or b not in alive or not may_merge(a, b, value):
            continue
        alive -= {a, b}
        merged = tuple(sorted(a + b))
        for other in alive:
            heapq.heappush(heap, (distance(merged, other), merged, other))
        alive.add(merged)
        yield sorted(alive)


def _last(rows: Iterable[list[Members]]) -> list[Members]:
    *_, last = rows
    return last


def _groups_of(profile: Profile, names: Members, parts: Iterable[Members]) -> tuple[DeviceGroup, ...]:
    """Return groups, and their members, in the order of names."""
    order = {name: index for index, name in enumerate(names)}
    found = [tuple(sorted(part, key=order.__getitem__)) for part in parts]
    found.sort(key=lambda part: order[part[0]])
    return tuple(map(partial(_with_subgroups, profile), _names_of(profile, found), found))


def _site_pieces(profile: Profile, names: Members, distance: Distance, in_site: MayMerge) -> list[Members]:
    """Return the parts into which sites fall by their own network: most often one each."""
    at: dict[str, list[Members]] = {}
    for name in names:
        at.setdefault(profile.cluster.device_by_name[name].site, []).append((name,))
    return [part for own in at.values() for part in _last(_merges(own, distance, in_site))]


def _network_rules(profile: Profile, names: Members) -> tuple[Distance, MayMerge, MayMerge]:
    """Return how far groups are from each other, and whether they may merge inside a site and across sites."""
    metric = message_seconds(profile, names)
    device = profile.cluster.device_by_name
    alone = _used_to_alone(profile, names, metric)

    def distance(a: Members, b: Members) -> float:
        return _mean([metric.get((x, y), float("inf")) for x in a for y in b])

    def used_to(members: Members) -> float:
        pairs = [pair for pair in combinations(members, 2) if device[pair[0]].host != device[pair[1]].host]
        inner = [metric[pair] for pair in pairs if pair in metric]
        return _mean(inner) if inner else max(alone[name] for name in members)

    def in_site(a: Members, b: Members, value: float) -> bool:
        return value <= ALIKE_RATIO * max(used_to(a), used_to(b)) + _SAME

    def across(a: Members, b: Members, value: float) -> bool:
        return value <= ALIKE_RATIO * min(used_to(a), used_to(b)) + _SAME

    return distance, in_site, across


def _used_to_alone(profile: Profile, names: Members, metric: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return what the host of each device is used to by itself, in seconds of a message."""
    own = [profile.cluster.device_by_name[name] for name in names]
    hosts = Counter(site for site, _ in {(device.site, device.host) for device in own})
    found = {}
    for one in own:
        to = [
            (other.host == one.host, metric[one.name, other.name]) for other in own if (one.name, other.name) in metric
        ]
        nearest = min((seconds for same_host, seconds in to if not same_host), default=0.0)
        if hosts[one.site] == 1:
            nearest = min(nearest, seconds_inside(profile.cluster.site_by_name[one.site]))
        found[one.name] = max([nearest, *(seconds for same_host, seconds in to if same_host)])
    return found


def seconds_inside(site: Site) -> float:
    """Return the seconds of a message between two hosts of a site, as it is described."""
    return site.latency_s + MESSAGE_BYTES / site.bandwidth_bytes_per_s


def _names_of(profile: Profile, groups: Sequence[Members]) -> Iterator[str]:
    """Yield the sites of each group; groups of a site that came out in several pieces are numbered."""
    device = profile.cluster.device_by_name
    names = ["+".join(dict.fromkeys(device[name].site for name in members)) for members in groups]
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield f"{name}#{seen[name]}" if names.count(name) > 1 else name


def _with_subgroups(profile: Profile, name: str, members: Members) -> DeviceGroup:
    by_make: dict[tuple[str, int, str], list[str]] = {}
    for device in members:
        by_make.setdefault(profile.cluster.device_by_name[device].make, []).append(device)
    score = profile.score_by_device
    parts = sorted(by_make.values(), key=lambda part: -_mean([score.get(device, 1.0) for device in part]))
    return DeviceGroup(
        name=name,
        devices=members,
        subgroups=tuple(DeviceGroup(name=f"{name}.{index}", devices=tuple(part)) for index, part in enumerate(parts)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def orders_to_try(
    items: Sequence[_T], distance: Callable[[_T, _T], float], *, all_up_to: int
) -> tuple[tuple[_T, ...], ...]:
    """Return orders of groups or sites: every permutation of every non-empty subset of so many.

    Of more: from every one, the chain that goes on to the nearest that is not yet in it, cut at every length, in both
    directions.
    """
    if len(items) <= all_up_to:
        return tuple(order for count in range(1, len(items) + 1) for order in permutations(items, count))
    found: dict[tuple[_T, ...], None] = {}
    for start in items:
        chain, rest = [start], [item for item in items if item != start]
        while rest:
            chain.append(min(rest, key=partial(distance, chain[-1])))
            rest.remove(chain[-1])
        for count in range(1, len(chain) + 1):
            found |= dict.fromkeys((tuple(chain[:count]), tuple(reversed(chain[:count]))))
    return tuple(found)


def few_orders(items: Sequence[_T], by: Callable[[_T], float] | None = None) -> Iterable[tuple[_T, ...]]:
    """Return all orders of up to three; of more, as they come, or by a figure of each, and reversed.

    >>> list(few_orders("ab")), list(few_orders("abcd"))
    ([('a', 'b'), ('b', 'a')], [('a', 'b', 'c', 'd'), ('d', 'c', 'b', 'a')])
    """
    if len(items) <= _ALL_ORDERS_UP_TO:
        return permutations(items)
    order = tuple(items if by is None else sorted(items, key=by))
    return order, order[::-1]


def tree_lines(groups: Sequence[DeviceGroup], profile: Profile) -> list[str]:
    """Return the tree of groups: first level, second level, devices, with the metrics that grouped them."""
    metric = message_seconds(profile)
    lines = [f"{profile.cluster.name}: {format_bytes(MESSAGE_BYTES)} message, one way, mean of both directions"]
    for index, group in enumerate(groups):
        last = index == len(groups) - 1
        inside = [metric[a, b] for a in group.devices for b in group.devices if (a, b) in metric]
        note = f"inside {format_seconds(sum(inside) / len(inside))}" if inside else "one device"
        lines.append(f"{'└──' if last else '├──'} {group.name}: {note}{_distances(group, groups, metric)}")
        lines += [("    " if last else "│   ") + line for line in _subgroup_lines(group, profile)]
    return lines


def _distances(group: DeviceGroup, groups: Sequence[DeviceGroup], metric: dict[tuple[str, str], float]) -> str:
    parts = []
    for other in groups:
        between = [metric[a, b] for a in group.devices for b in other.devices if (a, b) in metric]
        if other is not group and between:
            parts.append(f"to {other.name} {format_seconds(sum(between) / len(between))}")
    return "".join(f", {part}" for part in parts)


def _subgroup_lines(group: DeviceGroup, profile: Profile) -> list[str]:
    lines = []
    for index, subgroup in enumerate(group.subgroups):
        last = index == len(group.subgroups) - 1
        lines.append(f"{'└──' if last else '├──'} {subgroup.name}")
        indent = "    " if last else "│   "
        for number, name in enumerate(subgroup.devices):
            device = profile.cluster.device_by_name[name]
            branch = "└──" if number == len(subgroup.devices) - 1 else "├──"
            score = profile.score_by_device.get(name)
            text = f"score {score:.3g}" if score is not None else "no score"
            lines.append(f"{indent}{branch} {name}: {device.kind}, {text}, {format_bytes(device.memory_bytes)}")
    return lines
