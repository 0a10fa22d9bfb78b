"""Gradient sums in buckets beside the last backward action of a step: which are ready when, and what is left behind it.

A backward pass goes through a stage's units from the last to the first, so their gradients are whole in that order, and
buckets are filled in it (`runtime.background_sums`). Buckets are summed one by one. With more and smaller ones the
first sum begins earlier, and each one costs the ring's latency once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from spantrain.cost.collectives import RUNTIME_BUCKET_BYTES

__all__ = ["MOST_BUCKETS", "SumBucket", "behind_s", "bucket_bytes", "fill_buckets"]

MOST_BUCKETS = 16
"""Into how many buckets a stage's gradients are divided at most, but for those that a full one cannot hold."""


@dataclass(frozen=True, kw_only=True)
class SumBucket:
    """Gradients that are summed at once."""

    size_bytes: float
    last_unit: int
    """Position in the stage of the unit whose gradients come last: with it the bucket is whole."""


def bucket_bytes(total_bytes: float, buckets: int) -> int:
    """Return the size of buckets if there shall be at least so many (`core.plan.Stage.sum_buckets`).

    >>> bucket_bytes(10, 4), bucket_bytes(1e9, 4) == RUNTIME_BUCKET_BYTES
    (3, True)
    """
    return max(1, min(RUNTIME_BUCKET_BYTES, math.ceil(total_bytes / buckets)))


def fill_buckets(unit_bytes: Sequence[float], size_bytes: int) -> tuple[SumBucket, ...]:
    """Fill buckets with the gradients of a stage's units, from the last one on.

    >>> [(bucket.size_bytes, bucket.last_unit) for bucket in fill_buckets((2, 5, 0, 3), 4)]
    [(4.0, 1), (4.0, 1), (2.0, 0)]
    """
    ends = list(accumulate(reversed(unit_bytes)))
    total = ends[-1] if ends else 0
    found: list[SumBucket] = []
    unit, begin = 0, 0.0
    while begin < total:
        end = min(begin + size_bytes, total)
        while ends[unit] < end:
            unit += 1
        found.append(SumBucket(size_bytes=end - begin, last_unit=len(ends) - 1 - unit))
        begin = end
    return tuple(found)


def behind_s(seconds: Sequence[float], parts: Sequence[float], action_s: float) -> float:
    """Return the seconds of a sum that are left when the last backward action ends.

    Args:
        seconds: of each bucket.
        parts: of the action, after which each is whole.
        action_s: seconds of the action.

    >>> behind_s((1.0, 1.0, 1.0), (0.25, 0.5, 1.0), 4.0)
    1.0
    >>> behind_s((3.0, 3.0), (0.5, 1.0), 4.0)
    4.0
    """
    left_s = most_s = 0.0
    for bucket_s, part in zip(reversed(seconds), reversed(parts), strict=True):
        left_s += bucket_s
        most_s = max(most_s, left_s - (1.0 - part) * action_s)
    return most_s
