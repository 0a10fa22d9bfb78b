"""Seconds and bytes of every span of units, as arrays: the one table that planners read.

An array `[i, j]` is of units points[i] to points[j] - 1, and 0 where there are none; an array `[j]` is of the cut in
front of unit points[j], or a running sum up to it. `points` are rising numbers of units from 0 to all of them. Each
array says what `cost.compute` and `cost.memory` say of the spans one by one.

The ways between spans (`hop_rates`, `RingRate`) have all that their transfers share: links between places, and hosts'
ports. `cost.network.Path` has it without ports, which is enough for a closed form between sites. Inside a site a stage
of several hosts sends into one port of the next, and that port then is the link that rules.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.profile import Profile
from spantrain.core.shares import ALONE, MemberShare
from spantrain.core.span import apportion
from spantrain.core.units import UnitGraph
from spantrain.cost.compute import GroupCost
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost, framework_bytes
from spantrain.cost.network import NetworkCost, overlaps
from spantrain.cost.sums import SumOptions
from spantrain.formats.registry import WireFormat

Array = NDArray[np.float64]

_ONE_BY_ONE_UP_TO = 64
"""Samples, up to which each is given to whoever would end soonest with it; more go in proportion to speed."""
_MANY_BYTES = 64 * 2**20
"""A sum in which bytes weigh more than latency."""


def over_spans(sums: Array) -> Array:
    """Return what running sums come to between i and j, as [i, j]."""
    return np.asarray(sums[None, :] - sums[:, None])


class SpanTables:
    """Seconds and bytes of spans of units for one profile and optimizer, each array made once.

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype; later, one of a kind or a link that is needed.
    """

    def __init__(
        self,
        profile: Profile,
        optimizer: str = "adamw",
        dtype: str | None = None,
        *,
        splits: bool = False,
        points: Sequence[int] | None = None,
    ) -> None:
        """Reckon at `points`, by default every unit; `splits`: as in `cost.memory.Division`."""
        self.profile, self.splits = profile, splits
        self.groups = GroupCost(profile, dtype)
        self.compute, self.network = self.groups.compute, self.groups.network
        self.memory = MemoryCost(profile, optimizer, self.compute.dtype)
        self.units = len(profile.graph.units)
        self.points = np.arange(self.units + 1) if points is None else np.array(points)
        self.above = self.points[:, None] < self.points[None, :]
        """Where a span has units."""
        self.seconds = cache(self._seconds)
        """Running sums of the seconds of one action, by (devices, tp_shares, op, samples)."""
        self.work = cache(self._work)
        """Running sums of the seconds of F, I and W together, by (devices, tp_shares, samples)."""
        self.parameters = cache(partial(self._sums_of, profile.graph.held_parameter_bytes))
        """Bytes of the parameters that a tensor share holds: those that several units share once."""
        self.trained = self.parameters
        if any(unit.frozen_bytes for unit in profile.graph.units):
            self.trained = cache(partial(self._sums_of, profile.graph.held_trained_bytes))
        """Bytes of those that are trained, which replicas sum gradients of."""
        self.state = cache(self._state)
        """Bytes of a tensor share's parameters, gradients and optimizer state."""
        self.in_flight = cache(partial(in_flight_bytes, profile.graph, self.points, splits))
        """Bytes that one sample in flight holds on a tensor share."""
        self.buffers = cache(self._buffers)
        """Bytes for one sample of a micro-batch: its messages over both cuts, and what operations need for it."""
        self.besides = cache(partial(self._working, 1))
        """Bytes that operations need while they run, however few the samples."""
        self.cut_bytes = cache(self._cut_bytes)
        """Bytes of one sample over each cut, up and down, in a wire format; 0 at both ends."""
        self._shares = cache(self._divided)

    def need(self, device: str, in_flight: int | Array, largest: int | Array, tp_share: MemberShare = ALONE) -> Array:
        """Return the peak bytes of a device with so many samples in flight, in micro-batches of `largest` at most."""
        held = in_flight * self.in_flight(tp_share) + largest * self.buffers(tp_share)
        return self.state(tp_share) + self.besides(tp_share) + held + self.framework_bytes(device)

    def framework_bytes(self, device: str) -> int:
        """Return what the framework takes of a device's memory."""
        return framework_bytes(self.profile.cluster.device_by_name[device].backend)

    def shares(self, devices: Sequence[str], units: range, samples: int) -> tuple[int, ...]:
        """Divide samples among devices alone so that the slowest ends soonest with these units; some may get none."""
        return self._shares(tuple(self.profile.cluster.device_by_name[name].kind for name in devices), units, samples)

    def kind_seconds(self, kind: str, units: range, samples: int) -> float:
        """Return the seconds of F, I and W of so many samples on a kind of device."""
        return sum(self.compute.kind_seconds(units, kind, op, samples) for op in SPLIT_OPS)

    def _divided(self, kinds: tuple[str, ...], units: range, samples: int) -> tuple[int, ...]:
        return soonest(samples, [partial(self.kind_seconds, kind, units) for kind in kinds])

    def _seconds(self, devices: tuple[str, ...], tp_shares: tuple[float, ...], op: Op, samples: int) -> Array:
        return np.array(self.groups.prefix_seconds(devices, tp_shares, op, samples))[self.points]

    def _work(self, devices: tuple[str, ...], tp_shares: tuple[float, ...], samples: int) -> Array:
        forward, inputs, weights = (self.seconds(devices, tp_shares, op, samples) for op in SPLIT_OPS)
        return forward + inputs + weights

    def _sums_of(self, held: Callable[[range, MemberShare], tuple[int, ...]], tp_share: MemberShare = ALONE) -> Array:
        rows = np.zeros(self.above.shape)
        for row, first in zip(rows, self.points.tolist(), strict=True):
            row[:] = np.cumsum([0.0, *held(range(first, self.units), tp_share)])[np.maximum(self.points - first, 0)]
        return rows

    def _state(self, tp_share: MemberShare = ALONE) -> Array:
        return self.memory.state_bytes_of(self.parameters(tp_share), self.trained(tp_share))

    def _buffers(self, tp_share: MemberShare = ALONE) -> Array:
        up, down = self.cut_bytes()
        edges = BUFFERED_MICRO_BATCHES * (up + down)
        return np.where(self.above, edges[:, None] + edges[None, :] + self._working(0, tp_share), 0.0)

    def _working(self, part: int, tp_share: MemberShare = ALONE) -> Array:
        """Return one of the two that `UnitGraph.stage_working_bytes` says, of every span between points."""
        of_unit = self.profile.graph.stage_working_bytes
        own = np.array([of_unit(range(unit, unit + 1), tp_share)[part] for unit in range(self.units)], dtype=float)
        parts = [own[low:high].max() for low, high in pairwise(self.points.tolist())]
        most = np.zeros(self.above.shape)
        for row in range(len(parts)):
            most[row, row + 1 :] = np.maximum.accumulate(parts[row:])
        return most

    def _cut_bytes(self, wire_format: WireFormat = WireFormat.NATIVE) -> tuple[Array, Array]:
        before = self.profile.graph.units[:-1]
        rows = (
            [unit.forward_bytes(wire_format) for unit in before],
            [unit.backward_bytes(wire_format) for unit in before],
        )
        up, down = (np.array([0.0, *row, 0.0])[self.points] for row in rows)
        return up, down


