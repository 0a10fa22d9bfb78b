"""Two steps at once, on the virtual clock: every sample once a step, old weights, within the in-flight limit."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.errors import PlanError
from spantrain.schedule.registry import schedule_names
from spantrain.sim.engine import simulate
from spantrain.sim.stale import simulate_stale
from testing.made_up_costs import MadeUpCosts

STEPS = 6


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_plan_does_every_step_whole_and_in_order_within_its_limits(data, plans, table_costs) -> None:
    plan = data.draw(plans)
    costs = data.draw(table_costs(plan))
    try:
        result = simulate_stale(
            replace(plan, schedule=data.draw(st.sampled_from(schedule_names()))), costs, steps=STEPS
        )
    except PlanError:
        return  # a static order that the limit is too small for
    for stage in plan.stages:
        for number, replica in enumerate(stage.replicas):
            (leader,) = replica.devices
            actions = result.trace.of(leader)
            for step in range(STEPS):
                names = [interval.name for interval in actions if interval.step == step]
                for op in "FW":
                    done = [name for name in names if op in name or (op == "W" and "B" in name)]
                    assert len(done) == len(set(done)) == len(stage.replica_spans(number))
            assert result.peak_in_flight[leader] <= replica.in_flight_limit
            assert_in_turn(actions)
    check_weights(plan, result)


def assert_in_turn(actions) -> None:
    """One device does one thing at a time."""
    for before, after in pairwise(actions):
        assert before.end_s <= after.start_s + 1e-9


def check_weights(plan, result) -> None:
    """Step t + 2 begins nowhere before all work of step t is done everywhere and agreed on."""
    for step in range(STEPS - 2):
        over_s = max((i.end_s for d in plan.devices for i in result.trace.of(d, step=step)), default=0.0)
        begun_s = min((i.start_s for d in plan.devices for i in result.trace.of(d, step=step + 2)), default=over_s)
        assert result.step_ends_s[step] >= over_s - 1e-9
        assert begun_s >= result.step_ends_s[step] - 1e-9


@pytest.fixture
def case(make_plan):
    """Four equal stages, far apart, with a long end of a step."""
    plan = make_plan([(equal_spans(8, 1), [1.0], [16])] * 4, "critical-path")
    costs = MadeUpCosts(
        sample_s=({Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0},) * 4,
        latency_s=(4.0,) * 3,
        forward_s=(0.5,) * 3,
        backward_s=(0.5,) * 3,
        commit_s=6.0,
    )
    return plan, costs


@pytest.mark.parametrize("schedule", schedule_names())
def test_the_next_step_fills_what_the_end_of_a_step_leaves_idle(case, schedule) -> None:
    plan, costs = case
    exact, stale = (
        simulate(replace(plan, schedule=schedule), costs),
        simulate_stale(replace(plan, schedule=schedule), costs),
    )
    work_s = 8 * 3.0
    assert work_s <= stale.step_s < 0.75 * exact.step_s
    assert stale.samples_per_s == pytest.approx(8 / stale.step_s)
    assert stale.link_bytes == exact.link_bytes
    assert stale.utilisation["s0r0"] == pytest.approx(work_s / stale.step_s)


def test_two_steps_that_cover_the_way_up_and_down_leave_no_bubble(case) -> None:
    plan, costs = case
    near = replace(costs, latency_s=(0.5,) * 3)
    assert simulate_stale(plan, near, steps=20).step_s == pytest.approx(24.0, rel=0.06)
    assert simulate(plan, near).step_s > 1.4 * 24.0


def test_a_limit_that_holds_little_more_than_one_step_needs_still_runs(case) -> None:
    plan, costs = case
    tight = replace(
        plan,
        stages=tuple(
            replace(stage, replicas=tuple(replace(own, in_flight_limit=2) for own in stage.replicas))
            for stage in plan.stages
        ),
    )
    stale = simulate_stale(tight, costs)
    assert set(stale.peak_in_flight.values()) == {2}
    assert stale.step_s < simulate(tight, costs).step_s


def test_what_it_cannot_do_is_refused(case) -> None:
    plan, costs = case
    with pytest.raises(ValueError, match="four of them or more, got 3"):
        simulate_stale(plan, costs, steps=3)
