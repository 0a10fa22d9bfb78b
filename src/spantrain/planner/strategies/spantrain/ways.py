"""Ways to set up a first-level group: what `spantrain` may do inside one (SpanTrain, English paper, section 3.3.3).

A way is a pipeline of slots (stages to be); a slot has members (replicas to be), a member is a device or a
tensor-parallel group. Inside a second-level group, whose devices are alike, everything is symmetric: p slots, each of d
members of t devices. Between second-level groups there are the paper's three:

- asymmetric pipeline (figure 7a): a second-level group after the other, cuts by capacity;
- asymmetric data parallelism (figure 7b): second-level groups of one device share a slot, samples by capacity;
- asymmetric tensors and data (figure 7c): unlike devices as a grid, rows divide samples, columns tensors. Every row
  has the same tensor shares, its columns' capacities, so that the k-th members of all rows hold the same parameters;
  capacities of 1:2:2:4 on a 2 x 2 grid give 1:2 in both directions.

All of these of the whole group, without its slowest second-level groups, with one device of the slowest that is left,
of one host and of some hosts: where links are slow, fewer devices may be faster, and the paper's planner, which uses
all, is given that choice.

`Beam` is algorithm 1 (the same section), over orders of first-level groups and their cuts.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.planner.assembly.assemble import ReplicaDevices
from spantrain.planner.groups import ALIKE_RATIO, DeviceGroup, few_orders

_MAX_TENSOR_DEVICES = 8
_MAX_COMBINED = 32
"""Ways of one order of second-level groups."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A stage to be."""

    members: tuple[ReplicaDevices, ...]
    even: bool
    """Whether samples are divided equally; otherwise by capacity."""

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices of its members."""
        return tuple(name for member in self.members for name in member.devices)


Way = tuple[Slot, ...]
Devices = tuple[str, ...]
Capacity = Callable[[str], float]
"""A device's steps per second, by name, if it held the whole model."""


def symmetric_ways(devices: Devices, *, pipelines: bool, tensors: bool) -> tuple[Way, ...]:
    """Return the grids of p slots of d members of t devices, d largest first; neighbours are in a tensor group."""
    found = []
    for slots in _divisors(len(devices)) if pipelines else (1,):
        each = len(devices) // slots
        for degree in _divisors(each) if tensors else (1,):
            if degree <= _MAX_TENSOR_DEVICES:
                parts, shares = _chunks(devices, each), (1.0,) * degree
                rows = (tuple(ReplicaDevices(chunk, shares) for chunk in _chunks(part, degree)) for part in parts)
                found.append(tuple(Slot(members=row, even=True) for row in rows))
    return tuple(found)


def ways_of(
    group: DeviceGroup, profile: Profile, capacity: Capacity, *, second_level: bool = True, tensors: bool = True
) -> tuple[Way, ...]:
    """Return the ways to try for a first-level group, each once, those of all devices first.

    Args:
        group: the group, with its second-level groups, fastest first.
        profile: where hosts are read from.
        capacity: of a device.
        second_level: False: no second-level groups, every set of devices is one slot, divided evenly.
        tensors: whether the model can be divided.
    """
    found: dict[Way, None] = {}
    for parts in _device_sets(group, profile):
        devices = tuple(name for name in group.devices if any(name in part for part in parts))
        if not second_level:
            found |= dict.fromkeys(symmetric_ways(devices, pipelines=False, tensors=tensors))
            continue
        if len(parts) == 1:
            found |= dict.fromkeys(symmetric_ways(devices, pipelines=True, tensors=tensors))
            continue
        for rows in _rows_of_parts(parts, capacity, tensors=tensors):
            found |= dict.fromkeys(rows)
    return tuple(found)


def _rows_of_parts(parts: Sequence[Devices], capacity: Capacity, *, tensors: bool) -> Iterator[Iterable[Way]]:
    """Yield the ways of several second-level groups together."""
    alone = [symmetric_ways(part, pipelines=True, tensors=tensors) for part in parts]
    yield from map(_joined, few_orders(alone))
    pool = tuple(name for part in parts for name in part)
    yield _pooled_ways(pool, capacity, tensors=tensors)
    if max(map(capacity, pool)) <= ALIKE_RATIO * min(map(capacity, pool)):
        yield symmetric_ways(pool, pipelines=True, tensors=tensors)
    weak = tuple(name for part in parts if len(part) == 1 for name in part)
    if 1 < len(weak) < len(pool):
        large = [ways for part, ways in zip(parts, alone, strict=True) if len(part) > 1]
        yield from map(_joined, few_orders([*large, _pooled_ways(weak, capacity, tensors=tensors)]))


def _joined(choices: Sequence[Sequence[Way]]) -> Iterator[Way]:
    """Yield all ways to go through these in order; of the longest lists only the first ones if that were many."""
    lists = [list(choice) for choice in choices]
    while math.prod(len(entries) for entries in lists) > _MAX_COMBINED:
        max(lists, key=len).pop()
    for ways in product(*lists):
        yield tuple(slot for way in ways for slot in way)


