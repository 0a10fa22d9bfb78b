"""Seconds of the ways between parts of a pipeline for every cut: what the bounds of `auto` and `exhaustive` read.

What it costs to divide a stage's state among its replicas, for every span of units, as `cost.replicas` has it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from spantrain.core.shares import StateSharding
from spantrain.core.span import apportion
from spantrain.cost.held_sizes import Division
from spantrain.cost.span_tables import Array, SpanTables
from spantrain.formats.precision import gathered_ratio
from spantrain.formats.registry import WireFormat
from spantrain.planner.strategies.score import Weights

HOP_FIELDS = ("up", "down", "busy_up", "busy_down", "latency_up", "latency_down", "extra")
"""Least seconds of one span up and its gradient down; of the busiest link in a step; least latencies."""

Piece = tuple[str, str, int]
"""Sender, receiver, samples."""


class PipelinePart(NamedTuple):
    """Devices of one stage, in the cluster's order, and what each takes of a full micro-batch."""

    devices: tuple[str, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How the global batch is cut: `whole` micro-batches of `size` samples, and one of `rest` if that is not 0."""

    size: int
    whole: int
    rest: int


class HopCosts:
    """Computes ways between parts; where not `exact`, links between the same places are taken to be alike.

    Cuts between sites are sent in a wire format, all others as they are.
    """

    def __init__(
        self, spans: SpanTables, weights: Weights, *, exact: bool, wire_format: WireFormat = WireFormat.NATIVE
    ) -> None:
        self._spans, self._network, self._weights, self._exact = spans, spans.network, weights, exact
        self._wire_format = wire_format
        self._ways: dict[tuple[str, str], tuple[tuple[str, float], ...]] = {}

    def hop(self, lower: PipelinePart, upper: PipelinePart, batch: Batch) -> Array:
        """Return the fields of the way from a part to the next one by [field, cut]."""
        found = np.zeros((len(HOP_FIELDS), len(self._spans.points)))
        forward, backward = self._spans.cut_bytes(self.wire_format(lower, upper))
        found[0], found[2], found[4] = self._way(lower, upper, batch, forward)
        found[1], found[3], found[5] = self._way(upper, lower, batch, backward)
        if self._weights.counts_traffic:
            found[6] = self._extra(lower, upper, batch, forward) + self._extra(upper, lower, batch, backward)
        return found

    def wire_format(self, lower: PipelinePart, upper: PipelinePart) -> WireFormat:
        """Return what is sent between two parts: the wire format if any of it leaves its site."""
        sites = {self._network.place(name)[0] for name in (*lower.devices, *upper.devices)}
        return self._wire_format if len(sites) > 1 else WireFormat.NATIVE

    def _way(
        self, senders: PipelinePart, receivers: PipelinePart, batch: Batch, per_sample: Array
    ) -> tuple[Array, Array, float]:
        """Return, in one direction, the least seconds of one span, those of the busiest link in a step, the latency."""
        pieces = self._curves if self._has_curves else self._lines
        arrivals, busy, latency_s = [], dict[str, Array | float](), float("inf")
        for count, size in ((batch.whole, batch.size), (1, batch.rest)):
            if size:
                there, least_s = pieces(_pieces(senders, receivers, size), count, per_sample, busy)
                arrivals.append(there)
                latency_s = min(latency_s, least_s)
        least = arrivals[0] if len(arrivals) == 1 else np.minimum(*arrivals)
        if self._has_curves:
            return least, np.maximum.reduce([np.asarray(seconds) for seconds in busy.values()]), latency_s
        return least, per_sample * max(float(seconds) for seconds in busy.values()), latency_s

    @cached_property
    def _has_curves(self) -> bool:
        return any(link.curve is not None for link in self._spans.profile.links)

    def _lines(
        self, pieces: Sequence[Piece], count: int, per_sample: Array, busy: dict[str, Array | float]
    ) -> tuple[Array, float]:
        """Return when a span is there at the earliest, and the least latency; add to the seconds by byte of links."""
        there: dict[object, set[tuple[float, float]]] = {}
        for (source, target, samples), many in self._alike_pieces(pieces):
            link = self._network.link(source, target)
            s_per_byte = samples / link.bandwidth_bytes_per_s
            place = target if self._exact else self._network.place(target)
            there.setdefault(place, set()).add((link.latency_s, s_per_byte))
            self._count(busy, source, target, count * s_per_byte, many)
        lines = {frozenset(lines) for lines in there.values()}
        spans = [np.maximum.reduce([latency + slope * per_sample for latency, slope in row]) for row in lines]
        return np.minimum.reduce(spans), min(latency for row in lines for latency, _ in row)

    def _curves(
        self, pieces: Sequence[Piece], count: int, per_sample: Array, busy: dict[str, Array | float]
    ) -> tuple[Array, float]:
        """Return the same where bandwidth depends on the size of a message; `busy` then has seconds by cut."""
        there: dict[str, Array] = {}
        latencies = []
        for source, target, samples in pieces:
            link = self._network.link(source, target)
            occupied = np.array([link.busy_seconds(samples * size_bytes) for size_bytes in per_sample])
            arrives = occupied + link.latency_s
            there[target] = np.maximum(there[target], arrives) if target in there else arrives
            latencies.append(link.latency_s)
            self._count(busy, source, target, count * occupied)
        return np.minimum.reduce(list(there.values())), min(latencies)

    def _alike_pieces(self, pieces: Sequence[Piece]) -> Iterable[tuple[Piece, int]]:
        """Return pieces with 1; where links between the same places are alike, one of each sort and how many."""
        if self._exact:
            return [(piece, 1) for piece in pieces]
        found: dict[object, tuple[Piece, int]] = {}
        for piece in pieces:
            key = (self._network.place(piece[0]), self._network.place(piece[1]), piece[2])
            first, many = found.get(key, (piece, 0))
            found[key] = (first, many + 1)
        return found.values()

    def _count(
        self, busy: dict[str, Array | float], source: str, target: str, seconds: Array | float, many: int = 1
    ) -> None:
        """Add the seconds of pieces to those of a connection, and of the ways and ports that they share."""
        key = (source, target)
        ways = self._ways.get(key)
        if ways is None:
            own = self._network.link(source, target).bandwidth_bytes_per_s
            parts = [(way.name, min(1.0, own / way.bandwidth_bytes_per_s)) for way in self._network.route(*key)]
            ways = self._ways[key] = (*parts, (f"{source}>{target}", 1.0))
        for name, part in ways[:-1]:
            busy[name] = busy.get(name, 0.0) + many * part * seconds
        connection = ways[-1][0]
        busy[connection] = busy.get(connection, 0.0) + seconds

    def _extra(self, lower: PipelinePart, upper: PipelinePart, batch: Batch, per_sample: Array) -> Array:
        """Return what the objective counts of the traffic in one direction."""
        total = 0.0
        for count, size in ((batch.whole, batch.size), (1, batch.rest)):
            for source, target, samples in _pieces(lower, upper, size) if size else ():
                total += count * samples * self._weights.per_byte(source, target)
        return total * per_sample


def _pieces(senders: PipelinePart, receivers: PipelinePart, size: int) -> list[Piece]:
    """Return who sends whom how many samples of a micro-batch of a size."""
    found = []
    ends = list(accumulate(apportion(size, receivers.samples)))
    at, lo = 0, 0
    for source, count in zip(senders.devices, apportion(size, senders.samples), strict=True):
        hi = lo + count
        while lo < hi:
            if ends[at] > lo:
                upto = min(hi, ends[at])
                found.append((source, receivers.devices[at], upto - lo))
                lo = upto
            if ends[at] <= lo and lo < size:
                at += 1
    return found


Gather = Callable[[tuple[str, ...], Array], Array]
"""Returns the seconds in which devices that hold a part each get all of so many bytes, for many sizes at once."""


class ShardCosts:
    """Bytes and seconds of one way to divide state, as arrays over positions in a grid of units."""

    def __init__(self, spans: SpanTables, sharding: StateSharding, gather: Gather) -> None:
        self.sharding, self._spans, self._gather = sharding, spans, gather
        self._gathered_ratio = gathered_ratio(spans.compute.dtype)
        self.state_bytes = cache(self._state_bytes)
        """Bytes of state of one of so many replicas."""
        self._gathered_s = cache(self._seconds_of_gathers)

    def division(self, replicas: int) -> Division:
        """Return what a replica has of a stage's state; there is nothing to divide where it is alone."""
        return Division(state_sharding=self.sharding if replicas > 1 else StateSharding.NONE, replicas=replicas)

    def _state_bytes(self, replicas: int) -> Array:
        division, grid = self.division(replicas), self._spans.points.tolist()
        found = np.zeros(self._spans.above.shape)
        for i, j in np.argwhere(self._spans.above).tolist():
            found[i, j] = self._spans.memory.state_bytes(range(grid[i], grid[j]), division)
        return found

    def beside(self, devices: tuple[str, ...], batch: Batch) -> Array:
        """Return the seconds of what goes on beside each F, I and W, as [operation, begin, end]."""
        count = batch.whole + bool(batch.rest)
        summed = self._gathered_s(devices, None)
        if self.sharding is StateSharding.ZERO1:
            return np.zeros((3, *summed.shape))
        summed = np.maximum(summed - self._first_s(devices, None) / count, 0.0)
        if self.sharding is StateSharding.ZERO2:
            return np.stack([np.zeros(summed.shape), np.zeros(summed.shape), summed])
        gathered = self._gathered_s(devices, self._gathered_ratio)
        return np.stack([gathered, gathered, summed])

    def behind_s(self, devices: tuple[str, ...]) -> Array:
        """Return the seconds of what comes behind all work besides sums in buckets, by begin and end."""
        if self.sharding is StateSharding.ZERO3:
            return self._first_s(devices, None) + self._first_s(devices, self._gathered_ratio)
        updated_s = self._gather(devices, self._spans.trained())
        return updated_s if self.sharding is StateSharding.ZERO1 else updated_s + self._first_s(devices, None)

    def _first_s(self, devices: tuple[str, ...], ratio: float | None) -> Array:
        """Return the seconds in which the first unit's bytes (`_moved`) go half round a ring, by begin."""
        sizes = [next(iter(self._moved(first, ratio)), 0.0) for first in self._spans.points.tolist()]
        found: Array = self._gather(devices, np.array(sizes, dtype=np.float64))[:, None]
        return found

    def _seconds_of_gathers(self, devices: tuple[str, ...], ratio: float | None) -> Array:
        """Return the seconds in which bytes (`_moved`) go half round a ring, unit by unit, by begin and end."""
        grid, found = self._spans.points, np.zeros(self._spans.above.shape)
        for i, first in enumerate(grid.tolist()[:-1]):
            seconds = self._gather(devices, self._moved(first, ratio))
            found[i, i:] = np.concatenate([[0.0], np.cumsum(seconds)])[grid[i:] - first]
        return found

    def _moved(self, first: int, ratio: float | None) -> Array:
        """Return by unit the bytes of its gradients, or with a ratio of its parameters, so many for each byte."""
        graph, units = self._spans.profile.graph, range(first, self._spans.units)
        moved = graph.held_trained_bytes(units) if ratio is None else graph.gathered_bytes(units, ratio)
        return np.array(moved, dtype=np.float64)


def hidden(compute: Array, beside: Array) -> Array:
    """Return the least seconds of F, I and W of which each takes the longer of its compute and what goes on beside it.

    Where I and W are one action, they may hide more: so much is taken off W.
    """
    forward, inputs = np.maximum(compute[:2], beside[:2])
    both = np.maximum(compute[1] + compute[2], beside[1] + beside[2])
    return np.stack([forward, inputs, both - inputs])
