"""Which layers each shard holds: contiguous runs, as even as can be."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from spantrain.core.outer_layers import Layer, ShardLayout, ShardRun

__all__ = ["divide"]


def divide(layers: Sequence[Layer], shards: Sequence[str]) -> ShardLayout:
    """Cut layers into one run for each shard, so that the largest has as few bytes as it can.

    (Di-PS, 3: each server manages several layers; the paper does not say which.)

    Raises:
        ValueError: there are fewer layers than shards, or no shards.

    >>> from spantrain.core.outer_layers import ParameterSpec
    >>> layers = [Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(n,)),))
    ...           for k, n in enumerate((8, 1, 1, 3, 3))]
    >>> [list(run.layers) for run in divide(layers, ("s0", "s1")).runs]
    [[0], [1, 2, 3, 4]]
    """
    if not 1 <= len(shards) <= len(layers):
        raise ValueError(
            f"each shard needs a layer at least: got {len(shards)} shards for {len(layers)} layers; "
            f"use 1 to {len(layers)} shards"
        )
    sums = [0, *accumulate(layer.size_bytes for layer in layers)]
    low, high = max(layer.size_bytes for layer in layers), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _ends(sums, len(shards), middle)[-1] == len(layers):
            high = middle
        else:
            low = middle + 1
    ends = _ends(sums, len(shards), low)
    firsts = (0, *ends[:-1])
    runs = (ShardRun(shard=shard, first=k, end=end) for shard, k, end in zip(shards, firsts, ends, strict=True))
    return ShardLayout(layers=tuple(layers), runs=tuple(runs))


def _ends(sums: Sequence[int], shards: int, capacity_bytes: int) -> list[int]:
    """Return where runs end that are as long as a capacity lets them be, with a layer left for each further shard."""
    ends: list[int] = []
    first = 0
    for later in reversed(range(shards)):
        fits = bisect_right(sums, sums[first] + capacity_bytes) - 1
        first = min(fits, len(sums) - 1 - later)
        ends.append(first)
    return ends
