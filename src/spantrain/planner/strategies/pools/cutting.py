"""Cuts of many chains of stages at once, by a dynamic programme over units on whole arrays.

A chain of S stages over N units has N-S+1 places for each of its cuts, since no stage is empty: stage s begins at unit
s + a and ends in front of unit s + 1 + b, with a and b from 0 to N-S. The seconds of a stage are a square, `[a, b]`.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spantrain.cost.span_tables import Array

Numbers = NDArray[np.int64]

_FIRST_ROOM = 64


def ranges(units: int, stages: int, stage: int) -> tuple[slice, slice]:
    """Return the rows and columns of a table of all ranges of units that a stage of a chain may have."""
    width = units - stages + 1
    return slice(stage, stage + width), slice(stage + 1, stage + 1 + width)


class TableStack:
    """Tables of one shape in one array, so that parts of many are taken out at once."""

    def __init__(self, points: int) -> None:
        self._room, self._count = np.zeros((_FIRST_ROOM, points, points)), 0

    def __len__(self) -> int:
        return self._count

    def add(self, table: Array) -> int:
        """Add a table; return its place."""
        if self._count == len(self._room):
            self._room = np.concatenate((self._room, np.zeros_like(self._room)))
        self._room[self._count] = table
        self._count += 1
        return self._count - 1

    def taken(self, places: Numbers, rows: slice, columns: slice) -> Array:
        """Return a part of each of several tables, as [number, row, column]."""
        return np.asarray(self._room[places, rows, columns])

    def entries(self, places: Numbers, rows: Numbers, columns: Numbers) -> Array:
        """Return one entry of each of several tables."""
        return np.asarray(self._room[places, rows, columns])

    def clear(self) -> None:
        """Forget all tables."""
        self._count = 0


def least_bottlenecks(stages: Sequence[Array]) -> Array:
    """Return the least that the slowest stage of each chain can take; `stages[s][chain, a, b]` are seconds.

    Infinite entries are what does not fit, or no units at all.

    >>> least_bottlenecks([np.array([[[1, 3], [np.inf, 2]]]), np.array([[[2, 4], [np.inf, 2]]])])
    array([3.])
    """
    best = stages[0][:, 0]
    for stage in stages[1:]:
        best = np.maximum(best[:, :, None], stage).min(axis=1)
    return np.asarray(best[:, -1])


def least_sums(stages: Sequence[Array], most_s: Array) -> tuple[Array, Numbers]:
    """Return the least sums of the stages' seconds, none of them over a limit, and the first unit of each stage.

    `most_s[chain, limit]` are the limits; returned are `[chain, limit]` and `[chain, limit, stage]`.
    """
    bests = [np.where(stages[0][:, None, 0] <= most_s[..., None], stages[0][:, None, 0], math.inf)]
    for stage in stages[1:]:
        allowed = np.where(stage[:, None] <= most_s[..., None, None], stage[:, None], math.inf)
        bests.append((allowed + bests[-1][..., None]).min(axis=-2))
    begins = np.zeros((*most_s.shape, len(stages)), dtype=np.int64)
    chain = np.arange(len(most_s))[:, None]
    here = np.full(most_s.shape, bests[0].shape[-1] - 1)
    for number in range(len(stages) - 1, 0, -1):
        column = stages[number].swapaxes(1, 2)[chain, here]
        sums = np.where(column <= most_s[..., None], column, math.inf) + bests[number - 1]
        here = sums.argmin(axis=-1)
        begins[..., number] = number + here
    return bests[-1][..., -1], begins
