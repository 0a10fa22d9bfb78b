"""Algorithm 1 of Asteroid (section 3.3): a micro-batch's samples on a group of devices, for many spans of units.

Samples are counted in blocks. First balancing: by capacity, at most what a device's memory holds, what is left over to
the others again, until nothing is left. Then offloading, since time is not linear in samples: a block goes from the
slowest device to the fastest one that has room, as long as the slowest gets no slower. (The paper ends when it is not
faster; then of two alike devices that are the slowest together neither could ever give.) The best that was met is kept.
Fractions of blocks are rounded down, and what is left goes to the largest fractions.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spantrain.cost.span_tables import Array

Blocks = NDArray[np.int64]
"""By device and span."""
Columns = NDArray[np.intp]
Seconds = Callable[[Blocks, Columns], Array]
"""Of every device for so many blocks, by device and span; the columns say which spans these are."""

_NOTHING = 1e-9
_MOVES_PER_DEVICE = 1


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
    """Return the second phase, straggler workload offloading.

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
    for _ in range(_MOVES_PER_DEVICE * len(blocks)):
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
        here[slow[possible], columns] -= 1
        here[fast[possible], columns] += 1
        times = seconds(here, at)
        now_s = times.max(axis=0)
        better = now_s < best_s * (1 - _NOTHING)
        best[:, at[better]], best_s[better] = here[:, better], now_s[better]
        goes_on = now_s <= slowest_s * (1 + _NOTHING)
        at, here, times, best_s = at[goes_on], here[:, goes_on], times[:, goes_on], best_s[goes_on]
    return best
