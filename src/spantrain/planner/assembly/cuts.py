"""The dynamic programme that places the cuts (SpanTrain, Chinese paper, section 2.2 and figure 6)."""

from collections.abc import Sequence

import numpy as np

from spantrain.planner.assembly.tables import Array, HopTable, SlotTable


def best_cuts(slots: Sequence[SlotTable], hops: Sequence[HopTable]) -> tuple[float, tuple[int, ...]]:
    """Place the cuts so that the paper's objective is least, exactly, over units and slots.

    The objective is equation 1 with the critical slot c found by the maximum: everything that a micro-batch passes
    before c, on the way up (equation 2) and down (equation 4), plus the run and weight sync of c (equations 3, 5);
    a link that is busier than any slot rules in the same way. It nests, so that one value per (slot, unit) is
    enough: V_k(i) = min over j of max(run_k(i,j), turn_k(i,j) + hop_k(j) + max(V_k+1(j), busy_k(j))).

    Returns the seconds (infinite if nothing fits) and the unit in front of which each slot begins, then the end.
    """
    units = slots[0].run.shape[0] - 1
    value: Array = slots[-1].run[:, units]
    choices: list[np.ndarray] = []
    for slot, hop in zip(reversed(slots[:-1]), reversed(hops), strict=True):
        beyond = hop.turn + np.maximum(value, hop.busy)
        table = np.maximum(slot.run, slot.turn + beyond[None, :])
        choice = table.argmin(axis=1)
        value = table[np.arange(units + 1), choice]
        choices.append(choice)
    begins = [0]
    for choice in reversed(choices):
        begins.append(int(choice[begins[-1]]))
    return float(value[0]), (*begins, units)


def least_largest(costs: Sequence[Array]) -> tuple[float, tuple[int, ...]]:
    """Place the cuts so that the largest cost is least; `costs[k][i, j]` is that of units i to j-1 in place k."""
    units = costs[0].shape[0] - 1
    allowed = np.tril(np.ones((units + 1, units + 1))) == 0
    value: Array = np.where(allowed, costs[-1], np.inf)[:, units]
    choices: list[np.ndarray] = []
    for cost in reversed(costs[:-1]):
        table = np.maximum(np.where(allowed, cost, np.inf), value[None, :])
        choice = table.argmin(axis=1)
        value = table[np.arange(units + 1), choice]
        choices.append(choice)
    begins = [0]
    for choice in reversed(choices):
        begins.append(int(choice[begins[-1]]))
    return float(value[0]), (*begins, units)
