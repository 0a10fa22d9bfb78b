"""`metis`: load-balanced stages on uneven device groups (Um et al., Metis, USENIX ATC 2024).

Written from what others report of it (SpanTrain, section 4; Sailor, sections 3 and 5) and from its abstract, not from
its code. Kept: devices of a kind follow each other, in every order of the kinds; device groups of uneven size but even
capacity (powers of two), for every number of stages, gone through by depth and cut off where they get uneven; inside a
group data parallelism with samples by capacity, or tensor parallelism where that is faster or memory asks for it;
layers divided so that the slowest stage is fastest; an estimate with measured compute and two bandwidths, one inside
hosts and one between them (the means between neighbours in the cluster's order; that it knows no more of the network
is what Sailor and SpanTrain find to be its weakness); all devices are used. It runs on Alpa, and so sums as that does.

Decided here: memory is a limit while layers are divided. Not kept: tensor groups that span hosts, the condition that
the global batch is a multiple of the devices, and hours of search: a few of the most even groupings are tried for each
order and number of stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from spantrain.core.plan import SumModel
from spantrain.core.quantities import format_bytes
from spantrain.core.shares import even_share
from spantrain.core.span import apportion
from spantrain.cost.span_tables import Array, over_spans
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import StageShape, least_largest
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler

Run = tuple[str, int]
"""A kind, and how many of its devices follow each other on one host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupTable:
    """A device group with a micro-batch, for units i to j-1 as [i, j]."""

    seconds: Array
    """Of the degree that is fastest among those that fit; infinite where none does."""
    choice: NDArray[np.intp]
    """Which of the degrees."""
    degrees: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    """By degree: of each replica."""


