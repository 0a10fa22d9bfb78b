"""The search over counts of alike devices: its reckoning beside the engine, its cuts and plans beside trying all."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.planner.request import Constraints, Objective
from spantrain.planner.strategies.pools.costs import DevicePool, Goal, PoolPlan, PoolReplica, PoolStage
from spantrain.planner.strategies.pools.cutting import TableStack, least_bottlenecks, least_sums, ranges
from spantrain.planner.strategies.pools.placing import StageSeconds, one_f_one_b_ends_s
from spantrain.planner.strategies.pools.recipes import StageChain
from spantrain.planner.strategies.pools.search import RankedPlan, contenders, neighbours
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain_studies.reference.pools import hosts_of
from testing.plans import plan_of

SECONDS = st.integers(0, 20).map(lambda value: value / 10)
NEAR, FAR = PoolReplica(0, 1), PoolReplica(1, 2)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4), count=st.integers(1, 9))
def test_one_pipeline_takes_what_the_engine_says(rows, count):
    """Forward, backward and the delays behind a stage; links are never busy."""
    depth = len(rows)
    plan = plan_of([(equal_spans(count, 1), [1.0], [min(depth - s, count)]) for s in range(depth)], "1f1b")
    costs = TableCosts(
        sample_s=tuple(
            {Op.FORWARD: forward, Op.BACKWARD_INPUT: backward, Op.BACKWARD_WEIGHT: 0.0}
            for forward, backward, _, _ in rows
        ),
        latency_s=tuple(delay for _, _, delay, _ in rows[:-1]),
        forward_s=(0.0,) * (depth - 1),
        backward_s=(0.0,) * (depth - 1),
    )
    stages = [
        StageSeconds(
            forward_s=forward, backward_s=backward, delay_up_s=delay, delay_down_s=rows[s - 1][2] if s else 0.0
        )
        for s, (forward, backward, delay, _) in enumerate(rows)
    ]
    whole = simulate(plan, costs, steps=1, options=SimulationOptions(trace=False))
    assert max(one_f_one_b_ends_s(stages, count)) == pytest.approx(whole.pipeline_s)


def test_many_micro_batches_each_take_as_long_as_the_slowest_stage():
    stages = [StageSeconds(1.0, 2.0), StageSeconds(0.5, 0.5, hold_forward_s=0.25), StageSeconds(2.0, 2.5)]
    few, many = (max(one_f_one_b_ends_s(stages, count)) for count in (40, 140))
    assert many - few == pytest.approx(100 * 4.5)


@given(
    stages=st.integers(1, 4),
    values=st.lists(st.lists(st.integers(1, 9), min_size=5, max_size=5), min_size=1, max_size=3),
    factors=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    looser=st.lists(st.sampled_from((1.0, 1.3, 2.0)), min_size=1, max_size=2),
)
def test_cuts_are_the_best_of_all(stages, values, factors, looser):
    """Of several chains at once, under several limits."""
    units, stack = len(values[0]), TableStack(len(values[0]) + 1)
    nothing = np.tri(units + 1, dtype=bool)
    chains = []
    for row in values:
        sums = np.cumsum([0.0, *row])
        chains.append([factors[s] * np.where(nothing, math.inf, sums[None, :] - sums[:, None]) for s in range(stages)])
    numbers = np.array([[stack.add(table) for table in chain] for chain in chains])
    tables = [stack.taken(numbers[:, s], *ranges(units, stages, s)) for s in range(stages)]
    slowest = least_bottlenecks(tables)
    limits = slowest[:, None] * np.array(looser)
    totals, begins = least_sums(tables, limits)
    for number, chain in enumerate(chains):

        def seconds(row, chain=chain):
            return [float(chain[s][i, j]) for s, (i, j) in enumerate(zip(row, (*row[1:], units), strict=True))]

        every = [seconds((0, *cuts)) for cuts in combinations(range(1, units), stages - 1)]
        assert slowest[number] == min(max(row) for row in every)
        for at, limit in enumerate(limits[number]):
            assert totals[number, at] == min(sum(row) for row in every if max(row) <= limit)
            assert sum(seconds(begins[number, at].tolist())) == totals[number, at]


def test_groups_do_not_span_hosts():
    pools = (
        DevicePool(kind="fast", site="here", count=8, host_size=4),
        DevicePool(kind="slow", site="here", count=4, host_size=2),
    )
    plan = PoolPlan(
        micro_batch=1,
        micro_batches=1,
        stages=(
            PoolStage(units=range(2), runs=((PoolReplica(0, 1), 2),)),
            PoolStage(units=range(2, 3), runs=((PoolReplica(0, 2), 1), (PoolReplica(0, 4), 1))),
            PoolStage(units=range(3, 4), runs=((PoolReplica(1, 2), 2),)),
        ),
    )
    (a, b), (pair, four), slow = hosts_of(plan, pools)
    assert len({four, pair}) == 2
    assert a == b == pair
    assert len({*slow, pair, four}) == 4
    assert plan.devices_by_pool == {0: 8, 1: 4}
    assert sum(plan.pipelines().values()) == 2


def test_neighbours_use_what_there_is():
    start = StageChain(size=1, width=4, micro_batches=8, recipes=(((NEAR, 4),), ((FAR, 4),)))
    available, degrees = {0: 9, 1: 12}, {0: (1, 2), 1: (1, 2)}
    found = list(neighbours(start, available, degrees, units=5))
    assert len(set(found)) > 10
    for candidate in found:
        assert candidate.recipes
        assert all(sum(count for _, count in recipe) == 4 for recipe in candidate.recipes)
        assert all(used <= available[pool] for pool, used in candidate.devices_by_kind.items())
    assert any(len(recipe) == 2 for candidate in found for recipe in candidate.recipes), "none has mixed stages"


def test_goal_counts_what_is_broken_first():
    goal = Goal.of(Objective.COST, Constraints(min_samples_per_s=10.0, max_usd_per_step=2.0), global_batch=40)
    assert goal.most_step_s == 4.0
    assert goal.score(4.0, 0.25) == (0.0, 1.0, 4.0)
    assert goal.score(8.0, 0.1)[0] == 1.0
    assert goal.score(2.0, 2.0)[0] == 1.0
    assert not Goal.of(Objective.THROUGHPUT, Constraints(), 1).counts_money


def test_a_pool_needs_devices():
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        DevicePool(kind="fast", site="here", count=0, host_size=4)


def test_neither_other_sites_nor_more_of_them_push_plans_out_of_simulation():
    """Of one site with many plans, of it with another, of that one alone, and of one that is far behind."""

    class Costs:
        pools = tuple(DevicePool(kind="fast", site=site, count=8, host_size=8) for site in ("a", "b", "far"))

    def ranked(step_s, *pools):
        runs = tuple((PoolReplica(pool, 1), 1) for pool in pools)
        plan = PoolPlan(micro_batch=1, micro_batches=1, stages=(PoolStage(units=range(1), runs=runs),))
        return RankedPlan(plan=plan, score=(0.0, step_s, step_s))

    rows = [ranked(1 + number / 100, 0) for number in range(10)]
    both, alone, far = ranked(1.2, 0, 1), [ranked(1.3 + number / 100, 1) for number in range(4)], ranked(1.6, 2)
    assert contenders(Costs(), [*rows, both, *alone, far], 2) == [*rows[:2], both, *alone[:2]]
    assert contenders(Costs(), [], 2) == []