def soonest(samples: int, seconds: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """Divide samples so that whoever ends last ends soonest, by what each takes for so many; some may get none."""
    if len(seconds) == 1:
        return (samples,)
    if samples > _ONE_BY_ONE_UP_TO:
        even = max(samples // len(seconds), 1)
        return apportion(samples, [1 / max(own(even), 1e-12) for own in seconds])
    parts = [0] * len(seconds)
    heap = [(own(1), index) for index, own in enumerate(seconds)]
    heapq.heapify(heap)
    for _ in range(samples):
        index = heap[0][1]
        parts[index] += 1
        heapq.heapreplace(heap, (seconds[index](parts[index] + 1), index))
    return tuple(parts)


def in_flight_bytes(
    graph: UnitGraph, points: Sequence[int] | NDArray[np.int64], splits: bool, tp_share: MemberShare = ALONE
) -> Array:
    """Return what `MemoryCost.in_flight_bytes_per_sample` says of every span between points."""
    units, ends = len(graph.units), np.array(points)
    each = [graph.held_activation_bytes(unit, tp_share) for unit in range(units)]
    # Cuts between units count once.
    cuts = [unit.cut_bytes_per_sample for unit in graph.units[:-1]]
    twice = np.cumsum([0.0, *map(min, cuts, each[:-1], each[1:])])
    inside = twice[np.maximum(ends - 1, 0)][None, :] - twice[np.minimum(ends, units - 1)][:, None]
    held = _between(each, ends) - inside
    if splits:
        known = _between([float(unit.deferred_bytes_per_sample is None) for unit in graph.units], ends) == 0
        own = [float(graph.stage_deferred_bytes(range(unit, unit + 1), tp_share)) for unit in range(units)]
        # The first stage goes back at once.
        later = known & (ends[:, None] > 0)
        held = np.where(later, np.maximum(held, _between(own, ends)), held)
    return np.where(ends[:, None] < ends[None, :], held, 0.0)


def _between(values: Sequence[float], ends: NDArray[np.int64]) -> Array:
    return over_spans(np.cumsum([0.0, *values])[ends])


class HopRates(NamedTuple):
    """The way in one direction; rates are seconds for one byte of the whole cut."""

    latency_s: float
    """Latency of the slowest pair that talks."""
    busiest: float
    """Rate of the busiest link or port."""
    out_port: float
    """Rate of the senders' busiest port; 0 if all stays inside hosts."""
    in_port: float
    """Rate of the receivers' busiest port."""


def hop_rates(
    network: NetworkCost, senders: Sequence[tuple[str, float]], receivers: Sequence[tuple[str, float]]
) -> HopRates:
    """Return the rates of a hop: a replica has one piece of each micro-batch, in order; where two overlap, they talk.

    Raises:
        ProfileError: a pair that must talk was not measured.
    """
    links: dict[object, float] = {}
    ports: tuple[dict[str, float], dict[str, float]] = ({}, {})
    latency_s = 0.0
    for source, target, part in overlaps(senders, receivers):
        link = network.link(source, target)
        latency_s = max(latency_s, link.latency_s)
        links[source, target] = links.get((source, target), 0.0) + part / link.bandwidth_bytes_per_s
        way, *ends = network.route(source, target)
        links[way.name] = links.get(way.name, 0.0) + part / way.bandwidth_bytes_per_s
        for port, busy in zip(ends, ports, strict=False):
            busy[port.name] = busy.get(port.name, 0.0) + part / port.bandwidth_bytes_per_s
    out_port, in_port = (max(busy.values(), default=0.0) for busy in ports)
    return HopRates(latency_s, max(*links.values(), out_port, in_port, 0.0), out_port, in_port)


class RingRate(NamedTuple):
    """A ring sum."""

    latency_s: float
    """Seconds of a sum of nothing."""
    s_per_byte: float

    @classmethod
    def of(cls, network: NetworkCost, ring: tuple[str, ...], beside: tuple[tuple[str, ...], ...] = ()) -> "RingRate":
        """Return the rate of a ring, others summing beside it.

        Raises:
            ProfileError: a pair of neighbours was not measured.
        """
        options = SumOptions(beside=beside)
        nothing_s, many_s = (network.collectives.seconds(ring, size, options=options) for size in (0, _MANY_BYTES))
        return cls(nothing_s, (many_s - nothing_s) / _MANY_BYTES)

    def seconds(self, size_bytes: Array) -> Array:
        """Return the seconds of sums of so many bytes."""
        return self.latency_s + size_bytes * self.s_per_byte
