"""Seconds of the ways of a plan for any bytes: between two stages, and round a ring that sums gradients.

The way between stages has all that its transfers share: links between places, and hosts' ports.

`cost.network.Path` has it without ports, which is enough for a closed form between sites. Inside a site a
stage of several hosts sends into one port of the next, and that port then is the link that rules.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spantrain.cost.collectives import SumOptions
from spantrain.cost.network import NetworkCost
from spantrain.planner.assembly.tables import Array

_MANY_BYTES = 64 * 2**20
"""Of a sum in which bytes weigh more than latency."""

Sides = Sequence[tuple[str, float]]
"""Leaders of a stage's replicas in order, each with its samples of a micro-batch."""


class HopRates(NamedTuple):
    """The way in one direction; rates are seconds for one byte of the whole cut."""

    latency_s: float
    """Of the slowest pair that talks."""
    busiest: float
    """On the busiest link or port."""
    out_port: float
    """On the senders' busiest port; 0 if all stays inside hosts."""
    in_port: float
    """On the receivers' busiest port."""


def hop_rates(network: NetworkCost, senders: Sides, receivers: Sides) -> HopRates:
    """Return the rates of a hop: a replica has one piece of each micro-batch, in order; where two overlap, they talk.

    Raises:
        ProfileError: a pair that must talk was not measured.
    """
    links: dict[object, float] = {}
    ports: tuple[dict[str, float], dict[str, float]] = ({}, {})
    latency_s = 0.0
    for source, target, part in _overlaps(senders, receivers):
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
    """Of a sum of nothing."""
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


def _overlaps(senders: Sides, receivers: Sides) -> Iterator[tuple[str, str, float]]:
    """Yield who sends whom which part of a micro-batch.

    >>> list(_overlaps([("a", 2.0), ("b", 2.0)], [("c", 3.0), ("d", 1.0)]))
    [('a', 'c', 0.5), ('b', 'c', 0.25), ('b', 'd', 0.25)]
    """
    total, others = sum(share for _, share in senders), sum(share for _, share in receivers)
    low = 0.0
    for source, share in senders:
        high, other_low = low + share / total, 0.0
        for target, other in receivers:
            other_high = other_low + other / others
            part = min(high, other_high) - max(low, other_low)
            if part > 1e-9 and source != target:
                yield source, target, part
            other_low = other_high
        low = high
