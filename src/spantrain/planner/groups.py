"""First- and second-level groups of devices (SpanTrain, English paper, section 3.2.2), from measurements."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import TypeVar

from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.core.quantities import format_bytes, format_seconds

_T = TypeVar("_T")
_ALL_ORDERS_UP_TO = 3
_SAME = 1e-12
MESSAGE_BYTES = 2**20
"""Of the message by whose seconds networks are compared."""
NETWORK_RATIO, _COMPUTE_RATIO = 1.25, 1.2
"""How much slower the way between two groups may be than what they are used to; how much their devices may differ."""
_WAN_LATENCY_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices that belong together; `subgroups` are its second-level groups (empty inside those)."""

    name: str
    devices: tuple[str, ...]
    subgroups: tuple["DeviceGroup", ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """First-level groups, and the message size at which their network was compared."""

    first_level: tuple[DeviceGroup, ...]
    message_bytes: int


def message_seconds(
    profile: Profile, message_bytes: int, devices: Sequence[str] | None = None
) -> dict[tuple[str, str], float]:
    """Return the network metric of every measured pair, or those of some devices: seconds of a message of that size.

    Latency plus size over bandwidth, the mean of both directions, under both orders of the pair. (The paper's
    p_t = α + β/m mixes the symbols of its payloads; this is what it is taken to mean.)
    """
    links = _links(profile, devices)
    one_way = {pair: link.latency_s + message_bytes / link.bandwidth_bytes_per_s for pair, link in links.items()}
    return {(a, b): (seconds + one_way.get((b, a), seconds)) / 2 for (a, b), seconds in one_way.items()}


def _links(profile: Profile, devices: Sequence[str] | None) -> Mapping[tuple[str, str], LinkMeasurement]:
    """Return the links among devices: of a large cluster that is described, no others are made for their sake."""
    if devices is None or len(devices) == len(profile.cluster.devices):
        return profile.link_by_pair
    found = {pair: profile.link(*pair) for pair in permutations(devices, 2)}
    return {pair: link for pair, link in found.items() if link is not None}


def group_devices(profile: Profile, *, devices: Sequence[str] | None = None) -> DeviceGroups:
    """Group devices by network, and inside each group by compute score and memory.

    First level: every device begins alone; the pair of groups with the shortest mean message time is taken from
    a heap and merged if that time is at most `NETWORK_RATIO` times what the slower-connected of the two is used
    to: the mean time between hosts inside a group, or a lone device's nearest path. Means are updated on merging
    and only the top is kept. A lone device whose nearest path has a latency of `_WAN_LATENCY_S` or more is held to
    the fastest path between hosts of the whole cluster, so that two remote devices are not taken for neighbours.

    That ratio lies over what averaged noise of ±10 % does, and under the step from a site to a link with
    half its bandwidth or with milliseconds more. Sites whose link is as good as their inside (edge and end at
    1 Gbit/s and small latency, as in the Chinese paper's table 1) merge: to the network they are one place.

    Second level: the same on the larger of the ratios of score and of memory, up to `_COMPUTE_RATIO`.
    """
    names = tuple(devices) if devices is not None else tuple(d.name for d in profile.cluster.devices)
    first = _merge(names, *_network_rules(profile, names))
    groups = tuple(map(partial(_with_subgroups, profile), _names_of(profile, first), first))
    return DeviceGroups(first_level=groups, message_bytes=MESSAGE_BYTES)


Members = tuple[str, ...]
Distance = Callable[[Members, Members], float]
MayMerge = Callable[[Members, Members, float], bool]


def _merge(names: Members, distance: Distance, may_merge: MayMerge) -> list[Members]:
    """Agglomerate: nearest pair first, from a heap whose stale entries are skipped."""
    order = {name: index for index, name in enumerate(names)}
    alive: set[Members] = {(name,) for name in names}
    heap: list[tuple[float, Members, Members]] = [
        (distance((a,), (b,)), (a,), (b,)) for a in names for b in names if order[a] < order[b]
    ]
    heapq.heapify(heap)
    while heap:
        value, a, b = heapq.heappop(heap)
        if a not in alive or b not in alive or not may_merge(a, b, value):
            continue
        alive -= {a, b}
        merged = tuple(sorted(a + b, key=order.__getitem__))
        for other in sorted(alive, key=lambda members: order[members[0]]):
            heapq.heappush(heap, (distance(merged, other), merged, other))
        alive.add(merged)
    return sorted(alive, key=lambda members: order[members[0]])


def _network_rules(profile: Profile, names: Members) -> tuple[Distance, MayMerge]:
    metric = message_seconds(profile, MESSAGE_BYTES, names)
    used_to = _lone_references(profile, names, metric)
    host = {device.name: device.host for device in profile.cluster.devices}

    def distance(a: Members, b: Members) -> float:
        return _mean([metric.get((x, y), float("inf")) for x in a for y in b])

    def reference(members: Members) -> float:
        inner = [metric[x, y] for x in members for y in members if host[x] != host[y] and (x, y) in metric]
        return _mean(inner) if inner else max(used_to[name] for name in members)

    def may_merge(a: Members, b: Members, value: float) -> bool:
        return value <= NETWORK_RATIO * max(reference(a), reference(b)) + _SAME

    return distance, may_merge


def _lone_references(profile: Profile, names: Members, metric: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return what each device alone is used to: its nearest path, held to the cluster's best if it is far."""
    host = {device.name: device.host for device in profile.cluster.devices}
    links = _links(profile, names)
    pairs = [(a, b) for a in names for b in names if a != b and (a, b) in metric]
    between = [pair for pair in pairs if host[pair[0]] != host[pair[1]]]
    near = [metric[pair] for pair in between if links[pair].latency_s < _WAN_LATENCY_S]
    fastest = min(near, default=0.0)
    found = {}
    for name in names:
        inside = [metric[a, b] for a, b in pairs if a == name and host[a] == host[b]]
        nearest = min((pair for pair in between if pair[0] == name), key=metric.__getitem__, default=None)
        used_to = 0.0 if nearest is None else metric[nearest]
        if nearest is not None and links[nearest].latency_s >= _WAN_LATENCY_S:
            used_to = min(used_to, fastest)
        found[name] = max([used_to, *inside]) if inside else used_to
    return found


def _names_of(profile: Profile, groups: Sequence[Members]) -> Iterator[str]:
    """Yield the sites of each group; groups of a site that came out in several pieces are numbered."""
    device = profile.cluster.device_by_name
    names = ["+".join(dict.fromkeys(device[name].site for name in members)) for members in groups]
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield f"{name}#{seen[name]}" if names.count(name) > 1 else name


def _with_subgroups(profile: Profile, name: str, members: Members) -> DeviceGroup:
    memory = {device.name: float(device.memory_bytes) for device in profile.cluster.devices}

    def distance(a: Members, b: Members) -> float:
        means = ((_mean([table[x] for x in a]), _mean([table[x] for x in b])) for table in (score, memory))
        return max(max(pair) / max(min(pair), 1e-30) for pair in means)

    score = {device: profile.score_by_device.get(device, 1.0) for device in members}
    subgroups = _merge(members, distance, lambda _a, _b, value: value <= _COMPUTE_RATIO + _SAME)
    subgroups.sort(key=lambda part: -_mean([score[device] for device in part]))
    return DeviceGroup(
        name=name,
        devices=members,
        subgroups=tuple(DeviceGroup(name=f"{name}.{index}", devices=part) for index, part in enumerate(subgroups)),
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


def tree_lines(groups: DeviceGroups, profile: Profile) -> list[str]:
    """Return the tree of groups: first level, second level, devices, with the metrics that grouped them."""
    metric = message_seconds(profile, groups.message_bytes)
    lines = [f"{profile.cluster.name}: {format_bytes(groups.message_bytes)} message, one way, mean of both directions"]
    for index, group in enumerate(groups.first_level):
        last = index == len(groups.first_level) - 1
        inside = [metric[a, b] for a in group.devices for b in group.devices if (a, b) in metric]
        note = f"inside {format_seconds(sum(inside) / len(inside))}" if inside else "one device"
        lines.append(f"{'└──' if last else '├──'} {group.name}: {note}{_distances(group, groups, metric)}")
        lines += [("    " if last else "│   ") + line for line in _subgroup_lines(group, profile)]
    return lines


def _distances(group: DeviceGroup, groups: DeviceGroups, metric: dict[tuple[str, str], float]) -> str:
    parts = []
    for other in groups.first_level:
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
