"""What the adapter decides between steps, asked without any simulator: a forecast that is a table."""

import math
from dataclasses import replace

import pytest

from spantrain.adaptation.boundary import AutoBoundary, AutoSettings
from spantrain.adaptation.registry import make_boundary, make_local
from spantrain.formats.registry import WireFormat
from testing import four_sites
from testing.link_table import LINKS, STEP_S, TableForecast, begun, reports, twice


def test_a_rate_inside_the_band_is_not_looked_at():
    plan, forecast, boundary = begun()
    for part in (1.0, 0.8, 1.3, 0.78, 3.0):
        assert boundary.advise(3, plan, reports(plan, part), STEP_S) is None
    assert not forecast.asked
    assert boundary.state.calm


def test_a_rate_a_little_outside_must_stay_there_for_two_steps():
    _, _, boundary = begun()
    plan = four_sites.plan(0.01)
    assert boundary.advise(3, plan, reports(plan, 0.7), STEP_S) is None
    assert boundary.advise(4, plan, reports(plan, 0.9), STEP_S) is None
    assert boundary.advise(5, plan, reports(plan, 0.7), STEP_S) is None
    assert boundary.state.calm
    boundary.advise(6, plan, reports(plan, 0.7), STEP_S)
    assert boundary.state.speed("s0r0", "s1r0") == pytest.approx(0.7 / 0.9)


@pytest.mark.parametrize(("then", "there"), [(0.45, True), (0.5, True), (0.7, False)])
def test_what_was_found_for_the_last_messages_of_a_step_is_there_at_once_if_the_next_step_is_like_those(then, there):
    """The first step is in the middle of a change: half its rate is that of the links before."""
    plan, forecast, boundary = begun()
    mixed = reports(plan, 0.65, newest=dict.fromkeys(LINKS, 0.45))
    assert boundary.advise(3, plan, mixed, STEP_S) is None
    assert boundary.state.calm
    forecast.asked.clear()
    proposal = boundary.advise(4, plan, reports(plan, then), STEP_S)
    assert proposal is not None
    assert (proposal.simulated == 0) is there
    assert boundary.state.speed("s0r0", "s1r0") == pytest.approx((0.45 if there else then) / 0.9)


def test_only_what_pays_is_taken_and_only_formats_that_are_allowed():
    plan, forecast, boundary = begun()
    proposal = twice(boundary, plan, 0.45)
    assert proposal is not None, "coarser micro-batches cost less here"
    assert all(stage.wire_format is WireFormat.NATIVE for stage in proposal.plan.stages)
    assert all(
        len(new.micro_batches) < len(old.micro_batches)
        for new, old in zip(proposal.plan.stages, plan.stages, strict=True)
    )
    _, _, other = begun(AutoSettings(believed=math.inf, allowed=(WireFormat.INT8,)))
    rounded = twice(other, plan, 0.45)
    assert rounded is not None
    assert [stage.wire_format for stage in rounded.plan.stages] == [*[WireFormat.INT8] * 3, WireFormat.NATIVE]
    assert "int8 on cut 0, 1, 2" in rounded.reason
    _, _, choosy = begun(AutoSettings(believed=math.inf, pays=0.5))
    assert twice(choosy, plan, 0.45) is None
    assert forecast.asked


def test_back_to_the_plans_own_without_any_simulation():
    plan, forecast, boundary = begun()
    proposal = twice(boundary, plan, 0.45)
    assert proposal is not None
    forecast.asked.clear()
    back = boundary.advise(4, proposal.plan, reports(plan, 0.9), STEP_S)
    assert back is not None
    assert back.plan == plan
    assert not forecast.asked
    assert boundary.advise(5, plan, reports(plan, 0.9), STEP_S) is None


def test_links_taken_for_half_recovered_are_calm_after_two_good_reports():
    plan, _, boundary = begun()
    slow = plan
    for part in (0.4, 0.4, 0.75, 0.75):
        proposal = boundary.advise(4, slow, reports(plan, part), STEP_S)
        slow = proposal.plan if proposal else slow
    assert not boundary.state.calm
    assert boundary.advise(5, slow, reports(plan, 0.88), STEP_S) is None
    boundary.advise(6, slow, reports(plan, 0.88), STEP_S)
    assert boundary.state.calm


def test_one_good_report_between_others_does_not_make_links_calm():
    plan, _, boundary = begun()
    slow = plan
    for part in (0.4, 0.4, 0.75, 0.75, 0.88, 0.75, 0.88, 0.75):
        proposal = boundary.advise(4, slow, reports(plan, part), STEP_S)
        slow = proposal.plan if proposal else slow
    assert not boundary.state.calm


def test_rates_that_messages_do_not_agree_on_are_left_out():
    plan, _, boundary = begun()
    assert boundary.advise(3, plan, reports(plan, 0.2, confidence=0.2), STEP_S) is None
    assert boundary.state.calm


def test_units_move_only_where_that_pays_in_time():
    """Here every plan with other cuts is as fast as the best without, so nothing should move."""
    plan = replace(four_sites.plan(0.01))
    boundary = AutoBoundary(plan, TableForecast(moving_s=1e6), AutoSettings(believed=math.inf))
    for step in range(3):
        boundary.advise(step, plan, reports(plan, 1.0), STEP_S)
    proposal = twice(boundary, plan, 0.5)
    assert proposal is not None
    assert [stage.units for stage in proposal.plan.stages] == [stage.units for stage in plan.stages]


def test_a_link_that_is_seldom_busy_is_left_alone_however_slow():
    plan, forecast, boundary = begun()
    assert boundary.advise(3, plan, reports(plan, 0.4, busy_s=0.05), STEP_S) is None
    assert not forecast.asked
    assert boundary.advise(4, plan, reports(plan, 0.4, busy_s=0.5), STEP_S) is None
    assert boundary.advise(5, plan, reports(plan, 0.4, busy_s=0.5), STEP_S) is not None


def test_a_simulation_that_does_not_explain_the_step_is_no_guide():
    """Small messages take the time of software: slow by their rate, and no other plan helps."""
    plan, forecast, boundary = begun(AutoSettings())
    for taken_s in (20.0, 0.2):
        for step in (3, 4):
            assert boundary.advise(step, plan, reports(plan, 0.3, busy_s=5.0), taken_s) is None
        assert boundary.state.calm
        assert len(forecast.asked) == 2, "the running plan alone, behind each step"
        forecast.asked.clear()
    for step in (5, 6):
        boundary.advise(step, plan, reports(plan, 0.3, busy_s=5.0), 3.3)
    assert len(forecast.asked) > 2


def test_adapters_have_names():
    plan = four_sites.plan(0.01)
    assert make_boundary("off", plan, TableForecast()) is None
    for name in ("auto", "paper", "off"):
        assert make_local(name, plan, "s0r0").reports() == ()
    with pytest.raises(ValueError, match="no adapter is called 'fast'; there are auto, paper, off"):
        make_local("fast", plan, "s0r0")
