"""What the adapter decides between steps, asked without any simulator: a forecast that is a table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

import four_sites
from spantrain.core.links import LinkReport, LinkVerdict
from spantrain.core.plan import Plan, WireFormat
from spantrain.core.spans import Span
from spantrain.policy.adapter.boundary import AutoBoundary, AutoSettings, Proposal
from spantrain.policy.adapter.choice import make_boundary, make_local
from spantrain.policy.adapter.paper import PaperBoundary
from spantrain.policy.adapter.state import LinkState, Pair, Reports
from spantrain.policy.recut import halved

RATE = 100.0
STEP_S = 1.0
"""What a step took; believed whatever is simulated, but in the test of that."""


@dataclass(kw_only=True)
class TableForecast:
    """A step takes as long as its slowest link, and a little for each micro-batch; int8 sends a quarter."""

    moving_s: float = 0.0
    asked: list[LinkState] = field(default_factory=list)

    def step_s(self, plan: Plan, state: LinkState) -> float:
        self.asked.append(state)
        parts = {WireFormat.NATIVE: 1.0, WireFormat.INT8: 0.25}
        slowest = max(
            parts[stage.wire_format] / state.speed(stage.devices[0], after.devices[0])
            for stage, after in zip(plan.stages, plan.stages[1:], strict=False)
        )
        return slowest + 0.01 * sum(len(stage.micro_batches) for stage in plan.stages)

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        names = plan.devices
        return {(names[a], names[b]): RATE * state.speed(names[a], names[b]) for a, b in four_sites.PAIRS}

    def ordered(self, plan: Plan, state: LinkState) -> Plan:
        return plan

    def move_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        same = [stage.units for stage in before.stages] == [stage.units for stage in after.stages]
        return 0.0 if same else self.moving_s


def reports(
    plan: Plan, part: float, *, confidence: float = 1.0, busy_s: float = 1.0, of: Mapping[Pair, float] | None = None
) -> Reports:
    """All links at a part of their rate, but for those in `of`."""
    names, parts = plan.devices, of or {}
    found: dict[str, tuple[LinkReport, ...]] = {}
    for a, b in four_sites.PAIRS:
        link = LinkReport(
            peer=names[b],
            verdict=LinkVerdict.CALM,
            bytes_per_s=RATE * parts.get((names[a], names[b]), part),
            latency_s=None,
            queued_s=0.0,
            busy_s=busy_s,
            messages=12,
            confidence=confidence,
        )
        found[names[a]] = (*found.get(names[a], ()), link)
    return found


def begun(settings: AutoSettings | None = None) -> tuple[Plan, TableForecast, AutoBoundary]:
    """An adapter that has learned how its links are measured."""
    plan, forecast = four_sites.plan(0.01), TableForecast(moving_s=math.inf)
    boundary = AutoBoundary(plan, forecast, settings or AutoSettings(believed=math.inf))
    for step in range(3):
        assert boundary.advise(step, plan, reports(plan, 0.9), STEP_S) is None
    assert not forecast.asked
    return plan, forecast, boundary


def twice(boundary: AutoBoundary, plan: Plan, part: float) -> Proposal | None:
    """What is proposed after two steps with all links at a part of their rate; nothing after the first."""
    assert boundary.advise(3, plan, reports(plan, part), STEP_S) is None
    return boundary.advise(4, plan, reports(plan, part), STEP_S)


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
    assert boundary.advise(3, plan, reports(plan, 0.1, busy_s=0.05), STEP_S) is None
    assert not forecast.asked
    assert boundary.advise(4, plan, reports(plan, 0.1, busy_s=0.5), STEP_S) is None
    assert boundary.advise(5, plan, reports(plan, 0.1, busy_s=0.5), STEP_S) is not None


def test_a_simulation_that_does_not_explain_the_step_is_no_guide():
    """Small messages take the time of software: slow by their rate, and no other plan helps."""
    plan, forecast, boundary = begun(AutoSettings())
    for taken_s in (20.0, 0.2):
        for step in (3, 4):
            assert boundary.advise(step, plan, reports(plan, 0.3, busy_s=5.0), taken_s) is None
        assert boundary.state.calm
        assert len(forecast.asked) == 1, "the running plan alone"
        forecast.asked.clear()
    for step in (5, 6):
        boundary.advise(step, plan, reports(plan, 0.3, busy_s=5.0), 3.3)
    assert len(forecast.asked) > 5


def test_the_papers_rules_halve_the_ends_and_nothing_else():
    plan = four_sites.plan(0.01, samples=96)
    boundary = PaperBoundary(plan)
    calm = boundary.advise(0, plan, reports(plan, 1.0), STEP_S)
    assert calm is not None
    sizes = [span.size for span in calm.plan.stages[0].micro_batches]
    assert sizes == [8] * 8 + [4] * 8
    assert boundary.advise(1, calm.plan, reports(plan, 1.0), STEP_S) is None
    poor = boundary.advise(2, calm.plan, reports(plan, 0.5), STEP_S)
    assert poor is not None
    assert [span.size for span in poor.plan.stages[0].micro_batches] == [4] * 8 + [8] * 4 + [4] * 8
    assert "poor link" in poor.reason


def test_adapters_have_names():
    plan = four_sites.plan(0.01)
    assert make_boundary("off", plan, TableForecast()) is None
    for name in ("auto", "paper", "off"):
        assert make_local(name, plan, "s0r0").reports() == ()
    with pytest.raises(ValueError, match="no adapter is called 'fast'; there are auto, paper, off"):
        make_local("fast", plan, "s0r0")


class TablePlanner:
    """Answers when it is given a plan."""

    def __init__(self) -> None:
        self.asked: list[LinkState] = []
        self.planned: Plan | None = None

    def ask(self, state: LinkState) -> None:
        self.asked.append(state)

    def answer(self) -> Plan | None:
        planned, self.planned = self.planned, None
        return planned


def test_where_plans_near_the_first_do_not_suffice_one_is_made_anew_and_taken_if_it_pays():
    plan, planner = four_sites.plan(0.01), TablePlanner()
    for worth, moving_s in ((True, 0.5), (False, 1e3)):
        boundary = AutoBoundary(plan, TableForecast(moving_s=moving_s), AutoSettings(believed=math.inf), planner)
        for step in range(3):
            boundary.advise(step, plan, reports(plan, 0.9), STEP_S)
        near = twice(boundary, plan, 0.45)
        assert near is not None
        assert planner.asked[-1] == boundary.state.assumed(plan)
        assert boundary.advise(5, near.plan, reports(plan, 0.45), STEP_S) is None, "it is not there yet"
        planner.planned = planned_anew(plan)
        proposal = boundary.advise(6, near.plan, reports(plan, 0.45), STEP_S)
        assert (proposal is not None) is worth
        if proposal is not None:
            assert proposal.plan == planned_anew(plan)
            assert "planned anew" in proposal.reason
        assert boundary.advise(7, near.plan, reports(plan, 0.45), STEP_S) is None


def test_where_a_plan_near_the_first_suffices_none_is_made_anew():
    plan, planner = four_sites.plan(0.01), TablePlanner()
    settings = AutoSettings(believed=math.inf, suffices=10.0)
    boundary = AutoBoundary(plan, TableForecast(moving_s=math.inf), settings, planner)
    for step in range(3):
        boundary.advise(step, plan, reports(plan, 0.9), STEP_S)
    assert twice(boundary, plan, 0.45) is not None
    assert not planner.asked


def planned_anew(plan: Plan) -> Plan:
    """Other units, and one micro-batch: faster by the table."""
    *others, last = plan.stages
    whole = (Span(0, plan.global_batch),)
    stages = (*others, replace(last, end_unit=last.end_unit + 1))
    return replace(plan, stages=tuple(replace(stage, micro_batches=whole) for stage in stages))


def test_links_that_have_surely_become_calm_are_believed_after_one_step():
    plan, _, boundary = begun()
    proposal = twice(boundary, plan, 0.45)
    assert proposal is not None
    assert boundary.advise(5, proposal.plan, reports(plan, 0.9, confidence=0.5), STEP_S) is None, "half of them agree"
    back = boundary.advise(6, proposal.plan, reports(plan, 0.9), STEP_S)
    assert back is not None
    assert back.plan == plan
    assert not back.simulated


def test_links_taken_for_faster_than_they_were_are_believed_after_one_step_as_well():
    """Full speed, a little less for noise, is not in the band of a state that was seen in the middle of a change."""
    plan, _, boundary = begun()
    proposal = twice(boundary, plan, 0.6 * 0.9)
    assert proposal is not None
    least = {("s0r0", "s1r0"): 0.88 * 0.9}
    back = boundary.advise(5, proposal.plan, reports(plan, 0.95 * 0.9, of=least), STEP_S)
    assert back is not None
    assert back.plan == plan
    assert boundary.state.calm


def moved_over_slow_links(boundary: AutoBoundary, planner: TablePlanner, plan: Plan) -> Plan:
    """After calm steps links are slow, and the planner changes the sites of the first two stages; return that plan."""
    for step in range(3):
        boundary.advise(step, plan, reports(plan, 0.9), STEP_S)
    near = twice(boundary, plan, 0.45)
    assert near is not None
    first, second, *others = planned_anew(plan).stages
    swapped = replace(first, replicas=second.replicas), replace(second, replicas=first.replicas)
    planner.planned = moved = replace(planned_anew(plan), stages=(*swapped, *others))
    proposal = boundary.advise(5, near.plan, reports(plan, 0.45), STEP_S)
    assert proposal is not None
    assert proposal.plan == moved
    return moved


def test_while_links_are_slow_one_in_use_for_the_first_time_is_believed_and_not_learnt():
    plan, planner = four_sites.plan(0.01), TablePlanner()
    boundary = AutoBoundary(plan, TableForecast(moving_s=0.1), AutoSettings(believed=math.inf), planner)
    moved = moved_over_slow_links(boundary, planner, plan)
    new = dict.fromkeys((("s0r0", "s2r0"), ("s2r0", "s0r0")), 0.45)
    for step in (6, 7, 8):
        boundary.advise(step, moved, reports(moved, 0.9, of=new), STEP_S)
        assert not boundary.state.calm, "the links that are new are slow, though all known ones are calm again"


def test_a_run_that_goes_on_under_another_plan_comes_back_to_that_for_calm_links():
    base = four_sites.plan(0.01)
    finer = replace(base, stages=tuple(replace(s, micro_batches=halved(s.micro_batches)) for s in base.stages))
    boundary = AutoBoundary(base, TableForecast())
    for step in range(3):
        assert boundary.advise(step, finer, reports(finer, 1.0), STEP_S) is None, "it learns how links are measured"
    back = boundary.advise(3, finer, reports(finer, 1.0), STEP_S)
    assert back is not None
    assert back.plan == base


def test_links_that_nobody_uses_are_not_taken_for_calm():
    plan = four_sites.plan(0.01)
    slow = LinkState(speeds={("s0r0", "s1r0"): 0.5, ("s1r0", "s2r0"): 0.7})
    assumed = slow.assumed(plan)
    assert assumed.speed("s0r0", "s2r0") == 0.5, "it leaves where a slow one leaves"
    assert assumed.speed("s3r0", "s1r0") == 0.5, "it comes to where a slow one comes to"
    assert assumed.speed("s1r0", "s3r0") == 0.7
    assert assumed.speed("s2r0", "s1r0") == 1.0, "this one is measured"
    assert assumed.speed("s2r0", "s0r0") == 1.0, "nothing near it is slow"
    assert LinkState().assumed(plan).calm


class SlowWhenCalm(TableForecast):
    """As the table, but whatever does not begin where the first plan does takes long on calm links."""

    def step_s(self, plan: Plan, state: LinkState) -> float:
        return super().step_s(plan, state) + 10 * (state.calm and plan.devices[0] != "s0r0")


@pytest.mark.parametrize("forecast", [SlowWhenCalm(moving_s=0.1), TableForecast(moving_s=0.1)])
def test_a_plan_over_other_links_is_left_when_those_are_as_planned_unless_it_is_better_then_too(forecast):
    plan, planner = four_sites.plan(0.01), TablePlanner()
    boundary = AutoBoundary(plan, forecast, AutoSettings(believed=math.inf), planner)
    moved = moved_over_slow_links(boundary, planner, plan)
    for step in range(6, 9):
        assert boundary.advise(step, moved, reports(moved, 0.45), STEP_S) is None, "links are still slow"
    back = [boundary.advise(step, moved, reports(moved, 0.9), STEP_S) for step in (9, 10)]
    assert [one.plan for one in back if one is not None] == ([plan] if isinstance(forecast, SlowWhenCalm) else [])
    assert boundary.state.calm
