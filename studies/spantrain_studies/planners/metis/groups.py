"""Device groups of Metis: orders of kinds, and groups of uneven size but even capacity."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

Arrangement = tuple[int, ...]
"""How many devices, next to each other in an order, each group has."""

_ALL_ORDERS_UP_TO = 3
"""Kinds, up to which all their orders are tried; of more, fastest first and fastest last."""
_UNEVEN = 2.0
"""A group has at most so many times the capacity that it should have, and at least the inverse."""
_LOOKED_AT = 32
"""Arrangements found, of which the most even ones are returned."""


def kind_orders(speed_by_kind: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """Return orders of kinds to try: their devices come along the pipeline like that.

    >>> kind_orders({"slow": 1.0, "fast": 2.0})
    (('fast', 'slow'), ('slow', 'fast'))
    """
    fastest_first = sorted(speed_by_kind, key=lambda kind: -speed_by_kind[kind])
    if len(fastest_first) <= _ALL_ORDERS_UP_TO:
        return tuple(permutations(fastest_first))
    return tuple(fastest_first), tuple(reversed(fastest_first))


def arrangements(capacity: Sequence[float], groups: int, most: int) -> tuple[Arrangement, ...]:
    """Return ways to divide devices, in their order, into so many groups; those of the most even capacity first.

    Groups have a power of two of devices; the last one has what is left.

    >>> arrangements([1, 1, 1, 1, 2, 2], 3, most=1)
    ((2, 2, 2),)
    >>> arrangements([4, 4, 1, 1, 1, 1], 3, most=2)
    ((1, 1, 4), (2, 2, 2))
    """
    sums = [0.0]
    for value in capacity:
        sums.append(sums[-1] + value)
    mean = sums[-1] / groups

    def worst(sizes: Arrangement) -> float:
        ends = [sum(sizes[: index + 1]) for index in range(groups)]
        own = [sums[end] - sums[end - size] for end, size in zip(ends, sizes, strict=True)]
        return max(own) / mean

    found = []
    for sizes in _divided(sums, 0, groups):
        found.append(sizes)
        if len(found) == _LOOKED_AT:
            break
    return tuple(sorted(found, key=worst)[:most])


def _divided(sums: Sequence[float], first: int, groups: int) -> Iterator[Arrangement]:
    """Yield sizes of the groups from a device on, by depth: the size next to the mean of what is left first."""
    left = len(sums) - 1 - first
    if groups == 1:
        yield (left,)
        return
    wanted = (sums[-1] - sums[first]) / groups
    sizes = [1 << power for power in range((left - groups + 1).bit_length()) if (1 << power) <= left - groups + 1]

    def ratio(size: int) -> float:
        own = sums[first + size] - sums[first]
        return max(own / wanted, wanted / own)

    for size in sorted(sizes, key=ratio):
        if ratio(size) > _UNEVEN:
            break
        for rest in _divided(sums, first + size, groups - 1):
            yield (size, *rest)
