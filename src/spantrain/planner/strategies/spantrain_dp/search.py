"""Domains, orders, layouts and micro-batch sizes: the candidates, bounded cheaply, solved, best first.

A domain is a first-level group; a layout sets its devices up as slots (future stages).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cache
from itertools import chain, combinations, pairwise, product
from statistics import fmean
from typing import NamedTuple

import numpy as np

from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.cost.span_tables import Array
from spantrain.planner.assembly.assemble import ReplicaDevices, begins_by
from spantrain.planner.groups import DeviceGroup, few_orders, message_seconds, orders_to_try
from spantrain.planner.strategies.spantrain.tables import HopArrays, SlotArrays, WayTables
from spantrain.planner.strategies.spantrain.ways import Slot, Way

Layout = tuple[tuple[str, ...], ...]
"""The devices of each slot, which will be the replicas of one stage."""

_ALL_ORDERS_UP_TO = 5


def domain_orders(groups: Sequence[DeviceGroup], profile: Profile) -> tuple[tuple[DeviceGroup, ...], ...]:
    """Return the orders of first-level groups to try; groups are as near as the mean of their devices."""
    metric = cache(lambda: message_seconds(profile))

    def mean_s(a: DeviceGroup, b: DeviceGroup) -> float:
        return fmean(metric().get(pair, math.inf) for pair in product(a.devices, b.devices))

    return orders_to_try(groups, mean_s, all_up_to=_ALL_ORDERS_UP_TO)


def domain_layouts(group: DeviceGroup, profile: Profile, exhaustive_up_to: int = 2) -> tuple[Layout, ...]:
    """Return the layouts of a first-level group to try, most devices first, equal ones once.

    Few devices: every way to put every subset of them into ordered slots. Many (Chinese paper, section 2.3): all of
    them, all but the slowest, all but the slowest second-level group, each second-level group, each host and the
    fastest device alone; each as one stage of unequal replicas, a stage for each second-level group, host or
    device, equal chunks, or figure 7(b): lone devices together beside the larger second-level groups.
    """
    few = len(group.devices) <= exhaustive_up_to
    subsets = (subset for count in range(len(group.devices), 0, -1) for subset in combinations(group.devices, count))
    layouts = chain.from_iterable(map(_ordered_partitions, subsets)) if few else _chosen_layouts(group, profile)
    distinct: dict[object, Layout] = {}
    for layout in layouts:
        distinct.setdefault(_signature(layout, profile), layout)
    return tuple(sorted(distinct.values(), key=lambda layout: -sum(len(slot) for slot in layout)))


def _ordered_partitions(devices: tuple[str, ...]) -> Iterator[Layout]:
    if not devices:
        yield ()
        return
    for count in range(len(devices), 0, -1):
        for slot in combinations(devices, count):
            rest = tuple(device for device in devices if device not in slot)
            for tail in _ordered_partitions(rest):
                yield (slot, *tail)


def _chosen_layouts(group: DeviceGroup, profile: Profile) -> Iterator[Layout]:
    for devices in _device_sets(group, profile):
        keep = set(devices)
        subgroups = [tuple(d for d in part.devices if d in keep) for part in group.subgroups]
        for order in few_orders([part for part in subgroups if part]):
            yield from _partitions(order, profile)


def _device_sets(group: DeviceGroup, profile: Profile) -> Iterator[tuple[str, ...]]:
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


def _partitions(subgroups: Layout, profile: Profile) -> Iterator[Layout]:
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


def _by_host(devices: Sequence[str], profile: Profile) -> list[tuple[str, ...]]:
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
            members.append((*device.make, device.site, number))
        slots.append(tuple(sorted(members)))
    return tuple(slots)


_CONFIGURATIONS = 6000
_MIN_PER_ORDER = 12
_SOLVED_AT_MOST = 3000
_KEEP_WITHIN = 1.15
_BOUND_SLACK = 0.9
"""The bound adds rates of slots over the whole model; units that suit a kind better can beat it a little."""


class DomainCandidate(Record):
    """Domains in order, their slots, a micro-batch size, and (once solved) where the cuts are."""

    order: tuple[str, ...]
    slots: Way
    size: int
    bound_s: float
    value_s: float = float("inf")
    begins: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in use."""
        return tuple(device for slot in self.slots for device in slot.devices)


class SearchResult(Record):
    """What a search found."""

    solved: tuple[DomainCandidate, ...]
    """Best first."""
    least_bound_s: dict[str, float] = field(default_factory=dict)
    """By device: the smallest bound of any candidate with it."""


class _WayBound(NamedTuple):
    """What slots that follow each other add to a bound, for one micro-batch size."""

    rate: float
    """Steps per second if each held the whole model, memory aside; added up."""
    busy: float
    turn: float


def search(tables: WayTables, groups: Sequence[DeviceGroup]) -> SearchResult:
    """Enumerate the candidates, then solve them by rising bound until the rest cannot be near the best."""
    waiting = sorted(_enumerate(tables, groups), key=lambda candidate: candidate.bound_s)
    least: dict[str, float] = {}
    for candidate in waiting:
        for device in candidate.devices:
            least.setdefault(device, candidate.bound_s)
    solved: list[DomainCandidate] = []
    best = float("inf")
    for candidate in waiting[:_SOLVED_AT_MOST]:
        if candidate.bound_s * _BOUND_SLACK > best * _KEEP_WITHIN:
            break
        done = _solve(tables, candidate)
        if done is not None:
            solved.append(done)
            best = min(best, done.value_s)
    solved.sort(key=lambda candidate: candidate.value_s)
    return SearchResult(solved=tuple(solved), least_bound_s=least)


