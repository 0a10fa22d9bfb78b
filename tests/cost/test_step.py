from dataclasses import replace

import pytest

from spantrain.core.shares import StateSharding
from spantrain.cost.step import StepCost
from spantrain.formats.registry import WireFormat


def test_one_device_takes_its_work_and_nothing_else(cost_profile, make_cost_plan):
    estimate = StepCost(cost_profile).estimate(make_cost_plan((3, {"a0": 1})))
    assert estimate.step_s == pytest.approx(4 * 3 * 0.003 * 4)
    assert estimate.bound_by.startswith("stage 0 (units 0-2 on a0")
    assert estimate.tied_s == 0.0


def test_a_slow_stage_rules_after_its_fill(cost_profile, make_cost_plan):
    estimate = StepCost(cost_profile).estimate(make_cost_plan((1, {"a0": 1}), (3, {"b0": 1})))
    fill = 0.003 + 0.01 + 2000 / 1e6
    run = 4 * 2 * 0.01 * 4
    assert estimate.bound_by.startswith("stage 1")
    paper = fill + run + 0.01 + 2000 / 1e6 + 0.006
    assert estimate.bound_s == pytest.approx(fill + run)
    assert estimate.tied_s == pytest.approx(0.01 + 1000 / 1e6)
    assert estimate.step_s == pytest.approx((estimate.bound_s + paper) / 2 + estimate.tied_s)


def test_a_narrow_link_rules(cost_profile, make_cost_plan):
    narrow = tuple(
        replace(link, bandwidth_bytes_per_s=1e3) if "b0" in (link.source, link.target) else link
        for link in cost_profile.links
    )
    estimate = StepCost(replace(cost_profile, links=narrow)).estimate(make_cost_plan((1, {"a0": 1}), (3, {"b0": 1})))
    assert estimate.bound_by in ("link near->far", "link far->near")
    assert estimate.step_s > 8 * 1000 / 1e3


def test_stage_pairs_on_one_link_add_up(cost_profile, make_cost_plan):
    cost = StepCost(cost_profile)
    plan = make_cost_plan((1, {"a0": 1}), (2, {"b0": 1}), (3, {"a1": 1}))
    hops = cost._hops(plan)
    # Up near->far carries the first cut forward and the second cut's gradient.
    assert hops[0][0].link == hops[1][1].link == "near->far"
    assert hops[0][0].busy == pytest.approx(2 * 8 * 1000 / 1e6 + 0.01)


def ring_s(size_bytes: float) -> float:
    """Between two devices, 1 ms apart: for each half a receiver's word, and half of the bytes in two segments."""
    return 2 * (1e-3 + size_bytes / 2 / 1e8 + 1e-3)


def test_replicas_share_the_work_and_pay_the_sum(cost_profile, make_cost_plan):
    estimate = StepCost(cost_profile).estimate(make_cost_plan((3, {"a0": 1, "a1": 1}), size=4))
    # What units 0 and 2 share is summed once.
    assert estimate.bound_s == pytest.approx(2 * 3 * 0.003 * 4 + ring_s(11000))


def test_few_samples_in_flight_cost_round_trips(cost_profile, make_cost_plan):
    cost = StepCost(cost_profile)
    parts = (1, {"a0": 1}), (3, {"b0": 1})
    free, tight = cost.estimate(make_cost_plan(*parts)), cost.estimate(make_cost_plan(*parts, limit=2))
    assert tight.step_s > free.step_s
    assert tight.bound_by.startswith("memory of stage")


def test_a_rounded_cut_keeps_its_link_busy_half_as_long(cost_profile, make_cost_plan):
    cost = StepCost(cost_profile)
    plan = make_cost_plan((1, {"a0": 1}), (2, {"b0": 1}), (3, {"a1": 1}))
    first, *others = plan.stages
    rounded = replace(plan, stages=(replace(first, wire_format=WireFormat.BFLOAT16), *others))
    exact, halved = cost._hops(plan), cost._hops(rounded)
    for whole, half in zip(exact[0], halved[0], strict=True):
        assert half.first - 0.01 == pytest.approx((whole.first - 0.01) / 2)
        # The ways between the sites carry one cut whole and one rounded.
        assert half.busy - 0.01 == pytest.approx((whole.busy - 0.01) * 3 / 4)
    assert halved[1][0].first == exact[1][0].first


def test_the_estimate_counts_sharded_state(cost_profile, make_cost_plan):
    cost = StepCost(cost_profile)
    plan = make_cost_plan((3, {"a0": 1, "a1": 1}), size=4)
    (stage,) = plan.stages
    run_s = 2 * 3 * 0.003 * 4
    none, one, two, three = (
        cost.estimate(replace(plan, stages=(replace(stage, state_sharding=sharding),))).bound_s - run_s
        for sharding in (StateSharding.NONE, StateSharding.ZERO1, StateSharding.ZERO2, StateSharding.ZERO3)
    )
    assert none == pytest.approx(ring_s(11000))
    # Gradients go half the way, and all new parameters are gathered; or the first unit's of one of them, or of both.
    assert one == pytest.approx((11000 + 11000) / 2 / 1e8 + 2 * 1e-3)
    assert two == pytest.approx((4000 + 11000) / 2 / 1e8 + 2 * 1e-3)
    assert three == pytest.approx((4000 + 4000) / 2 / 1e8 + 2 * 1e-3)
