"""Seconds and samples of groups of devices for every span of units: what `asteroid` reads its steps from.

Algorithm 1 of Asteroid (section 3.3): a micro-batch's samples on a group of devices, for many spans of units.

Samples are counted in blocks. First balancing: by capacity, at most what a device's memory holds, what is left over to
the others again, until nothing is left. Then offloading, since time is not linear in samples: a block goes from the
slowest device to the fastest one that has room, as long as the slowest gets no slower. (The paper ends when it is not
faster; then of two alike devices that are the slowest together neither could ever give.) The best that was met is kept.
Fractions of blocks are rounded down, and what is left goes to the largest fractions.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import Op
from spantrain.cost.network import NetworkCost
from spantrain.cost.span_tables import Array, HopRates, RingRate, SpanTables, hop_rates

Blocks = NDArray[np.int64]
"""By device and span."""
Columns = NDArray[np.intp]
Seconds = Callable[[Blocks, Columns], Array]
"""Of every device for so many blocks, by device and span; the columns say which spans these are."""

_NOTHING = 1e-9


def allocate(capacity: Array, room: Blocks, total: int, seconds: Seconds) -> tuple[Blocks, NDArray[np.bool_]]:
    """Return the blocks of each device, and for which spans there is room for all of them.

    Args:
        capacity: of the devices, by device and span; any scale.
        room: the most blocks that a device's memory holds, by device and span.
        total: blocks of a micro-batch.
        seconds: F and B of every device for so many blocks.
    """
    blocks = balanced(capacity, room, total)
    return offloaded(blocks, room, seconds), blocks.sum(axis=0) == total


def balanced(capacity: Array, room: Blocks, total: int) -> Blocks:
    """Return the first phase, memory-aware balancing; fewer blocks than the total where there is no room for all.

    >>> balanced(np.array([[3.0], [1.0]]), np.array([[8], [8]]), 8).ravel().tolist()
    [6, 2]
    >>> balanced(np.array([[3.0], [1.0]]), np.array([[4], [8]]), 8).ravel().tolist()
    [4, 4]
    """
    given = np.zeros(capacity.shape)
    for _ in range(len(capacity)):
        left = total - given.sum(axis=0)
        weight = np.where(room - given > _NOTHING, capacity, 0.0)
        scale = weight.sum(axis=0)
        share = left * weight / np.where(scale > 0, scale, 1.0)
        given += np.minimum(share, room - given)
        if not (left > _NOTHING).any():
            break
    blocks = np.floor(given + _NOTHING).astype(np.int64)
    fraction = given - blocks
    columns = np.arange(capacity.shape[1])
    for _ in range(len(capacity)):
        left = total - blocks.sum(axis=0)
        fraction = np.where(blocks < room, fraction, -np.inf)
        first = fraction.argmax(axis=0)
        wanted = (left > 0) & np.isfinite(fraction[first, columns])
        if not wanted.any():
            break
        blocks[first[wanted], columns[wanted]] += 1
        fraction[first[wanted], columns[wanted]] -= 1.0
    return blocks


def offloaded(blocks: Blocks, room: Blocks, seconds: Seconds) -> Blocks:
    """Return the second phase, straggler workload offloading: until a move makes the slowest device slower.

    Where moves leave it as slow, several may be; after as many moves as there are devices, it goes round in a circle.

    The first device takes 2 s for a block, the second 1 s and another 4 s as soon as it has any:

    >>> def seconds(blocks, columns):
    ...     return np.stack([2.0 * blocks[0], 1.0 * blocks[1] + 4.0 * (blocks[1] > 0)])
    >>> offloaded(np.array([[2], [4]]), np.array([[9], [9]]), seconds).ravel().tolist()
    [3, 3]
    """
    best = blocks.copy()
    at = np.arange(blocks.shape[1] if len(blocks) > 1 else 0)
    here, times = blocks[:, at], seconds(blocks[:, at], at)
    best_s = times.max(axis=0, initial=0.0)
    in_vain = np.zeros_like(at)
    while len(at):
        columns = np.arange(len(at))
        slow = times.argmax(axis=0)
        target = np.where(here < room[:, at], times, np.inf)
        target[slow, columns] = np.inf
        fast = target.argmin(axis=0)
        possible = np.isfinite(target[fast, columns]) & (here[slow, columns] > 0)
        if not possible.any():
            break
        slowest_s = times.max(axis=0)[possible]
        at, here, best_s, columns = at[possible], here[:, possible], best_s[possible], np.arange(int(possible.sum()))
        in_vain = in_vain[possible] + 1
        here[slow[possible], columns] -= 1
        here[fast[possible], columns] += 1
        times = seconds(here, at)
        now_s = times.max(axis=0)
        better = now_s < best_s * (1 - _NOTHING)
        best[:, at[better]], best_s[better], in_vain[better] = here[:, better], now_s[better], 0
        goes_on = (now_s <= slowest_s * (1 + _NOTHING)) & (in_vain < len(blocks))
        at, here, times, best_s = at[goes_on], here[:, goes_on], times[:, goes_on], best_s[goes_on]
        in_vain = in_vain[goes_on]
    return best


_MAX_BLOCKS = 32
"""Into which a micro-batch is cut."""
_MIN_BLOCKS = 16


class ExecutionStep(NamedTuple):
    """An execution step for units i to j-1, as [i, j]; seconds are infinite where it does not fit."""

    both: Array
    """E_f + E_b of one micro-batch."""
    backward: Array
    """E_b of it."""
    sums: Array
    """T_a."""


class DeviceNetwork:
    """Ways between ranges of devices in their sorted order, and rings over them."""

    def __init__(self, network: NetworkCost, devices: Sequence[str], capacities: Sequence[float]) -> None:
        self._network, self._sides = network, tuple(zip(devices, capacities, strict=True))
        self.rates, self.ring = cache(self._rates_of), cache(self._ring_of)

    def _rates_of(self, low: int, middle: int, high: int) -> tuple[HopRates, HopRates]:
        """Return the way from devices `low` to `middle`-1 to those up to `high`-1, shares by capacity, and back."""
        senders, receivers = self._sides[low:middle], self._sides[middle:high]
        return hop_rates(self._network, senders, receivers), hop_rates(self._network, receivers, senders)

    def _ring_of(self, low: int, high: int) -> RingRate:
        return RingRate.of(self._network, tuple(name for name, _ in self._sides[low:high]))


class DeviceTables:
    """Steps of devices in their sorted order, for one micro-batch size.

    `held` is K_p, the micro-batches whose activations a stage holds (equation 3).
    """

    def __init__(self, spans: SpanTables, network: DeviceNetwork, devices: Sequence[str], size: int) -> None:
        self._spans, self.network, self.devices, self.size = spans, network, tuple(devices), size
        self.units = spans.units
        self._first, self._end = np.nonzero(spans.above)
        """Of every span of units."""
        # Of a size that hardly divides, single samples are the blocks.
        blocks = max(count for count in range(1, min(size, _MAX_BLOCKS) + 1) if size % count == 0)
        self.total = blocks if 2 * blocks > min(size, _MIN_BLOCKS) else size
        self.block = size // self.total
        """Samples in a block."""
        self.edge_up, self.edge_down = spans.cut_bytes()
        kinds = [spans.profile.cluster.device_by_name[name].kind for name in self.devices]
        self._forward, self._backward = self._running_sums(tuple(dict.fromkeys(kinds)))
        self._both = self._forward + self._backward
        self._kind = np.array([list(dict.fromkeys(kinds)).index(kind) for kind in kinds])
        self.step, self._free = cache(self._step), cache(self._free_of)
        self._free_step = cache(self._free_step_of)

    def samples(self, low: int, high: int, units: range, held: int) -> tuple[int, ...]:
        """Return the samples of devices `low` to `high`-1 for some units, by algorithm 1; some may get none."""
        at = np.flatnonzero((self._first == units.start) & (self._end == units.stop))
        blocks, fits = self._allocated(low, self._room(low, high, held, at), at)
        assert fits.all(), (low, high, units)
        return tuple(int(count) * self.block for count in blocks[:, 0])

    def _step(self, low: int, high: int, held: int) -> ExecutionStep:
        """Return the step of devices `low` to `high`-1, data parallel."""
        everywhere = np.arange(len(self._first))
        room = self._room(low, high, held, everywhere)
        blocks, fits = self._free(low, high)
        tight = ~(fits & (blocks <= room).all(axis=0))
        if not tight.any():
            return self._free_step(low, high)
        blocks, fits = blocks.copy(), fits.copy()
        blocks[:, tight], fits[tight] = self._allocated(low, room[:, tight], everywhere[tight])
        return self._made(low, blocks, fits)

    def _free_step_of(self, low: int, high: int) -> ExecutionStep:
        return self._made(low, *self._free(low, high))

    def _made(self, low: int, blocks: Blocks, fits: NDArray[np.bool_]) -> ExecutionStep:
        everywhere = np.arange(len(self._first))
        forward = self._lookup(self._forward, low, blocks, everywhere).max(axis=0)
        backward = self._lookup(self._backward, low, blocks, everywhere).max(axis=0)
        return ExecutionStep(
            both=self._square(np.where(fits, forward + backward, np.inf), elsewhere=np.inf),
            backward=self._square(backward),
            sums=self.network.ring(low, low + len(blocks)).seconds(self._spans.trained()),
        )

    def _free_of(self, low: int, high: int) -> tuple[Blocks, NDArray[np.bool_]]:
        """Return what algorithm 1 comes to where memory is no limit."""
        everywhere = np.arange(len(self._first))
        return self._allocated(low, np.full((high - low, len(everywhere)), self.total), everywhere)

    def _allocated(self, low: int, room: Blocks, at: NDArray[np.intp]) -> tuple[Blocks, NDArray[np.bool_]]:
        whole = np.full(room.shape, self.total)
        capacity = 1 / np.maximum(self._lookup(self._both, low, whole, at), 1e-12)
        if len(set(self._kind[low : low + len(room)].tolist())) == 1:
            blocks = balanced(capacity, room, self.total)
            return blocks, blocks.sum(axis=0) == self.total
        return allocate(
            capacity, room, self.total, lambda blocks, columns: self._lookup(self._both, low, blocks, at[columns])
        )

    def _lookup(self, table: Array, low: int, blocks: Blocks, at: NDArray[np.intp]) -> Array:
        """Return the seconds of so many blocks, by device and span."""
        kinds = self._kind[low : low + len(blocks), None]
        rows = (kinds * (self.total + 1) + blocks) * (self.units + 1)
        flat = table.ravel()
        return np.asarray(flat.take(rows + self._end[at]) - flat.take(rows + self._first[at]))

    def _running_sums(self, kinds: Sequence[str]) -> tuple[Array, Array]:
        """Return running sums over units of the seconds of F and of B, as [kind, blocks, unit]."""
        counts = range(self.total + 1)
        seconds = self._spans.compute.prefix_seconds
        forward, backward = (
            np.array([[seconds(kind, op, count * self.block) for count in counts] for kind in kinds])
            for op in (Op.FORWARD, Op.BACKWARD)
        )
        return forward, backward

    def _room(self, low: int, high: int, held: int, at: NDArray[np.intp]) -> Blocks:
        """Return the most blocks that fit, by device and span: equation 3, and the messages of both cuts."""
        spans = (self._first[at], self._end[at])
        always = (self._spans.state() + self._spans.besides())[spans]
        left = np.array([self._memory_bytes(name) - always for name in self.devices[low:high]])
        each = np.maximum(held * self._spans.in_flight()[spans] + self._spans.buffers()[spans], 1.0)
        room = np.floor(left / each / self.block)
        return np.asarray(np.clip(room, 0, self.total), dtype=np.int64)

    def _memory_bytes(self, name: str) -> int:
        """Return what the framework leaves of a device's memory."""
        return self._spans.profile.cluster.device_by_name[name].memory_bytes - self._spans.framework_bytes(name)

    def _square(self, values: Array, *, elsewhere: float = 0.0) -> Array:
        found = np.full((self.units + 1, self.units + 1), elsewhere)
        found[self._first, self._end] = values
        return found
