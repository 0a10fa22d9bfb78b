"""What Sailor's planner chooses among: devices that stand for each other, and what stages take on them.

A supply is a kind in a region: the sites that the cluster file gives one name of a region to, or a site by itself (H6).
Stages are cut once for each number of them, as evenly as the mean over the kinds allows
(Sailor, section 4.2: "for a given layer partitioning"). Seconds and bytes are those of one tensor-parallel group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from spantrain.core.action import SPLIT_OPS
from spantrain.core.cluster import Cluster
from spantrain.core.quantities import format_bytes
from spantrain.core.shares import even_share
from spantrain.cost.held_sizes import Division
from spantrain.cost.span_tables import Array, SpanTables, over_spans
from spantrain.planner.assembly.assemble import least_largest
from spantrain.planner.request import Objective, PlanRequest
from spantrain.planner.strategies.score import Weights, weights_of


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Devices of a kind in a region, by host."""

    region: str
    kind: str
    hosts: tuple[tuple[str, ...], ...]
    """Those to be kept first, then the fullest."""
    memory_bytes: int
    """Of the device with the least."""

    @property
    def count(self) -> int:
        """Devices."""
        return sum(map(len, self.hosts))

    @property
    def largest_degree(self) -> int:
        """The largest power of two of devices that a host has."""
        return 1 << (max(map(len, self.hosts)).bit_length() - 1)

    def left_over(self, degree: int) -> int:
        """Return how many devices are in no group when hosts are divided into groups of so many."""
        return sum(len(members) % degree for members in self.hosts)

    def group(self, degree: int) -> tuple[str, ...]:
        """Return devices of a host that make a group, any of its alike ones."""
        return next(members[:degree] for members in self.hosts if len(members) >= degree)


def supplies_of(cluster: Cluster, names: Sequence[str], keep: Sequence[str] = ()) -> tuple[Supply, ...]:
    """Return the supplies of some devices."""
    wanted = set(keep)
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in sorted(names, key=lambda entry: entry not in wanted):
        device = cluster.device_by_name[name]
        found.setdefault((_region_of(cluster, device.site), device.kind), {}).setdefault(device.host, []).append(name)
    return tuple(
        Supply(
            region=region,
            kind=kind,
            hosts=tuple(
                tuple(row) for row in sorted(hosts.values(), key=lambda row: (not wanted & set(row), -len(row)))
            ),
            memory_bytes=min(cluster.device_by_name[name].memory_bytes for row in hosts.values() for name in row),
        )
        for (region, kind), hosts in found.items()
    )


def _region_of(cluster: Cluster, site: str) -> str:
    return cluster.site_by_name[site].region or site


