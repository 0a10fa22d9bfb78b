"""Gradient sums in buckets beside the last backward action of a step: which are ready when, and what is left behind it.

A backward pass goes through a stage's units from the last to the first, so their gradients are whole in that order, and
buckets are filled in it (`runtime.gradients.step_sums`). Buckets are summed one by one. With more and smaller
ones the first sum begins earlier, and each one costs the ring's latency once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from spantrain.core.plan import GradientSums


@dataclass(frozen=True, kw_only=True)
class SumBucket:
    """Gradients that are summed at once."""

    size_bytes: float
    last_unit: int
    """Position in the stage of the unit whose gradients come last: with it the bucket is whole."""


def fill_buckets(unit_bytes: Sequence[float], sums: GradientSums) -> tuple[SumBucket, ...]:
    """Fill buckets with the gradients of a stage's units, from the last one on.

    >>> [(bucket.size_bytes, bucket.last_unit) for bucket in fill_buckets((2, 5, 0, 3), GradientSums(bucket_bytes=4))]
    [(4.0, 1), (4.0, 1), (2.0, 0)]
    """
    ends = list(accumulate(reversed(unit_bytes)))
    total = ends[-1] if ends else 0
    found: list[SumBucket] = []
    unit, begin = 0, 0.0
    while begin < total:
        end = min(sums.bucket_end(begin), total)
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
