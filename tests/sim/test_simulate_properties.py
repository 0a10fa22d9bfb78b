"""Any plan, any schedule: all work once, within memory, not faster than possible, every sample sent once."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.plan import Plan
from spantrain.core.span import Coverage, Span
from spantrain.errors import ScheduleError
from spantrain.schedule.layout import CutLayout, check_limits
from spantrain.schedule.orders import check_orders
from spantrain.schedule.registry import schedule_names
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate

few = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def by_replica(plan: Plan, result: SimulationResult) -> list[list[tuple[object, ...]]]:
    return [[result.orders[replica.devices[0]] for replica in stage.replicas] for stage in plan.stages]


@few
@given(data=st.data())
def test_every_schedule_does_all_work_within_memory_and_no_faster_than_possible(data, plans, table_costs) -> None:
    plan: Plan = data.draw(plans)
    costs: TableCosts = data.draw(table_costs(plan))
    options = SimulationOptions(split_backward=data.draw(st.sampled_from([None, True, False])))
    assert check_limits(plan) == []
    bound_s = pipeline_bound_s(plan, costs)
    for schedule in schedule_names():
        result = simulate(replace(plan, schedule=schedule), costs, steps=2, options=options)
        check_orders(by_replica(plan, result), CutLayout.of(plan))
        for stage in plan.stages:
            for replica in stage.replicas:
                assert result.peak_in_flight[replica.devices[0]] <= replica.in_flight_limit
        assert result.pipeline_s >= bound_s - 1e-9, (schedule, result.pipeline_s, bound_s)
        assert result.step_s >= result.pipeline_s - 1e-9
        assert all(-1e-9 <= ratio <= 1 + 1e-9 for ratio in result.bubble_ratio.values())
        check_messages(plan, result)


def check_messages(plan: Plan, result: SimulationResult) -> None:
    """Every sample crosses every cut once in each direction, in every step."""
    crossed: dict[tuple[str, str], Coverage] = {}
    for flow in result.trace.flows:
        step, lane, cut, span = re.fullmatch(r"g0/s(\d+)/(\w+)/cut(\d+)(\[.*\])", flow.name).groups()
        assert int(step) == flow.step
        crossed.setdefault((step, f"{lane} {cut}"), Coverage()).add(Span.parse(span))
    assert len(crossed) == 2 * 2 * (len(plan.stages) - 1)
    assert all(coverage.total == plan.global_batch for coverage in crossed.values())
    assert sum(result.link_bytes.values()) == 2 * (len(plan.stages) - 1) * plan.global_batch


@few
@given(data=st.data())
def test_a_limit_one_sample_too_small_is_found_before_the_run_and_stops_it(data, plans, table_costs) -> None:
    plan: Plan = data.draw(plans)
    smaller = tighten(data, plan)
    if smaller is None:
        return
    found = check_limits(smaller)
    costs: TableCosts = data.draw(table_costs(plan))
    if found:
        with pytest.raises(ScheduleError, match="waits for room"):
            simulate(replace(smaller, schedule="critical-path"), costs, steps=1)
    else:
        simulate(replace(smaller, schedule="critical-path"), costs, steps=1)


def tighten(data: st.DataObject, plan: Plan) -> Plan | None:
    """Take one sample from one replica's limit, where its own micro-batches still fit."""
    stage = data.draw(st.integers(0, len(plan.stages) - 1))
    replica = data.draw(st.integers(0, len(plan.stages[stage].replicas) - 1))
    chosen = plan.stages[stage].replicas[replica]
    largest = max((span.size for span in plan.stages[stage].replica_spans(replica)), default=0)
    if chosen.in_flight_limit <= max(largest, 1):
        return None
    replicas = list(plan.stages[stage].replicas)
    replicas[replica] = replace(chosen, in_flight_limit=chosen.in_flight_limit - 1)
    stages = list(plan.stages)
    stages[stage] = replace(stages[stage], replicas=tuple(replicas))
    return replace(plan, stages=tuple(stages))


@few
@given(data=st.data())
def test_the_same_events_give_the_same_run(data, plans, table_costs: Callable[..., object]) -> None:
    plan: Plan = data.draw(plans)
    costs = data.draw(table_costs(plan))
    first, second = (simulate(replace(plan, schedule="critical-path"), costs, steps=2) for _ in range(2))
    assert first == second