def _hosts_by_region(cluster: Cluster, names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the devices of each host of each region, the fullest first."""
    hosts: dict[str, list[str]] = {}
    for name in names:
        hosts.setdefault(cluster.device_by_name[name].host, []).append(name)
    found: dict[str, list[list[str]]] = {}
    for host, members in sorted(hosts.items(), key=lambda entry: -len(entry[1])):
        found.setdefault(_region_of(cluster, cluster.host_by_name[host].site), []).append(members)
    return found


@dataclass(frozen=True, kw_only=True)
class RegionLink:
    """From a stage to the next one."""

    devices: tuple[str, str]
    """A pair that stands for all."""
    latency_s: float
    s_per_byte: float
    most_users: int
    """Replicas that may share it."""

    def busy_s(self, width: int, size_bytes: int) -> float:
        """Return for how long it is busy when each of so many replicas sends so many bytes."""
        return min(width, self.most_users) * size_bytes * self.s_per_byte


class SupplySpace:
    """Supplies, cuts, and the seconds and bytes of stages on groups, each computed once."""

    def __init__(self, request: PlanRequest) -> None:
        self.profile, self.job = request.profile, request.job
        cluster = self.profile.cluster
        self.supplies = supplies_of(cluster, request.devices_within_quotas, request.constraints.keep)
        self.regions = tuple(dict.fromkeys(supply.region for supply in self.supplies))
        self.kinds = tuple(dict.fromkeys(supply.kind for supply in self.supplies))
        self.spans = SpanTables(self.profile, self.job.optimizer, self.job.dtype)
        self.weights: Weights = weights_of(cluster, request.objective, self.job.global_batch)
        self.money: Weights = weights_of(cluster, Objective.COST, self.job.global_batch)
        self.units = self.spans.units
        self.begins = cache(self._begins)
        """The unit in front of which each of so many stages begins, then the end."""
        self.seconds = cache(self._seconds)
        """Of a micro-batch's F, I and W: by (supply, degree, samples, stages), an entry for each stage."""
        self.least_degrees = cache(self._least_degrees)
        """Heuristic H2: by (supply, samples, stages, micro-batches), for each stage; 0 where none is enough."""
        self._hosts = _hosts_by_region(cluster, request.devices_within_quotas)
        self.outline = cache(self._outline)
        """By (stages, samples)."""
        self.way = cache(self._way)
        """From a region to one: (region, other, devices that are in one host if they can be)."""
        self._least_sum = cache(self._least_sum_s)
        self._least_crossing = cache(self._least_crossing_s)
        self._bytes = cache(self._device_bytes)

    @property
    def divides(self) -> bool:
        """Whether tensor parallelism is of any use: a unit can be divided."""
        return any(unit.tensor_sums for unit in self.profile.graph.units)

    @property
    def largest_region(self) -> int:
        """Devices of the region with the most: no stage is wider."""
        return max(sum(map(len, hosts)) for hosts in self._hosts.values())

    def degrees(self, kind: str) -> tuple[int, ...]:
        """Return the tensor-parallel degrees of a kind: powers of two inside a host (heuristic H1)."""
        most = max(supply.largest_degree for supply in self.supplies if supply.kind == kind) if self.divides else 1
        return tuple(1 << power for power in range(most.bit_length()))

    def stage_units(self, stages: int, stage: int) -> range:
        """Return the units of one of so many stages."""
        return range(self.begins(stages)[stage], self.begins(stages)[stage + 1])

    def _begins(self, stages: int) -> tuple[int, ...]:
        rows = [[self.spans.compute.prefix_seconds(kind, op, 1) for op in SPLIT_OPS] for kind in self.kinds]
        work: Array = np.array(rows).sum(axis=1).mean(axis=0)
        return least_largest([over_spans(work)] * stages)[1]

    def _seconds(self, supply: int, degree: int, samples: int, stages: int) -> tuple[float, ...]:
        sums = self.spans.work(self.supplies[supply].group(degree), (1.0,) * degree, samples)
        return tuple(np.diff(sums[list(self.begins(stages))]).tolist())

    def _outline(self, stages: int, samples: int) -> tuple[float, float, float]:
        """Return the seconds of the slowest stage and of all, and what a micro-batch of one replica of each is worth.

        Each stage is where that is least, on any supply with any degree, memory aside.
        """
        seconds, worth = np.full(stages, np.inf), np.full(stages, np.inf)
        for index, supply in enumerate(self.supplies):
            name = supply.hosts[0][0]
            price = self.weights.second_by_device[name] + self.weights.busy_by_device[name]
            for degree in self.degrees(supply.kind):
                if degree <= supply.largest_degree:
                    row = np.array(self.seconds(index, degree, samples, stages))
                    seconds, worth = np.minimum(seconds, row), np.minimum(worth, degree * price * row)
        return float(seconds.max()), float(seconds.sum()), float(worth.sum())

    def _least_degrees(self, supply: int, samples: int, stages: int, micro_batches: int) -> tuple[int, ...]:
        found = self.supplies[supply]
        degrees = [degree for degree in self.degrees(found.kind) if degree <= found.largest_degree]
        least = []
        for stage in range(stages):
            units, held = self.stage_units(stages, stage), samples * min(stages - stage, micro_batches)
            enough = (d for d in degrees if self._bytes(supply, units, d, held, samples) <= found.memory_bytes)
            least.append(next(enough, 0))
        return tuple(least)

    def _device_bytes(self, supply: int, units: range, degree: int, in_flight: int, largest: int) -> int:
        group = self.supplies[supply].group(degree)
        return self.spans.memory.need(
            units, group[0], in_flight, largest, Division(tp_share=even_share(degree))
        ).peak_bytes

    def _way(self, region: str, other: str, together: int) -> RegionLink:
        here, there = self._hosts[region], self._hosts[other]
        if region != other:
            # All replicas share the link between the regions.
            devices, users = (here[0][0], there[0][0]), self.job.global_batch
        elif together <= len(here[0]) or len(here) == 1:
            devices, users = (here[0][0], here[0][-1]), 1
        else:
            devices, users = (here[0][0], here[-1][0]), len(here[0])
        if devices[0] == devices[1]:
            return RegionLink(devices=devices, latency_s=0.0, s_per_byte=0.0, most_users=1)
        link = self.spans.network.link(*devices)
        rate = 1 / link.bandwidth_bytes_per_s
        return RegionLink(devices=devices, latency_s=link.latency_s, s_per_byte=rate, most_users=users)

    def count(self, samples: int, width: int) -> int:
        """Return how many micro-batches a replica has."""
        return -(-self.job.global_batch // (samples * width))

    def least_step_s(self, stages: int, samples: int, width: int, slowest_s: float, all_s: float) -> float:
        """Return seconds that no step is under whose stages take so long: the slowest one, and all together."""
        crossing_s, busy_s = self._least_crossing(stages, samples, width)
        others = self.count(samples, width) - 1
        return others * max(slowest_s, busy_s) + all_s + crossing_s + self._least_sum(width, stages)

    def _least_crossing_s(self, stages: int, samples: int, width: int) -> tuple[float, float]:
        """Return the seconds of the shortest way between regions, there and back, and of the busier direction.

        0 if a region is large enough for the whole pipeline.
        """
        if stages * width <= self.largest_region:
            return 0.0, 0.0
        found = [(float("inf"), float("inf"))]
        cuts = [self.profile.graph.units[first - 1] for first in self.begins(stages)[1:-1]]
        for region, other in permutations(self.regions, 2):
            way = self.way(region, other, width)
            for cut in cuts:
                sizes = (cut.cut_bytes_per_sample, cut.gradient_bytes_per_sample)
                busy = [way.busy_s(width, samples * size) for size in sizes]
                found.append((sum(busy) + 2 * way.latency_s, max(busy)))
        return min(passed for passed, _ in found), min(busy for _, busy in found)

    def _least_sum_s(self, width: int, stages: int) -> float:
        """Return seconds that the slowest gradient sum is not under, whatever the region."""
        if width == 1:
            return 0.0
        graph = self.profile.graph
        size = max(sum(graph.held_trained_bytes(self.stage_units(stages, stage))) for stage in range(stages))
        return 2 * (width - 1) / width * size * min(self.way(one, one, width).s_per_byte for one in self.regions)

    def closest_miss(self) -> str:
        """Return by how much the fullest stage of the longest pipeline misses, on the supply that suits it best."""
        stages, samples = min(self.units, sum(supply.count for supply in self.supplies)), 1
        lines = []
        for stage in range(stages):
            units, best = self.stage_units(stages, stage), (float("inf"), "")
            for index, supply in enumerate(self.supplies):
                degree = supply.largest_degree if self.divides else 1
                need = self._bytes(index, units, degree, stages - stage, samples)
                of = (
                    f"{degree} {supply.kind} in {supply.region}"
                    if degree > 1
                    else f"a {supply.kind} in {supply.region}"
                )
                text = f"{of} needs {format_bytes(need)} for units {units.start}-{units.stop - 1}, has "
                best = min(best, (need / supply.memory_bytes, text + format_bytes(supply.memory_bytes)))
            lines.append(best)
        return max(lines)[1]
