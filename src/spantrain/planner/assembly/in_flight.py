"""Bytes that one sample in flight holds of every span of units, as an array: what the tables of planners read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spantrain.core.shares import ALONE, MemberShare
from spantrain.core.units import UnitGraph

_Array = NDArray[np.float64]


def in_flight_bytes(
    graph: UnitGraph, points: Sequence[int] | None = None, *, splits: bool, tp_share: MemberShare = ALONE
) -> _Array:
    """Return what `MemoryCost.in_flight_bytes_per_sample` says of units points[i] to points[j] - 1, as [i, j].

    0 where there are none. `points` are rising numbers of units from 0 to all of them; None: every one. `splits`: as in
    `cost.memory.Division`. `tp_share`: what a member of a tensor-parallel group has.
    """
    units = len(graph.units)
    ends = np.arange(units + 1) if points is None else np.array(points)
    held = _held_bytes(graph, ends, tp_share)
    if splits:
        known = _between([float(unit.deferred_bytes_per_sample is None) for unit in graph.units], ends) == 0
        own = [float(graph.stage_deferred_bytes(range(unit, unit + 1), tp_share)) for unit in range(units)]
        # The first stage goes back at once.
        later = known & (ends[:, None] > 0)
        held = np.where(later, np.maximum(held, _between(own, ends)), held)
    return np.where(ends[:, None] < ends[None, :], held, 0.0)


def _held_bytes(graph: UnitGraph, ends: NDArray[np.int64], tp_share: MemberShare) -> _Array:
    """Return the bytes of units, of cuts between them once."""
    units = len(graph.units)
    own = [graph.held_activation_bytes(unit, tp_share) for unit in range(units)]
    cuts = [unit.cut_bytes_per_sample for unit in graph.units[:-1]]
    twice = np.cumsum([0.0, *(min(row) for row in zip(cuts, own[:-1], own[1:], strict=True))])
    inside = twice[np.maximum(ends - 1, 0)][None, :] - twice[np.minimum(ends, units - 1)][:, None]
    return np.asarray(_between(own, ends) - inside)


def _between(values: Sequence[float], ends: NDArray[np.int64]) -> _Array:
    sums = np.cumsum([0.0, *values])[ends]
    return np.asarray(sums[None, :] - sums[:, None])
