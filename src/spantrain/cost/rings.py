"""When the last piece has gone round a ring of devices: each sends on what came in the turn before.

Ways of arbitrary hops, by the seconds of latency and those for which a piece keeps each hop busy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]

_LONG_RING, _FEW_RHYTHMS = 64, 16
"""Devices of a ring from which on its turns are not gone through one by one, if so few different hops are in it."""
_TURNS_ROUND = 16
"""Turns of a ring's length after which segments come in a steady rhythm, which goes on."""
_LOOK_EVERY, _ROUNDING = 32, 1e-13
"""Segments after which it is looked whether they do already, and what its seconds may be off by."""


def without_repeats(latency_s: list[float], busy_s: list[float]) -> tuple[list[float], list[float]]:
    """Return the shortest ring that does the same at every hop: where hops repeat, so does all that they do.

    Of two hops that repeat four are left: a ring of two shares its connection, which these do not.

    >>> without_repeats([1.0, 0.0, 0.0] * 32, [2.0, 1.0, 1.0] * 32)
    ([1.0, 0.0, 0.0], [2.0, 1.0, 1.0])
    """
    if len(busy_s) < _LONG_RING:
        return latency_s, busy_s
    hops = list(zip(latency_s, busy_s, strict=True))
    sizes = (size for size in range(1, len(hops) + 1) if len(hops) % size == 0)
    period = next(size for size in sizes if hops[size:] == hops[:-size] or size == len(hops))
    period = 2 * period if period == 2 else period
    return latency_s[:period], busy_s[:period]


def turns_s(latency_s: Sequence[float], busy_s: Sequence[float], turns: int) -> float:
    """Return the end of the last turn, each device sending on what came in the turn before.

    Neighbours need not be alike: a piece passes slow ones only when its way leads there, so a ring that crosses sites
    twice does not pay their latency in every turn.
    """
    if len(set(latency_s)) == len(set(busy_s)) == 1:
        return turns * (latency_s[0] + busy_s[0])
    rhythms = sorted(set(busy_s))
    if len(busy_s) > _LONG_RING and len(rhythms) <= _FEW_RHYTHMS:
        return max(_slowest_way_s(latency_s, busy_s, turns, rhythm_s) for rhythm_s in rhythms)
    latency, busy = np.array(latency_s), np.array(busy_s)
    ready = free = np.zeros(len(busy))
    before = np.arange(len(busy)) - 1
    for _ in range(turns):
        free = np.maximum(ready, free) + busy
        ready = (free + latency)[before]
    return float(ready.max())


def _slowest_way_s(latency_s: Sequence[float], busy_s: Sequence[float], turns: int, rhythm_s: float) -> float:
    """Return the longest way of a piece round a ring that waits its other turns at a hop as busy as the rhythm or more.

    The end of the last turn is the longest of all ways: each takes neighbouring hops, one a turn, and stays at one of
    them for the turns that are left. So of all runs of at most `turns` hops that hold one so busy, it is the largest
    sum of what each takes over the rhythm, and the rhythm in every turn. (Baccelli et al., Synchronization and
    Linearity, 1992: a system of maxima and sums is a longest path.)

    >>> _slowest_way_s([0.0, 3.0, 0.0], [1.0, 1.0, 2.0], 4, 2.0)
    11.0
    """
    times = -(-turns // len(busy_s)) + 1
    latency, busy = np.tile(latency_s, times), np.tile(busy_s, times)
    sums = np.concatenate([[0.0], np.cumsum(latency + busy - rhythm_s)])
    hops = np.arange(len(busy))
    # A run that ends with a hop begins with none behind the last one that is so busy.
    first, last = np.maximum(hops + 1 - turns, 0), np.maximum.accumulate(np.where(busy >= rhythm_s, hops, -1))
    runs = first <= last
    return turns * rhythm_s + float((sums[1:][runs] - _least_between(sums, first[runs], last[runs])).max())


def _least_between(values: Array, first: Numbers, last: Numbers) -> Array:
    """Return the least of the values from each first one to its last one: of two stretches as long as powers of two."""
    found, count, length = np.empty(len(first)), last - first + 1, 1
    while length <= count.max():
        here = (length <= count) & (count < 2 * length)
        found[here] = np.minimum(values[first[here]], values[last[here] + 1 - length])
        values, length = np.minimum(values[:-length], values[length:]), 2 * length
    return found


def waiting_s(latency_s: Sequence[float], busy_s: Sequence[float], count: int) -> float:
    """Return the end of half a ring of Gloo, in which each device sends so many segments.

    A device makes room for a segment, and sends one of its own, when the last but one that it awaits has come. What it
    sends leaves when the word of that room is there and the link is free. Two devices send each other data and words
    over one connection, so that a word goes behind the data before it.

    >>> waiting_s([1.0, 1.0], [10.0, 10.0], 2), waiting_s([1.0, 1.001], [10.0, 10.0], 2)
    (22.0, 22.002)
    """
    if len(set(latency_s)) == len(set(busy_s)) == 1:
        way, busy = latency_s[0], busy_s[0]
        if len(busy_s) == 2 and busy >= way:
            return count * (way + busy)
        first_s = way if count % 2 else way + busy
        return first_s + (count - 1) // 2 * max(2 * busy, 2 * way + busy) + busy + way
    around, most = 2 * len(busy_s), _TURNS_ROUND * len(busy_s)
    ends_s = _segments_s(latency_s, busy_s, min(count, most))
    if count <= most:
        return ends_s[-1]
    times, place = divmod(count - 1 - (most - around), around)
    return ends_s[most - around + place] + times * (ends_s[most - 1] - ends_s[most - 1 - around])


def _segments_s(latency_s: Sequence[float], busy_s: Sequence[float], count: int) -> list[float]:
    """Return by when all of the first segments are there, for each number of them up to `count`."""
    latency, busy = np.array(latency_s), np.array(busy_s)
    posted = free = before_last = last = np.zeros(len(busy))
    starts = np.full(len(busy), np.inf)
    before, after = np.arange(len(busy)) - 1, np.arange(1 - len(busy), 1)
    ends_s: list[float] = []
    state = earlier = np.zeros((5, len(busy)))
    for number in range(count):
        if number % 2 == 0 and number % _LOOK_EVERY <= 2:
            earlier, state = state, np.stack((posted, free, before_last, last, starts))
            rhythm_s = state - earlier
            if number % _LOOK_EVERY == 2 and np.ptp(rhythm_s) <= _ROUNDING * ends_s[-1]:
                # Two segments later all is later by as much, and so it goes on.
                while len(ends_s) < count:
                    ends_s.append(ends_s[-2] + float(rhythm_s[0, 0]))
                break
        posted = np.maximum(posted, before_last)
        word = np.where(starts <= posted, np.maximum(posted, free), posted) if len(busy) == 2 else posted
        starts = np.maximum(np.maximum(posted, word[after] + latency), free)
        free = starts + busy
        before_last, last = last, (free + latency)[before]
        ends_s.append(max(float(last.max()), ends_s[-1] if ends_s else 0.0))
    return ends_s
