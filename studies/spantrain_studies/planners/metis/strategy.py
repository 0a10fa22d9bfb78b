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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from spantrain.core.plan import SumModel
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import Assembler, StageShape, least_largest
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.metis.costs import GroupCosts, GroupTable
from spantrain_studies.planners.metis.groups import arrangements, kind_orders

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
    search = _MetisSearch(Assembler(request, SumModel.ALPA), devices)
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
    def __init__(self, assembler: Assembler, devices: tuple[str, ...]) -> None:
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
        slowest_s, sums = 0.0, self.assembler.parameter_sums
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
