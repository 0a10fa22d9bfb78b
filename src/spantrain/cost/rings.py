"""When the last piece has gone round a ring of devices: each sends on what came in the turn before.

Ways of arbitrary hops, by the seconds of latency and those for which a piece keeps each hop busy.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

_LONG_RING, _FEW_RHYTHMS = 64, 16
"""Devices of a ring from which on its turns are not gone through one by one, if so few different hops are in it."""
_TURNS_ROUND = 16
"""Turns of a ring's length after which segments come in a steady rhythm, which goes on."""


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
    count = len(busy_s)
    times = -(-turns // count) + 1
    over = np.tile(np.asarray(latency_s) + np.asarray(busy_s) - rhythm_s, times)
    sums = np.concatenate([[0.0], np.cumsum(over)]).tolist()
    holds = list(busy_s) * times
    rising: deque[int] = deque()
    most, added = -math.inf, 0
    for end in range(1, len(sums)):
        if holds[end - 1] >= rhythm_s:
            # From here on a run may begin anywhere up to this hop.
            for begin in range(added, end):
                while rising and sums[rising[-1]] >= sums[begin]:
                    rising.pop()
                rising.append(begin)
            added = end
        while rising and rising[0] < end - turns:
            rising.popleft()
        if rising:
            most = max(most, sums[end] - sums[rising[0]])
    return turns * rhythm_s + most


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
    for _ in range(count):
        posted = np.maximum(posted, before_last)
        word = np.where(starts <= posted, np.maximum(posted, free), posted) if len(busy) == 2 else posted
        starts = np.maximum(np.maximum(posted, word[after] + latency), free)
        free = starts + busy
        before_last, last = last, (free + latency)[before]
        ends_s.append(max(float(last.max()), ends_s[-1] if ends_s else 0.0))
    return ends_s
