"""Which layers each shard holds: contiguous runs, as even as can be. And which are of which fragment.

Streaming DiLoCo (Douillard et al., 2025) cuts a model into fragments that are exchanged at different steps; the better
of its two ways is kept: every so many-th layer is of one fragment. Decided here: a fragment has a layout of its own, in
which its layers are numbered anew, with a run on every shard, so that each of its pushes goes to all shards.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from spantrain.core.outer.layers import Layer, ShardLayout, ShardRun


def divide(layers: Sequence[Layer], shards: Sequence[str], *, fragments: int = 1) -> ShardLayout:
    """Cut layers into one run for each shard, so that the largest has as few bytes as it can.

    Each run has a layer of each fragment at least. (Di-PS, 3: each server manages several layers; the paper does not
    say which.)

    Raises:
        ValueError: there are fewer layers than shards, or than all their fragments, or no shards.

    >>> from spantrain.core.outer.layers import ParameterSpec
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
    if len(layers) < fragments * len(shards):
        raise ValueError(
            f"each of {len(shards)} shards needs a layer of each of {fragments} fragments at least: got {len(layers)} "
            f"layers; use 1 to {len(layers) // len(shards)} fragments"
        )
    sums = [0, *accumulate(layer.size_bytes for layer in layers)]
    low, high = max(upto - first for first, upto in zip(sums, sums[fragments:], strict=False)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _ends(sums, len(shards), middle, fragments)[-1] == len(layers):
            high = middle
        else:
            low = middle + 1
    ends = _ends(sums, len(shards), low, fragments)
    firsts = (0, *ends[:-1])
    runs = (ShardRun(shard=shard, first=k, end=end) for shard, k, end in zip(shards, firsts, ends, strict=True))
    return ShardLayout(layers=tuple(layers), runs=tuple(runs))


def _ends(sums: Sequence[int], shards: int, capacity_bytes: int, least: int) -> list[int]:
    """Return where runs end that are as long as a capacity lets them be, with `least` layers left for each further one.

    A run has so many itself: the capacity is no less than theirs.
    """
    ends: list[int] = []
    first = 0
    for later in reversed(range(shards)):
        fits = bisect_right(sums, sums[first] + capacity_bytes) - 1
        first = min(fits, len(sums) - 1 - least * later)
        ends.append(first)
    return ends


def fragment_layers(layers: Sequence[Layer], fragment: int, fragments: int) -> tuple[Layer, ...]:
    """Return the layers of a fragment: of three, layers 0, 3, 6, ... are of the first."""
    return tuple(layers[fragment::fragments])


def fragment_layouts(layout: ShardLayout, fragments: int) -> tuple[ShardLayout, ...]:
    """Return the layout of each fragment; one fragment is the whole.

    Raises:
        ValueError: a shard has fewer layers than there are fragments.

    >>> from spantrain.core.outer.layers import ParameterSpec
    >>> layers = [Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(1,)),)) for k in range(5)]
    >>> for one in fragment_layouts(divide(layers, ("s0", "s1"), fragments=2), 2):
    ...     print([layer.name for layer in one.layers], [(run.shard, run.first, run.end) for run in one.runs])
    ['0', '2', '4'] [('s0', 0, 2), ('s1', 2, 3)]
    ['1', '3'] [('s0', 0, 1), ('s1', 1, 2)]
    """
    short = [run.shard for run in layout.runs if len(run.layers) < fragments]
    if short:
        raise ValueError(
            f"{', '.join(short)} would hold fewer layers than there are fragments, {fragments}; use fewer fragments"
        )
    return tuple(
        ShardLayout(
            layers=fragment_layers(layout.layers, number, fragments),
            runs=tuple(_run_of_fragment(run, number, fragments) for run in layout.runs),
        )
        for number in range(fragments)
    )


def _run_of_fragment(run: ShardRun, fragment: int, fragments: int) -> ShardRun:
    first, end = (_before(layer, fragment, fragments) for layer in (run.first, run.end))
    return ShardRun(shard=run.shard, first=first, end=end)


def _before(layer: int, fragment: int, fragments: int) -> int:
    """Return how many layers of a fragment are before a layer."""
    return -((fragment - layer) // fragments)
