"""Which part of a tensor a member of a tensor-parallel group holds."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from spantrain.core.span import Span, apportion


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Some indices of one dimension of a tensor, in the order in which they lie in the part.

    A fused projection (queries, keys and values beside each other) has several ranges: its heads of each of the three.

    >>> TensorPart(full_shape=(12, 4), dim=0, ranges=(Span(0, 2), Span(4, 6), Span(8, 10))).shape
    (6, 4)
    """

    full_shape: tuple[int, ...]
    """Of the unsplit model's tensor."""
    dim: int = 0
    """Along which it is divided."""
    ranges: tuple[Span, ...] = ()
    """Indices along `dim`, apart from each other; empty: the whole tensor, as every member of the group holds it."""

    def __post_init__(self) -> None:
        if not self.ranges:
            return
        if not 0 <= self.dim < len(self.full_shape):
            raise ValueError(f"dim {self.dim} of a tensor of shape {self.full_shape}")
        ordered = sorted(self.ranges)
        if ordered[-1].hi > self.full_shape[self.dim]:
            raise ValueError(f"{ordered[-1]} reaches beyond dimension {self.dim} of {self.full_shape}")
        if any(before.hi > after.lo for before, after in itertools.pairwise(ordered)):
            raise ValueError(f"ranges overlap: {ordered}")

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return not self.ranges

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        if self.is_whole:
            return self.full_shape
        length = sum(span.size for span in self.ranges)
        return (*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :])


def divide_pieces(count: int, shares: Sequence[float]) -> tuple[Span, ...]:
    """Divide `count` whole pieces (heads, columns) by shares, as `spans.apportion` does, but at least one for each.

    Raises:
        ValueError: there are fewer pieces than members.

    >>> divide_pieces(12, (2.0, 1.0))
    (Span(lo=0, hi=8), Span(lo=8, hi=12))
    >>> [span.size for span in divide_pieces(4, (100.0, 1.0, 1.0))]
    [2, 1, 1]
    """
    if count < len(shares):
        raise ValueError(f"{count} pieces cannot be divided among {len(shares)} devices: each needs at least one")
    sizes = list(apportion(count, shares))
    for index, size in enumerate(sizes):
        if size == 0:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[index] = 1
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(Span(end - size, end) for end, size in zip(ends, sizes, strict=True))
