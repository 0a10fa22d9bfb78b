"""Micro-batches that are cut otherwise at any moment: all work once, within memory, nobody stops, and it replays."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.adaptation.local import AutoLocal, LocalAdapter
from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.span import Coverage, Span, equal_spans
from spantrain.core.speed import SpeedTrace
from spantrain.schedule.dispatch.recut import halved
from spantrain.schedule.layout import CutLayout, minimum_in_flight
from spantrain.schedule.registry import schedule_names
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import SearchEffort, with_hints
from testing.restless import RestlessLocal

few = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def check_all_work_once(plan: Plan, result: SimulationResult) -> None:
    parts = {Op.FORWARD: "F", Op.BACKWARD: "IW", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
    for stage in plan.stages:
        done = {part: Coverage() for part in "FIW"}
        for replica in stage.replicas:
            for action in result.orders[replica.devices[0]]:
                for part in parts[action.op]:
                    done[part].add(action.span)
            assert result.peak_in_flight[replica.devices[0]] <= replica.in_flight_limit
        assert all(coverage.total == plan.global_batch for coverage in done.values())


@few
@given(data=st.data())
def test_any_recut_of_any_plan_under_any_schedule(data, plans, table_costs) -> None:
    plan: Plan = data.draw(plans)
    costs: TableCosts = data.draw(table_costs(plan))
    seed = data.draw(st.integers(0, 2**16))
    for schedule in schedule_names():
        local = {
            replica.devices[0]: RestlessLocal(seed + index)
            for index, stage in enumerate(plan.stages)
            for replica in stage.replicas
        }
        result = simulate(replace(plan, schedule=schedule), costs, steps=2, options=SimulationOptions(local=local))
        check_all_work_once(plan, result)
        sent = [sum(flow.size_bytes for flow in result.trace.flows if flow.step == step) for step in (0, 1)]
        assert sent == [2 * (len(plan.stages) - 1) * plan.global_batch] * 2


@few
@given(data=st.data())
def test_any_recut_of_a_planned_order(data, plans, table_costs) -> None:
    plan: Plan = data.draw(plans)
    costs: TableCosts = data.draw(table_costs(plan))
    plan = with_hints(replace(plan, schedule="critical-path"), costs, effort=SearchEffort(max_runs=30))
    local = {
        replica.devices[0]: RestlessLocal(data.draw(st.integers(0, 9)))
        for stage in plan.stages
        for replica in stage.replicas
    }
    check_all_work_once(plan, simulate(plan, costs, steps=2, options=SimulationOptions(local=local)))


@few
@given(data=st.data())
def test_finer_micro_batches_need_no_more_room_anywhere(data, plans) -> None:
    """What re-cutting in mid-step rests on."""
    plan: Plan = data.draw(plans)
    layout = CutLayout.of(plan)
    before = minimum_in_flight(layout)
    stage = data.draw(st.integers(0, len(plan.stages) - 1))
    row = list(layout.spans[stage])
    which = data.draw(st.integers(0, len(row) - 1))
    row[which] = halved(row[which])
    spans = (*layout.spans[:stage], tuple(row), *layout.spans[stage + 1 :])
    after = minimum_in_flight(replace(layout, spans=spans))
    assert all(new <= old for a, b in zip(after, before, strict=True) for new, old in zip(a, b, strict=True))


def slow_link_plan(make_plan) -> Plan:
    """Two stages; the first sends 8 samples at a time."""
    return make_plan([(equal_spans(64, 8), [1.0], [64])] * 2, "critical-path")


def link_bound(scale: float = 1.0) -> TableCosts:
    ops = {Op.FORWARD: 0.1 * scale, Op.BACKWARD_INPUT: 0.1 * scale, Op.BACKWARD_WEIGHT: 0.1 * scale}
    return TableCosts(sample_s=(ops, ops), latency_s=(0.05,), forward_s=(0.1,), backward_s=(0.1,))


def runs(plan: Plan, costs: TableCosts, speed: float, kind: type[LocalAdapter]) -> SimulationResult:
    """The third step, in which the link goes at this speed as it did in the second."""
    local = {name: kind() for name in plan.devices}
    first = simulate(plan, costs, steps=1, options=SimulationOptions(local=local))
    slowed = {"0->1": SpeedTrace(changes=((0.0, speed),))}
    clocks = dict.fromkeys(local, first.step_ends_s[-1])
    return simulate(
        plan, costs, steps=2, options=SimulationOptions(link_speed=slowed, local=local, clock_offset_s=clocks)
    )


@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_a_device_cuts_finer_only_where_the_link_is_slow(make_plan, speed) -> None:
    plan, costs = slow_link_plan(make_plan), link_bound()
    off, auto = (runs(plan, costs, speed, kind) for kind in (LocalAdapter, AutoLocal))
    check_all_work_once(plan, auto)
    if speed == 1.0:
        assert auto.orders == off.orders
        assert auto.step_s == off.step_s
        return
    forwards = [action.span for action in auto.orders["s1r0"] if action.op is Op.FORWARD]
    assert {span.size for span in forwards} == {1}, "a sample takes 0.4 s of the link and 0.3 s of work"
    assert auto.step_s < 0.9 * off.step_s
    told = {moment.name[:17]: moment.detail["reason"] for moment in auto.trace.of("s1r0", "adapter")}
    assert "of a slow link" in str(told["recut [0:1] [1:2]"])


def test_where_work_is_the_limit_a_starved_device_begins_with_what_has_come(make_plan) -> None:
    plan, costs = slow_link_plan(make_plan), link_bound(scale=2.0)
    off, auto = (runs(plan, costs, 0.3, kind) for kind in (LocalAdapter, AutoLocal))
    check_all_work_once(plan, auto)
    forwards = [action.span for action in auto.orders["s1r0"] if action.op is Op.FORWARD]
    assert Span(0, 8) not in forwards
    assert Span(56, 64) in forwards, "it starves at the begin only"
    assert auto.step_s < off.step_s
