"""Seconds of sums over devices: as a ring, as a tree, as rings inside hosts and sites with a ring between them.

Signs: k devices, n bytes, for a pair of neighbours its latency and b(x), the seconds that x bytes keep it busy.

- Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): each device
  sends n/k bytes to its neighbour in each of 2 (k-1) turns, first summing, then handing round. With equal neighbours
  2 (k-1) (latency + b(n/k)); SpanTrain's equation 5 is this without latency, with the slowest neighbours for all.
- Tree (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005): sums go
  up a binomial tree in ceil(log2 k) turns of n bytes, the result comes down in as many: 2 ceil(log2 k) (latency +
  b(n)). Fewer turns, more bytes: it pays for small sums over slow latencies.
- Hierarchical: a ring inside each host, then one of the hosts' first devices inside each site, then one between the
  sites' first devices, each of all n bytes (the two halves of a ring, summing and handing round, lie before and behind
  what is done between). Only the last ring crosses sites.

A ring of Gloo waits for its receivers (`SumOptions.waits_for_receiver`): of three emulated devices with 10 to 31 ms
between them, sums of 0.3, 0.6 and 2.5 MB took 0.39, 0.50 and 1.48 s; so reckoned it is 0.38, 0.49 and 1.48 s, without
0.23, 0.38 and 1.42 s.

Sums are cut into buckets. They run one after the other (`pipelined=False`, what our runtime does), or each follows the
one before through the same devices without waiting for its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

__all__ = ["RUNTIME_BUCKET_BYTES", "Algorithm", "Collectives", "SumOptions", "Wires"]

RUNTIME_BUCKET_BYTES = 8 * 2**20
"""Size of the buckets in which the runtime sums gradients."""

Pair = tuple[str, str]
Place = tuple[str, str]


class Algorithm(Enum):
    """A way to sum."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class Wires(Protocol):
    """What sums are carried by."""

    def latency_s(self, source: str, target: str) -> float:
        """Return the seconds of the way from a device to another."""

    def busy_together_s(self, pairs: Sequence[Pair], size_bytes: float, beside: Sequence[Pair]) -> list[float]:
        """Return for how long each pair is busy with its message when all pairs, and those beside, send at once."""

    def place(self, device: str) -> Place:
        """Return the site and host of a device."""


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    """How a sum is done."""

    bucket_bytes: int | None = None
    """None: all at once."""
    pipelined: bool = False
    beside: tuple[tuple[str, ...], ...] = ()
    """Devices of other rings that sum at the same time, each in its order: links that they use too are shared."""
    waits_for_receiver: bool = False
    """Whether a ring's pieces wait for the word that their receiver is ready, as those of Gloo do, half by half."""

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")

    def buckets(self, size_bytes: float) -> list[float]:
        """Return the sizes of the buckets; the last one holds the rest.

        >>> SumOptions(bucket_bytes=4).buckets(10)
        [4, 4, 2]
        """
        if self.bucket_bytes is None or size_bytes <= self.bucket_bytes:
            return [size_bytes]
        whole, rest = divmod(size_bytes, self.bucket_bytes)
        return [self.bucket_bytes] * int(whole) + ([rest] if rest else [])