class GroupCosts:
    """Tables of device groups; groups that are alike have one."""

    def __init__(self, assembler: PaperAssembler, devices: Sequence[str]) -> None:
        self._assembler, self._spans = assembler, assembler.spans
        self._cluster = assembler.profile.cluster
        self._by_kind: dict[str, tuple[str, ...]] = {}
        for _, members in groupby(
            devices, key=lambda name: (self._kind(name), self._cluster.device_by_name[name].host)
        ):
            row = tuple(members)
            if len(row) > len(self._by_kind.get(self._kind(row[0]), ())):
                self._by_kind[self._kind(row[0])] = row
        self.table = cache(self._table)
        """By (runs, samples of a micro-batch, micro-batches held)."""

    def _kind(self, name: str) -> str:
        return self._cluster.device_by_name[name].kind

    @property
    def divides(self) -> bool:
        """Whether tensor parallelism is of any use: a unit can be divided."""
        return any(unit.tensor_sums for unit in self._assembler.profile.graph.units)

    def speed(self, kind: str) -> float:
        """Return the samples per second of the whole model on one device of a kind."""
        return 1 / max(float(self._prefix(kind, 1, 1)[-1]), 1e-12)

    def runs(self, devices: Sequence[str]) -> tuple[Run, ...]:
        """Return the runs that a group of devices, in its order, is made of."""
        found = groupby(devices, key=lambda name: (self._kind(name), self._cluster.device_by_name[name].host))
        return tuple((kind, len(list(members))) for (kind, _), members in found)

    def shape(self, table: GroupTable, units: range, devices: tuple[str, ...]) -> StageShape:
        """Return a group as a stage of some units."""
        index = int(table.choice[units.start, units.stop])
        samples = table.samples[index]
        return StageShape(units=units, devices=devices, shares=samples, degrees=(table.degrees[index],) * len(samples))

    def _table(self, runs: tuple[Run, ...], size: int, held: int) -> GroupTable | None:
        """Return the table of a group; None if it has more replicas than a micro-batch has samples."""
        degrees, samples, tables = [], [], []
        for degree in self._degrees(runs):
            kinds = [kind for kind, count in runs for _ in range(count // degree)]
            parts = self._parts(kinds, degree, size)
            if min(parts) > 0:
                degrees.append(degree)
                samples.append(parts)
                tables.append(self._seconds(frozenset(zip(kinds, parts, strict=True)), degree, held))
        if not tables:
            return None
        stacked = np.stack(tables)
        choice = stacked.argmin(axis=0)
        return GroupTable(seconds=stacked.min(axis=0), choice=choice, degrees=tuple(degrees), samples=tuple(samples))

    def _degrees(self, runs: tuple[Run, ...]) -> list[int]:
        most = min(count for _, count in runs) if self.divides else 1
        powers = (1 << power for power in range(most.bit_length()))
        return [degree for degree in powers if all(count % degree == 0 for _, count in runs)]

    def _parts(self, kinds: Sequence[str], degree: int, size: int) -> tuple[int, ...]:
        """Divide a micro-batch by what the replicas get done (the balance of data)."""
        even = max(1, size // len(kinds))
        return apportion(size, [1 / max(float(self._prefix(kind, degree, even)[-1]), 1e-12) for kind in kinds])

    def _seconds(self, replicas: frozenset[tuple[str, int]], degree: int, held: int) -> Array:
        """Return the slowest replica's seconds, infinite where a device has no room."""
        seconds, fits = np.zeros(self._spans.above.shape), self._spans.above
        for kind, samples in replicas:
            sums = self._prefix(kind, degree, samples)
            seconds = np.maximum(seconds, over_spans(sums))
            device = self._cluster.device_by_name[self._by_kind[kind][0]]
            fits = fits & (self._need(kind, degree, samples, held) <= device.memory_bytes)
        return np.where(fits, seconds, np.inf)

    def _need(self, kind: str, degree: int, samples: int, held: int) -> Array:
        return self._spans.need(self._by_kind[kind][0], samples * held, samples, even_share(degree))

    def _prefix(self, kind: str, degree: int, samples: int) -> Array:
        return self._spans.work(self._by_kind[kind][:degree], (1.0,) * degree, samples)

    def closest_miss(self) -> str:
        """Return what the largest device would need for the unit that needs the most."""
        units = self._assembler.units
        kind = max(self._by_kind, key=lambda name: self._cluster.device_by_name[self._by_kind[name][0]].memory_bytes)
        need = self._need(kind, 1, 1, 1)
        unit = max(range(units), key=lambda index: float(need[index, index + 1]))
        have = self._cluster.device_by_name[self._by_kind[kind][0]].memory_bytes
        return (
            f"a {kind} needs {format_bytes(need[unit, unit + 1])} for unit {unit} with one sample, has "
            f"{format_bytes(have)}"
        )


Arrangement = tuple[int, ...]
"""How many devices, next to each other in an order, each group has."""

_ALL_ORDERS_UP_TO = 3
"""Kinds, up to which all their orders are tried; of more, fastest first and fastest last."""
_UNEVEN = 2.0
"""A group has at most so many times the capacity that it should have, and at least the inverse."""
_LOOKED_AT = 32
"""Arrangements found, of which the most even ones are returned."""


def kind_orders(speed_by_kind: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """Return orders of kinds to try: their devices come along the pipeline like that.

    >>> kind_orders({"slow": 1.0, "fast": 2.0})
    (('fast', 'slow'), ('slow', 'fast'))
    """
    fastest_first = sorted(speed_by_kind, key=lambda kind: -speed_by_kind[kind])
    if len(fastest_first) <= _ALL_ORDERS_UP_TO:
        return tuple(permutations(fastest_first))
    return tuple(fastest_first), tuple(reversed(fastest_first))


def arrangements(capacity: Sequence[float], groups: int, most: int) -> tuple[Arrangement, ...]:
    """Return ways to divide devices, in their order, into so many groups; those of the most even capacity first.

    Groups have a power of two of devices; the last one has what is left.

    >>> arrangements([1, 1, 1, 1, 2, 2], 3, most=1)
    ((2, 2, 2),)
    >>> arrangements([4, 4, 1, 1, 1, 1], 3, most=2)
    ((1, 1, 4), (2, 2, 2))
    """
    sums = [0.0]
    for value in capacity:
        sums.append(sums[-1] + value)
    mean = sums[-1] / groups

    def worst(sizes: Arrangement) -> float:
        ends = [sum(sizes[: index + 1]) for index in range(groups)]
        own = [sums[end] - sums[end - size] for end, size in zip(ends, sizes, strict=True)]
        return max(own) / mean

    found = []
    for sizes in _divided(sums, 0, groups):
        found.append(sizes)
        if len(found) == _LOOKED_AT:
            break
    return tuple(sorted(found, key=worst)[:most])


def _divided(sums: Sequence[float], first: int, groups: int) -> Iterator[Arrangement]:
    """Yield sizes of the groups from a device on, by depth: the size next to the mean of what is left first."""
    left = len(sums) - 1 - first
    if groups == 1:
        yield (left,)
        return
    wanted = (sums[-1] - sums[first]) / groups
    sizes = [1 << power for power in range((left - groups + 1).bit_length()) if (1 << power) <= left - groups + 1]

    def ratio(size: int) -> float:
        own = sums[first + size] - sums[first]
        return max(own / wanted, wanted / own)

    for size in sorted(sizes, key=ratio):
        if ratio(size) > _UNEVEN:
            break
        for rest in _divided(sums, first + size, groups - 1):
            yield (size, *rest)


_GROUPINGS = 3
"""For each order of kinds and number of stages."""
_BUILT = 12
_BUILT_OF_MANY = 3
_MANY_DEVICES = 64
_MAX_STAGES = 24


def metis(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the groupings that Metis's model likes best.

    Raises:
        InfeasiblePlanError: no grouping has layers that fit.
    """
    devices = request.devices_within_quotas
    search = _MetisSearch(PaperAssembler(request, SumModel.ALPA), devices)
    options = sorted(search.options(), key=lambda option: option.latency_s)
    if not options:
        raise InfeasiblePlanError(
            f"no grouping of all {len(devices)} devices that is looked at fits; {search.costs.closest_miss()}"
        )
    most = _BUILT if len(devices) <= _MANY_DEVICES else _BUILT_OF_MANY
    return search.assembler.best((search.built(option) for option in options[:most]), "1f1b")


@dataclass(frozen=True, eq=False, kw_only=True)
class _Option:
    groups: tuple[tuple[str, ...], ...]
    tables: tuple[GroupTable, ...]
    begins: tuple[int, ...]
    size: int
    latency_s: float


class _MetisSearch:
    def __init__(self, assembler: PaperAssembler, devices: tuple[str, ...]) -> None:
        self.assembler, self._devices = assembler, devices
        self.costs = GroupCosts(assembler, devices)
        self._host = {name: assembler.profile.cluster.device_by_name[name].host for name in devices}
        neighbours = list(pairwise(devices))
        inside = [pair for pair in neighbours if self._host[pair[0]] == self._host[pair[1]]]
        self._inside_s, self._between_s = (
            self._mean_s_per_byte(pairs) for pairs in (inside, [pair for pair in neighbours if pair not in inside])
        )

    def options(self) -> Iterator[_Option]:
        """Yield every grouping that is looked at, for every micro-batch size, with its best layers."""
        for row in self._rows():
            capacity = [self.costs.speed(self._kind(name)) for name in row]
            for stages in range(1, min(len(row), self.assembler.units, _MAX_STAGES) + 1):
                for sizes in arrangements(capacity, stages, most=_GROUPINGS):
                    ends = [0, *accumulate(sizes)]
                    groups = tuple(row[first:end] for first, end in pairwise(ends))
                    yield from self._sized(groups)

    def _kind(self, name: str) -> str:
        return self.assembler.profile.cluster.device_by_name[name].kind

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the devices kind by kind, those of a host together, for each order of the kinds."""
        cluster = self.assembler.profile.cluster
        hosts = list(dict.fromkeys(cluster.device_by_name[name].host for name in self._devices))
        host_place = {host: place for place, host in enumerate(hosts)}
        speeds = {kind: self.costs.speed(kind) for kind in dict.fromkeys(map(self._kind, self._devices))}
        for order in kind_orders(speeds):
            kind_place = {kind: place for place, kind in enumerate(order)}
            places = {
                name: (kind_place[self._kind(name)], host_place[cluster.device_by_name[name].host])
                for name in self._devices
            }
            yield tuple(sorted(self._devices, key=lambda name: places[name]))

    def _mean_s_per_byte(self, pairs: list[tuple[str, str]]) -> float:
        links = [self.assembler.spans.network.link(*pair) for pair in pairs]
        return sum(1 / link.bandwidth_bytes_per_s for link in links) / max(1, len(links))

    def _s_per_byte(self, devices: tuple[str, ...]) -> float:
        """Return the seconds of a byte among some devices."""
        return self._inside_s if len({self._host[name] for name in devices}) == 1 else self._between_s

    def _sized(self, groups: tuple[tuple[str, ...], ...]) -> Iterator[_Option]:
        runs = [self.costs.runs(group) for group in groups]
        sums_s = [self._s_per_byte(group) for group in groups]
        cuts_s = [0.0, *(self._s_per_byte(a + b) for a, b in pairwise(groups))]
        for size in self.assembler.job.micro_batch_sizes():
            count = -(-self.assembler.job.global_batch // size)
            tables = [self.costs.table(own, size, min(len(groups) - place, count)) for place, own in enumerate(runs)]
            known = tuple(table for table in tables if table is not None)
            if len(known) == len(groups):
                arrives = (size * self.assembler.cut_bytes)[:, None]
                costs = [table.seconds + cut_s * arrives for table, cut_s in zip(known, cuts_s, strict=True)]
                slowest_s, begins = least_largest(costs)
                if slowest_s < float("inf"):
                    passed_s = sum(float(cost[part]) for cost, part in zip(costs, pairwise(begins), strict=True))
                    latency_s = (count - 1) * slowest_s + passed_s + self._sum_s(known, begins, sums_s)
                    yield _Option(groups=groups, tables=known, begins=begins, size=size, latency_s=latency_s)

    def _sum_s(self, tables: tuple[GroupTable, ...], begins: tuple[int, ...], s_per_byte: list[float]) -> float:
        """Return the slowest ring sum of gradients."""
        slowest_s, sums = 0.0, self.assembler.trained_sums
        for table, byte_s, (first, end) in zip(tables, s_per_byte, pairwise(begins), strict=True):
            width = len(table.samples[table.choice[first, end]])
            size_bytes = float(sums[end] - sums[first])
            slowest_s = max(slowest_s, 2 * (width - 1) / width * size_bytes * byte_s)
        return slowest_s

    def built(self, option: _Option) -> tuple[tuple[StageShape, ...], int, float]:
        """Return what a plan is assembled from."""
        shapes = tuple(
            self.costs.shape(table, range(first, end), group)
            for table, group, (first, end) in zip(option.tables, option.groups, pairwise(option.begins), strict=True)
        )
        return shapes, option.size, option.latency_s
