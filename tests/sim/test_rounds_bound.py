"""The lower bound for micro-batches that are all cut alike: never above what runs, and near it."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.schedule.layout import CutLayout, minimum_in_flight
from spantrain.schedule.registry import schedule_names
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.rounds import one_machine_bound_s
from spantrain.sim.search.model import model_of, run_orders
from testing.plans import plan_of


@st.composite
def alike_plans(draw: st.DrawFn) -> Plan:
    """Stages with the same micro-batches, the last one perhaps smaller; any replicas, any limits that can run."""
    size = draw(st.integers(2, 6))
    spans = equal_spans(draw(st.integers(size, 5 * size)), size)
    shares = [
        [float(share) for share in draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))]
        for _ in range(draw(st.integers(1, 4)))
    ]
    total = spans[-1].hi
    free = plan_of([(spans, row, [total] * len(row)) for row in shares])
    slack = draw(st.sampled_from([0, 2, total]))
    needed = minimum_in_flight(CutLayout.of(free))
    return plan_of(
        [(spans, row, [max(1, least + slack) for least in own]) for row, own in zip(shares, needed, strict=True)]
    )


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_schedule_is_under_it_whatever_replicas_and_limits(data, table_costs) -> None:
    plan = data.draw(alike_plans())
    costs: TableCosts = data.draw(table_costs(plan))
    bound_s = pipeline_bound_s(plan, costs)
    for schedule in schedule_names():
        for split in (None, True):
            options = SimulationOptions(trace=False, split_backward=split)
            result = simulate(replace(plan, schedule=schedule), costs, steps=1, options=options)
            assert result.pipeline_s >= bound_s - 1e-9, schedule


def orders_of(parts: int, count: int) -> list[list[int]]:
    """Return every order of a device: each part by rising micro-batch, and behind the part before."""
    found: list[list[int]] = []

    def extend(order: list[int], done: tuple[int, ...]) -> None:
        if len(order) == parts * count:
            found.append(order)
        for part in range(parts):
            if done[part] < count and (part == 0 or done[part - 1] > done[part]):
                extend([*order, part], (*done[:part], done[part] + 1, *done[part + 1 :]))

    extend([], (0,) * parts)
    return found


def uneven(stages: int, count: int, limit: int) -> tuple[Plan, TableCosts]:
    plan = plan_of([(equal_spans(count, 1), [1.0], [limit])] * stages)
    seconds = [(1.0, 1.3, 0.8), (2.7, 2.2, 2.4), (0.6, 0.9, 0.5)][:stages]
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return plan, TableCosts(
        sample_s=tuple(dict(zip(ops, row, strict=True)) for row in seconds),
        latency_s=(1.9, 0.4)[: stages - 1],
        forward_s=(0.7, 1.6)[: stages - 1],
        backward_s=(0.7, 1.6)[: stages - 1],
    )


@pytest.mark.parametrize(("stages", "count", "limit"), [(2, 3, 3), (2, 3, 2), (2, 3, 1), (3, 2, 2), (3, 2, 1)])
def test_the_best_of_all_orders_is_at_most_three_percent_above_it(stages, count, limit) -> None:
    plan, costs = uneven(stages, count, limit)
    model = model_of(plan, costs)
    orders = [orders_of(len(parts), count) for parts in model.seconds]
    best_s = min(run_orders(model, list(each)).seconds for each in product(*orders))
    bound_s = pipeline_bound_s(plan, costs)
    assert bound_s <= best_s * (1 + 1e-9)
    assert best_s <= bound_s * 1.03


def test_one_machine() -> None:
    assert one_machine_bound_s([]) == 0.0
    assert one_machine_bound_s([(3.0, 2.0, 4.0)]) == 9.0
    # The long tail goes first although the other is there before; broken off, the first ends at 6.
    assert one_machine_bound_s([(0.0, 4.0, 0.0), (1.0, 2.0, 10.0)]) == 13.0
    assert one_machine_bound_s([(0.0, 4.0, 8.0), (1.0, 2.0, 1.0)]) == 12.0
