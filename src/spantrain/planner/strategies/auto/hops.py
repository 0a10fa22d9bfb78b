"""Seconds of the ways between parts of a pipeline for every cut: what the bounds of `auto` and `exhaustive` read."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from spantrain.core.records import Record
from spantrain.core.span import apportion
from spantrain.cost.span_tables import Array, SpanTables
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


class Batch(Record):
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
