"""Seconds and bytes of parts of a pipeline for every span of units: what the bounds of `auto` and `exhaustive` read.

A part is a set of devices that will be the replicas of one stage, with the whole samples that each takes of a full
micro-batch. Cuts lie on a grid of unit numbers, all of them for small models, fewer for large ones; arrays are indexed
by positions in that grid.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from spantrain.core.action import SPLIT_OPS
from spantrain.core.shares import StateSharding
from spantrain.core.span import apportion
from spantrain.cost.held_sizes import Division
from spantrain.cost.memory import framework_bytes
from spantrain.cost.span_tables import Array
from spantrain.cost.sums import around, own_sum_s
from spantrain.formats.registry import WireFormat
from spantrain.planner.request import PlanRequest
from spantrain.planner.strategies.auto.hops import Batch, HopCosts, PipelinePart
from spantrain.planner.strategies.score import Weights

PART_FIELDS = (
    *("forward", "input", "weight", "run", "run_fi", "run_f", "run_i", "sync", "crowd", "extra"),
    *("forward_most", "input_most", "weight_most", "sum_likely"),
)
"""Least seconds of F, I, W of one span; seconds of the whole step, of the busiest replica: all of it, F and I, F, I;
the least that can be left of the gradient sum behind the last backward; samples over in-flight limit where that is over
one, else 0; what the objective counts beside time; seconds of F, I, W of a full span on the slowest replica; what is
likely left of the gradient sum."""
_LIKELY_BUCKETS = 8
"""Buckets of a sum beside the last backward, of which one is taken to be left in any case."""

_ONE_BY_ONE_UP_TO = 64


class _DeviceWork(NamedTuple):
    """One device's work for each span of units."""

    least: Array
    """F, I and W of the smallest of its spans."""
    full: Array
    """Those of the largest."""
    total: Array
    """F, I and W of all of them."""