def _solve(tables: WayTables, candidate: DomainCandidate) -> DomainCandidate | None:
    slots = [tables.slot(slot, candidate.size) for slot in candidate.slots]
    hops = [tables.hop(a, b, candidate.size) for a, b in pairwise(candidate.slots)]
    value_s, begins = best_cuts([slot for slot in slots if slot is not None], hops)
    return None if value_s == float("inf") else replace(candidate, value_s=value_s, begins=begins)


def best_cuts(slots: Sequence[SlotArrays], hops: Sequence[HopArrays]) -> tuple[float, tuple[int, ...]]:
    """Place the cuts so that the paper's objective is least, exactly (Chinese paper, section 2.2 and figure 6).

    The objective is equation 1 with the critical slot c found by the maximum: everything that a micro-batch passes
    before c, on the way up (equation 2) and down (equation 4), plus the run and weight sync of c (equations 3, 5);
    a link that is busier than any slot rules in the same way. It nests, so that one value per (slot, unit) is
    enough: V_k(i) = min over j of max(run_k(i,j), turn_k(i,j) + hop_k(j) + max(V_k+1(j), busy_k(j))).

    Returns the seconds (infinite if nothing fits) and the unit in front of which each slot begins, then the end.
    """
    units = slots[0].run.shape[0] - 1
    value: Array = (slots[-1].run + slots[-1].sums)[:, units]
    choices: list[np.ndarray] = []
    for slot, hop in zip(reversed(slots[:-1]), reversed(hops), strict=True):
        beyond = hop.turn + np.maximum(value, hop.busy)
        table = np.maximum(slot.run + slot.sums, slot.turn + beyond[None, :])
        choice = table.argmin(axis=1)
        value = table[np.arange(units + 1), choice]
        choices.append(choice)
    return float(value[0]), begins_by(choices, units)


def _enumerate(tables: WayTables, groups: Sequence[DeviceGroup]) -> Iterator[DomainCandidate]:
    orders = domain_orders(groups, tables.profile)
    alone = {group.name: _ways(domain_layouts(group, tables.profile, 4)) for group in groups}
    among = {group.name: _ways(domain_layouts(group, tables.profile, 2)) for group in groups}
    allowance = max(_CONFIGURATIONS // len(orders), _MIN_PER_ORDER)
    bounds = _WayBounds(tables)
    for order in orders:
        choices = [alone[order[0].name]] if len(order) == 1 else _trimmed([among[g.name] for g in order], allowance)
        names = tuple(group.name for group in order)
        for ways in product(*choices):
            slots = tuple(slot for way in ways for slot in way)
            for size in tables.job.micro_batch_sizes() if len(slots) <= tables.units else ():
                bound_s = bounds.of(ways, size)
                if bound_s is not None:
                    yield DomainCandidate(order=names, slots=slots, size=size, bound_s=bound_s)


def _ways(layouts: Sequence[Layout]) -> tuple[Way, ...]:
    """Return layouts with every device as a replica by itself, the samples of a slot by capacity."""

    @cache
    def slot(devices: tuple[str, ...]) -> Slot:
        return Slot(members=tuple(ReplicaDevices((name,), (1.0,)) for name in devices), even=False)

    return tuple(tuple(map(slot, layout)) for layout in layouts)


def _trimmed(choices: list[tuple[Way, ...]], allowance: int) -> list[tuple[Way, ...]]:
    """Shorten the longest lists (their ends: fewest devices) until the product is within the allowance."""
    while math.prod(map(len, choices)) > allowance and max(map(len, choices)) > 1:
        longest = max(range(len(choices)), key=lambda index: len(choices[index]))
        choices[longest] = choices[longest][:-1]
    return choices


class _WayBounds:
    """What no cuts of ways that follow each other can be much under."""

    def __init__(self, tables: WayTables) -> None:
        self._tables = tables
        self._of_way, self._rate, self._hop = cache(self._of_way_alone), cache(self._rate_of), cache(self._hop_of)

    def of(self, ways: Sequence[Way], size: int) -> float | None:
        """Return the seconds for micro-batches of a size; None where a device would get no sample."""
        parts = [part for way in ways if (part := self._of_way(way, size)) is not None]
        if len(parts) < len(ways):
            return None
        parts += [self._hop(a[-1], b[0], size) for a, b in pairwise(ways)]
        return max(1 / sum(p.rate for p in parts), *(p.busy for p in parts)) + sum(p.turn for p in parts)

    def _of_way_alone(self, way: Way, size: int) -> _WayBound | None:
        rates = [self._rate(slot, size) for slot in way]
        if min(rates) == 0:
            return None
        hops = [self._hop(a, b, size) for a, b in pairwise(way)]
        return _WayBound(sum(rates), max((hop.busy for hop in hops), default=0.0), sum(hop.turn for hop in hops))

    def _rate_of(self, slot: Slot, size: int) -> float:
        """Return the steps per second of a slot that holds the whole model; 0 if a device would get no sample."""
        units = range(self._tables.units)
        counts = self._tables.counts(slot, units, size)
        slowest_s = max(self._tables.seconds(one, units, n) for one, n in zip(slot.members, counts, strict=True))
        return 0.0 if min(counts) == 0 else size / self._tables.job.global_batch / max(slowest_s, 1e-12)

    def _hop_of(self, source: Slot, target: Slot, size: int) -> _WayBound:
        hop = self._tables.hop(source, target, size)
        return _WayBound(0.0, float(hop.busy[1:-1].min()), float(hop.turn[1:-1].min()))