def _pooled_ways(devices: Devices, capacity: Capacity, *, tensors: bool) -> tuple[Way, ...]:
    """Return the ways of unlike devices as one slot: by samples, and as grids by samples and tensors."""
    falling = sorted(devices, key=capacity, reverse=True)
    found = []
    for columns in _divisors(len(falling)) if tensors else (1,):
        if columns > _MAX_TENSOR_DEVICES:
            continue
        rows = _chunks(tuple(falling), columns)
        shares = [sum(capacity(row[column]) for row in rows) for column in range(columns)]
        shares = [round(share / shares[-1], 2) for share in shares]
        members = tuple(ReplicaDevices(devices=row, tp_shares=tuple(shares)) for row in rows)
        found.append((Slot(members=members, even=False),))
    return tuple(found)


def _device_sets(group: DeviceGroup, profile: Profile) -> Iterator[tuple[Devices, ...]]:
    """Yield sets of devices, each as its second-level groups."""
    parts = tuple(part.devices for part in group.subgroups) or (group.devices,)
    for count in range(len(parts), 0, -1):
        yield parts[:count]
        yield (*parts[: count - 1], parts[count - 1][:1])
    host = {name: profile.cluster.device_by_name[name].host for name in group.devices}
    hosts, seen = list(dict.fromkeys(host.values())), set()
    some = [set(hosts[:count]) for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if count < len(hosts)]
    for names in (*({name} for name in hosts), *some):
        own = tuple(tuple(device for device in part if host[device] in names) for part in parts)
        signature = tuple(map(len, own))
        if sum(signature) > 1 and signature not in seen:
            seen.add(signature)
            yield tuple(part for part in own if part)


def _chunks(devices: Devices, size: int) -> tuple[Devices, ...]:
    return tuple(devices[at : at + size] for at in range(0, len(devices), size))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(part for part in range(1, number + 1) if number % part == 0)


Arrangement = tuple[tuple[int, int], ...]
"""First-level groups in the pipeline's order, by number, each with how many units it has; with none it is left out."""

_WIDTH = 8
"""The paper's l."""
_MAX_ROUNDS = 40
"""The paper's max_iter."""
_ALL_SWAPS_UP_TO = 5
_STEPS = (1, 4)
"""Units that are moved over a cut at once; besides, all that there are."""


class Beam(Record):
    """Keeps the best arrangements, and changes them until none of the changes is kept.

    Kept of the paper: random orders with cuts by capacity to start from, reordering and moving units between neighbours
    as changes, and a store of all results. A group may lose all its units to a neighbour, and get some again.
    """

    units: int
    capacities: Sequence[float]
    """Steps per second of each first-level group if it held the whole model."""
    work: Sequence[float]
    """Work of each unit; any scale."""

    def run(self, value_s: Callable[[Arrangement], float]) -> list[tuple[float, Arrangement]]:
        """Return the best arrangements, by rising seconds; what cannot be done is over by a lot, by how far it is."""
        known: dict[Arrangement, float] = {}
        kept: list[Arrangement] = list(dict.fromkeys(self._starts()))
        for _ in range(_MAX_ROUNDS):
            tried = dict.fromkeys((*kept, *(other for entry in kept for other in self._changed(entry))))
            for entry in tried:
                if entry not in known:
                    known[entry] = value_s(entry)
            best = sorted(tried, key=lambda entry: (known[entry], entry))[:_WIDTH]
            if best == kept:
                break
            kept = best
        return [(known[entry], entry) for entry in kept]

    def _starts(self) -> Iterator[Arrangement]:
        groups = list(range(len(self.capacities)))
        chooser = random.Random(0)
        for _ in range(_WIDTH):
            order = chooser.sample(groups, len(groups))
            yield tuple(zip(order, self._by_capacity(order), strict=True))

    def _by_capacity(self, order: Sequence[int]) -> list[int]:
        """Return how many units each group gets so that its work is in proportion to its capacity."""
        total, scale = sum(self.capacities[group] for group in order), sum(self.work) or 1.0
        counts, reached, unit, done = [], 0.0, 0, 0.0
        for group in order:
            reached += self.capacities[group] / total
            first = unit
            while unit < self.units and (done + self.work[unit] / 2) / scale <= reached:
                done += self.work[unit]
                unit += 1
            counts.append(unit - first)
        counts[-1] += self.units - unit
        return counts

    def _changed(self, entry: Arrangement) -> Iterator[Arrangement]:
        positions = range(len(entry))
        near = pairwise(positions)
        for a, b in combinations(positions, 2) if len(entry) <= _ALL_SWAPS_UP_TO else near:
            swapped = list(entry)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield tuple(swapped)
        for a in positions[:-1]:
            for source, target in ((a, a + 1), (a + 1, a)):
                have = entry[source][1]
                for count in {*(step for step in _STEPS if step <= have), have} - {0}:
                    moved = list(entry)
                    moved[source] = (entry[source][0], have - count)
                    moved[target] = (entry[target][0], entry[target][1] + count)
                    yield tuple(moved)