class Collectives:
    """Seconds of sums over given wires."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def seconds(
        self,
        devices: Sequence[str],
        size_bytes: float,
        algorithm: Algorithm = Algorithm.RING,
        options: SumOptions | None = None,
    ) -> float:
        """Return the seconds in which each of the devices gets the sum of so many bytes; rings are in their order.

        Raises:
            ProfileError: a pair that must talk was not measured.
        """
        chosen = options or SumOptions()
        if len(devices) < 2:
            return 0.0
        match algorithm:
            case Algorithm.RING:
                return self._ring_s(devices, size_bytes, chosen)
            case Algorithm.TREE:
                return self._tree_s(devices, size_bytes, chosen)
            case Algorithm.HIERARCHICAL:
                return self._hierarchical_s(devices, size_bytes, chosen)

    def fastest(
        self, devices: Sequence[str], size_bytes: float, options: SumOptions | None = None
    ) -> tuple[Algorithm, float]:
        """Return the fastest algorithm with its seconds; of equal ones the first, ring, tree, hierarchical."""
        times = {algorithm: self.seconds(devices, size_bytes, algorithm, options) for algorithm in Algorithm}
        best = min(times, key=lambda algorithm: times[algorithm])
        return best, times[best]

    def broadcast_s(self, devices: Sequence[str], size_bytes: float) -> float:
        """Return the seconds in which all devices get what the first one has, down a binomial tree."""
        levels = reversed(list(_tree_levels(devices)))
        return sum(self._level_s([(b, a) for a, b in pairs], size_bytes, ())[0] for pairs in levels)

    def gather_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions | None = None) -> float:
        """Return the seconds in which devices that hold a part each get all of it: half of a ring's turns.

        The other half, in which each gets its part of the sum (reduce-scatter), takes as long.
        """
        return self._ring_s(devices, size_bytes, options or SumOptions(), halves=1) if len(devices) > 1 else 0.0

    def _ring_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions, halves: int = 2) -> float:
        pairs = list(_around(devices))
        latency_s = [self._wires.latency_s(*pair) for pair in pairs]
        beside = [pair for other in options.beside for pair in _around(other)]
        turns = halves * (len(devices) - 1)
        total_s, known_s = 0.0, dict[float, tuple[float, float]]()
        for number, bucket in enumerate(options.buckets(size_bytes)):
            if bucket not in known_s:
                busy_s = self._wires.busy_together_s(pairs, bucket / len(devices), beside)
                turn = _waiting_turns_s if options.waits_for_receiver else _ring_turns_s
                known_s[bucket] = (turn(latency_s, busy_s, turns), turns * max(busy_s))
            whole_s, slowest_hop_s = known_s[bucket]
            total_s += slowest_hop_s if options.pipelined and number else whole_s
        return total_s

    def _tree_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions) -> float:
        beside = [pair for other in options.beside for pair in _around(other)]
        levels = list(_tree_levels(devices))
        total_s, known_s = 0.0, dict[float, tuple[float, float]]()
        for number, bucket in enumerate(options.buckets(size_bytes)):
            if bucket not in known_s:
                up = [self._level_s(pairs, bucket, beside) for pairs in levels]
                down = [self._level_s([(b, a) for a, b in pairs], bucket, beside) for pairs in levels]
                busy_up_s, busy_down_s = (sum(busy for _, busy in way) for way in (up, down))
                whole_s = sum(whole for whole, _ in (*up, *down))
                # The root is busy on every level, with what goes up and what comes down at the same time.
                known_s[bucket] = (whole_s, max(busy_up_s, busy_down_s))
            whole_s, root_s = known_s[bucket]
            total_s += root_s if options.pipelined and number else whole_s
        return total_s

    def _level_s(self, pairs: Sequence[Pair], size_bytes: float, beside: Sequence[Pair]) -> tuple[float, float]:
        """Return the seconds of one turn of a tree, and the longest that a pair is busy in it."""
        busy_s = self._wires.busy_together_s(pairs, size_bytes, beside)
        whole_s = max(self._wires.latency_s(*pair) + busy for pair, busy in zip(pairs, busy_s, strict=True))
        return whole_s, max(busy_s)

    def _hierarchical_s(self, devices: Sequence[str], size_bytes: float, options: SumOptions) -> float:
        total_s, leaders = 0.0, tuple(devices)
        for level in (2, 1, 0):
            groups: dict[tuple[str, ...], list[str]] = {}
            for device in leaders:
                groups.setdefault(self._wires.place(device)[:level], []).append(device)
            rings = [tuple(group) for group in groups.values() if len(group) > 1]
            total_s += max((self._one_of(rings, ring, size_bytes, options) for ring in rings), default=0.0)
            leaders = tuple(group[0] for group in groups.values())
        return total_s

    def _one_of(
        self, rings: Sequence[tuple[str, ...]], ring: tuple[str, ...], size_bytes: float, options: SumOptions
    ) -> float:
        others = tuple(other for other in rings if other != ring)
        return self._ring_s(ring, size_bytes, replace(options, beside=(*options.beside, *others)))


def _around(devices: Sequence[str]) -> Iterator[Pair]:
    """Yield each device with the next one, the last with the first; nothing for one alone."""
    if len(devices) > 1:
        yield from zip(devices, (*devices[1:], devices[0]), strict=True)


def _tree_levels(devices: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield who sends whom on each level of a binomial tree, from the leaves up.

    >>> list(_tree_levels("abcde"))
    [[('b', 'a'), ('d', 'c')], [('c', 'a')], [('e', 'a')]]
    """
    step = 1
    while step < len(devices):
        yield [(devices[r + step], devices[r]) for r in range(0, len(devices) - step, 2 * step)]
        step *= 2


def _ring_turns_s(latency_s: Sequence[float], busy_s: Sequence[float], turns: int) -> float:
    """Return the end of the last turn, each device sending on what came in the turn before.

    Neighbours need not be alike: a piece passes slow ones only when its way leads there, so a ring that crosses sites
    twice does not pay their latency in every turn.
    """
    if len(set(latency_s)) == len(set(busy_s)) == 1:
        return turns * (latency_s[0] + busy_s[0])
    return _paced_turns_s(latency_s, busy_s, busy_s, turns)


def _waiting_turns_s(latency_s: Sequence[float], busy_s: Sequence[float], turns: int) -> float:
    """Return the same where a piece goes in two halves, each when its receiver has said that it is ready.

    The word for a half is sent when the half before it has come, so between two pieces of a pair lie at least its
    latency there and back and half a piece; and the first word of all comes before anything.
    """
    pace_s = [
        max(busy, 2 * latency + busy / 2) if busy else 0.0 for latency, busy in zip(latency_s, busy_s, strict=True)
    ]
    return 2 * max(latency_s) + _paced_turns_s(latency_s, busy_s, pace_s, turns)


def _paced_turns_s(latency_s: Sequence[float], busy_s: Sequence[float], pace_s: Sequence[float], turns: int) -> float:
    """Return the end of the last turn where the pieces of a pair begin so far from each other at least."""
    ready_s, free_s = [0.0] * len(busy_s), [0.0] * len(busy_s)
    for _ in range(turns):
        starts_s = [max(ready, free) for ready, free in zip(ready_s, free_s, strict=True)]
        there_s = [start + busy + latency for start, busy, latency in zip(starts_s, busy_s, latency_s, strict=True)]
        free_s = [start + pace for start, pace in zip(starts_s, pace_s, strict=True)]
        ready_s = [there_s[-1], *there_s[:-1]]
    return max(ready_s)