class PartCosts:
    """Arrays of parts and of hops between parts, each computed once."""

    def __init__(
        self,
        request: PlanRequest,
        weights: Weights,
        grid: Sequence[int],
        *,
        exact_sums: bool,
        wire_format: WireFormat = WireFormat.NATIVE,
        state_sharding: StateSharding = StateSharding.NONE,
    ) -> None:
        self.grid = tuple(grid)
        self._exact_sums = exact_sums
        self.weights = weights
        self.global_batch = request.job.global_batch
        self.spans = request.job.span_tables(request.profile, self.grid)
        self.units, self.memory, self.network = self.spans.units, self.spans.memory, self.spans.network
        self.devices = request.profile.cluster.device_by_name
        self._hop_costs = HopCosts(self.spans, weights, exact=exact_sums, wire_format=wire_format)
        self.wire_format = self._hop_costs.wire_format
        """What is sent between two parts."""
        self._sharding = state_sharding
        self._parts: dict[tuple[PipelinePart, int], Array] = {}
        self._hops: dict[tuple[PipelinePart, PipelinePart, int], Array] = {}
        self._crowd, self._sum = cache(self._crowd_of), cache(self._sum_of)
        self._work, self._state = cache(self._work_of), cache(self._state_bytes)
        self._by_looks: dict[tuple[object, ...], Array] = {}

    def batch(self, size: int) -> Batch:
        """Return how the global batch is cut into micro-batches of a size."""
        whole, rest = divmod(self.global_batch, size)
        return Batch(size=size, whole=whole, rest=rest)

    def division(self, replicas: int) -> Division:
        """Return what one of so many replicas has of a stage."""
        sharding = self._sharding if replicas > 1 else StateSharding.NONE
        return Division(state_sharding=sharding, replicas=replicas, splits=self.spans.splits)

    def shares(self, devices: tuple[str, ...], size: int) -> tuple[int, ...]:
        """Divide a micro-batch so that the slowest replica ends soonest on the whole model; some may get nothing."""
        return self.spans.shares(devices, range(self.units), size)

    def replica_seconds(self, device: str, samples: int) -> float:
        """Return the seconds of F, I and W of the whole model on a device."""
        return self.spans.kind_seconds(self.devices[device].kind, range(self.units), samples)

    def part(self, part: PipelinePart, batch: Batch) -> Array:
        """Return the fields of a part by [field, begin, end]; `run` is infinite where it cannot be."""
        found = self._parts.get((part, batch.size))
        if found is None:
            found = self._alike(("part", batch.size, *self._looks(part)), lambda: self._part(part, batch))
            self._parts[part, batch.size] = found
        return found

    def hop(self, lower: PipelinePart, upper: PipelinePart, batch: Batch) -> Array:
        """Return the fields of the way from a part to the next one by [field, cut]."""
        key = (lower, upper, batch.size)
        found = self._hops.get(key)
        if found is None:
            looks = ("hop", batch.size, *self._looks(lower, upper))
            make = partial(self._hop_costs.hop, lower, upper, batch)
            found = self._hops[key] = self._alike(looks, make)
        return found

    def _alike(self, looks: tuple[object, ...], make: Callable[[], Array]) -> Array:
        """Return what was made for something that looks alike, else make it; always make it where sums are exact."""
        if self._exact_sums:
            return make()
        found = self._by_looks.get(looks)
        if found is None:
            found = self._by_looks[looks] = make()
        return found

    def _looks(self, *parts: PipelinePart) -> tuple[object, ...]:
        """Return what tells parts apart if links between the same places are alike."""
        hosts: dict[tuple[str, str], int] = {}
        found: list[object] = []
        for devices, samples in parts:
            for name, count in zip(devices, samples, strict=True):
                device = self.devices[name]
                host = hosts.setdefault((device.site, device.host), len(hosts))
                found.append((*device.make, device.site, host, count))
            found.append(None)
        return tuple(found)

    def barrier_s(self, devices: Sequence[str]) -> float:
        """Return the least that agreeing at a step's end takes; of many devices one of each place is asked."""
        if len(devices) > _ONE_BY_ONE_UP_TO:
            devices = list({self.network.place(name): name for name in reversed(devices)}.values())
        return self.network.round_trip_s(devices)

    def tied_s(self, first: str, last: str) -> float:
        """Return the seconds of the exchange of parameters that both the first and the last unit hold."""
        graph = self.spans.profile.graph
        names = set(graph.units[0].shared) & set(graph.units[-1].shared)
        sizes = graph.trained_shared_bytes
        return sum(self.network.exchange_s((first, last), sizes[name]) for name in names & sizes.keys())

    def _part(self, part: PipelinePart, batch: Batch) -> Array:
        rests = apportion(batch.rest, part.samples)
        rows = set()
        works = []
        for name, count, rest in zip(part.devices, part.samples, rests, strict=True):
            device = self.devices[name]
            works.append((self.weights.busy_by_device[name], self._work(device.kind, count, rest, batch)))
            rows.add((device.backend, device.memory_bytes, count, count * batch.whole + rest))
        extra = sum(weight * work.total.sum(axis=0) for weight, work in works if weight)
        distinct = list({id(work): work for _, work in works}.values())
        least = distinct[0].least if len(distinct) == 1 else np.minimum.reduce([work.least for work in distinct])
        totals = [(w.total.sum(axis=0), w.total[0] + w.total[1], w.total[0], w.total[1]) for w in distinct]
        runs = [np.maximum.reduce(column) if len(distinct) > 1 else column[0] for column in zip(*totals, strict=True)]
        replicas = 1 if self._sharding is StateSharding.NONE else len(part.devices)
        crowd = np.maximum.reduce([self._crowd(*row, replicas) for row in sorted(rows)])
        found = np.empty((len(PART_FIELDS), *self.spans.above.shape))
        found[:3] = least
        for index, run in enumerate(runs):
            found[3 + index] = run
        found[3][~np.isfinite(crowd) | ~self.spans.above] = np.inf
        found[8] = np.where(np.isfinite(crowd), crowd, 0.0)
        found[9] = extra
        found[10:13] = distinct[0].full if len(distinct) == 1 else np.maximum.reduce([work.full for work in distinct])
        found[7], found[13] = self._left_of_sum(part.devices, found)
        return found

    def _left_of_sum(self, devices: tuple[str, ...], fields: Array) -> tuple[Array | float, Array | float]:
        """Return the least and the likely seconds at the end of a step, behind the last backward of a full span.

        At best all of a whole backward hides the sum. Mostly the last action is a W, and the first bucket is not whole
        when it begins. Where state is divided, half of a sum brings gradients to their holders, and half the updated
        parameters back, but for those that are gathered for each action: what goes on beside actions is not counted.
        """
        if len(devices) == 1:
            return 0.0, 0.0
        least_s, likely_s = self._sum(devices)
        if self._sharding is StateSharding.ZERO3:
            least_s, likely_s = least_s / 2, likely_s / 2
        beside_s = fields[12] if self.spans.splits else fields[11] + fields[12]
        likely_s = np.maximum(likely_s - (1 - 1 / _LIKELY_BUCKETS) * beside_s, likely_s / _LIKELY_BUCKETS)
        return np.maximum(least_s - fields[11] - fields[12], 0.0), likely_s

    def _work_of(self, kind: str, count: int, rest: int, batch: Batch) -> _DeviceWork:
        """Return a device's work."""
        full, last = self._spans_of(kind, count), self._spans_of(kind, rest) if rest else None
        least = full if last is None else np.minimum(full, last)
        total = batch.whole * full if last is None else batch.whole * full + last
        return _DeviceWork(least, full, total)

    def _spans_of(self, kind: str, samples: int) -> Array:
        sums = np.array([self.spans.compute.prefix_seconds(kind, op, samples) for op in SPLIT_OPS])[
            :, self.spans.points
        ]
        spans: Array = np.maximum(sums[:, None, :] - sums[:, :, None], 0.0)
        return spans

    def _crowd_of(self, backend: str, memory_bytes: int, count: int, samples: int, replicas: int) -> Array:
        """Return how often the in-flight limit must be filled; 0 where all fits, infinite where not one span does."""
        held = self.spans.in_flight()
        state = self.spans.state() if replicas == 1 else self._state(replicas)
        left = memory_bytes - framework_bytes(backend) - state - self.spans.besides() - count * self.spans.buffers()
        fits = np.floor(left / np.maximum(held, 1.0))
        limit = np.minimum(np.where((held == 0) & (left >= 0), samples, fits), samples)
        # Equal spans go in whole: some of the places that they take is taken so many times.
        alike = samples % count == 0
        places = np.maximum(np.floor(limit / count) if alike else limit, 1.0)
        turns = np.ceil(samples // count / places) if alike else samples / places
        crowd = np.where(limit < samples, turns, 0.0)
        return np.where((limit >= count) & (left >= 0), crowd, np.inf)

    def _sum_of(self, devices: tuple[str, ...]) -> tuple[Array, Array]:
        """Return the least and the likely seconds of the gradient sum.

        No ring is faster than its slowest hop carries all pieces, or than one piece goes round twice. By how much ours
        is slower than that is taken from the sum of the whole model.
        """
        least, whole = self._least_of_sum(devices), float(self.spans.trained()[0, -1])
        likely_s = own_sum_s(self.network.collectives, [self.devices[name] for name in devices], whole)
        return least, least * max(1.0, likely_s / max(float(least[0, -1]), 1e-12))

    def _least_of_sum(self, devices: tuple[str, ...]) -> Array:
        size, turns = self.spans.trained(), 2 * (len(devices) - 1)
        pairs = around(devices)
        latency_s = [self.network.latency_s(*pair) for pair in pairs]
        piece = max(float(size.max()) / len(devices), 1.0)
        slowest_s = max(self.network.busy_together_s(pairs, piece)) / piece
        around_s = 2 * (sum(latency_s) - max(latency_s))
        return np.where(size > 0, np.maximum(turns * size / len(devices) * slowest_s, around_s), 0.0)

    def _state_bytes(self, replicas: int) -> Array:
        """Return the bytes of state of one of so many replicas that divide it, by begin and end."""
        division, grid = self.division(replicas), self.spans.points.tolist()
        found = np.zeros(self.spans.above.shape)
        for i, j in np.argwhere(self.spans.above).tolist():
            found[i, j] = self.memory.state_bytes(range(grid[i], grid[j]), division)
        return found
