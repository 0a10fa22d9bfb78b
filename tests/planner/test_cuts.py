from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.planner.assembly.assemble import least_largest
from spantrain.planner.strategies.spantrain.tables import HopArrays, SlotArrays
from spantrain.planner.strategies.spantrain_dp.search import best_cuts


def objective(slots, hops, begins):
    """Equation 1 written out: what is passed before the critical slot or link, both ways, and its own time."""
    worst = passed = 0.0
    for k, (slot, i, j) in enumerate(zip(slots, begins[:-1], begins[1:], strict=True)):
        worst = max(worst, passed + slot.run[i, j])
        if k < len(hops):
            passed += slot.turn[i, j] + hops[k].turn[j]
            worst = max(worst, passed + hops[k].busy[j])
    return worst


def tables(rng, units, count):
    def spans(values):
        table = np.full((units + 1, units + 1), np.inf)
        for i in range(units):
            for j in range(i + 1, units + 1):
                table[i, j] = values[i:j].sum()
        return table

    slots, hops = [], []
    for _ in range(count):
        work = rng.uniform(0.1, 5, units)
        run, turn = spans(work), np.where(np.isinf(spans(work)), 0.0, spans(work * rng.uniform(0, 0.5)))
        run[rng.random(run.shape) < 0.1] = np.inf
        slots.append(
            SlotArrays(run=run, sums=np.zeros_like(run), back=turn, turn=turn, pace=turn, refills=np.ones_like(run))
        )
    for _ in range(count - 1):
        turn, busy = rng.uniform(0, 2, units + 1), rng.uniform(0, 10, units + 1)
        hops.append(HopArrays(back=turn, turn=turn, busy=busy))
    return slots, hops


def all_begins(units, count):
    return [(0, *cuts, units) for cuts in combinations(range(1, units), count - 1)]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), units=st.integers(4, 7), count=st.integers(1, 4))
def test_the_dynamic_programme_finds_the_optimum(seed, units, count):
    slots, hops = tables(np.random.default_rng(seed), units, count)
    value, begins = best_cuts(slots, hops)
    best = min(objective(slots, hops, each) for each in all_begins(units, count))
    assert value == pytest.approx(best)
    if value < float("inf"):
        assert objective(slots, hops, begins) == pytest.approx(best)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), units=st.integers(4, 7), count=st.integers(1, 4))
def test_the_most_even_spread_is_found(seed, units, count):
    rng = np.random.default_rng(seed)
    costs = [rng.uniform(0, 1, (units + 1, units + 1)) for _ in range(count)]
    value, begins = least_largest(costs)
    assert value == pytest.approx(
        min(max(costs[k][b[k], b[k + 1]] for k in range(count)) for b in all_begins(units, count))
    )
    assert value == pytest.approx(max(costs[k][begins[k], begins[k + 1]] for k in range(count)))
