"""Plans made anew, and the ways there and back: links that nobody uses, tolls, links that are calm again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from spantrain.adaptation.boundary import AutoBoundary, AutoSettings, PlanReplacement
from spantrain.adaptation.network_state import LinkState
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.schedule.dispatch.recut import halved
from testing import four_sites
from testing.link_table import SIZE, STEP_S, TableForecast, begun, reports, twice, twice_at


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
    for worth, moving_s in ((True, 0.01), (False, 1e3)):
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


@pytest.mark.parametrize("moving_s", [math.inf, 0.1])
def test_when_the_last_messages_of_a_step_were_calm_the_next_one_is_as_planned_if_nothing_moves(moving_s):
    plan = four_sites.plan(0.01)
    boundary = AutoBoundary(plan, TableForecast(moving_s=moving_s), AutoSettings(believed=math.inf))
    for step in range(3):
        boundary.advise(step, plan, reports(plan, 0.9), STEP_S)
    proposal = twice(boundary, plan, 0.45)
    assert proposal is not None
    running = proposal.plan if moving_s == math.inf else shifted(proposal.plan)
    some = reports(plan, 0.5, confidence=0.5, newest={("s0r0", "s1r0"): 0.5})
    assert boundary.advise(5, running, some, STEP_S) is None, "not all of them"
    back = boundary.advise(6, running, reports(plan, 0.5, confidence=0.5, newest={}), STEP_S)
    assert (back is not None) is (moving_s == math.inf)


def shifted(plan: Plan) -> Plan:
    """The plan with the last unit of its last stage left out: other units."""
    *others, last = plan.stages
    return replace(plan, stages=(*others, replace(last, end_unit=last.end_unit + 1)))


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
    boundary = AutoBoundary(plan, TableForecast(moving_s=0.02), AutoSettings(believed=math.inf), planner)
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


@dataclass(kw_only=True)
class OtherSites(TableForecast):
    """As the table, but on calm links whatever does not begin where the first plan does takes longer, or less."""

    calm_s: float = 0.0

    def step_s(self, plan: Plan, state: LinkState) -> float:
        return super().step_s(plan, state) + self.calm_s * (state.calm and plan.devices[0] != "s0r0")


def test_a_plan_over_other_links_that_is_better_on_calm_ones_too_stays():
    plan, planner = four_sites.plan(0.01), TablePlanner()
    forecast = OtherSites(moving_s=0.1, calm_s=-0.5)
    boundary = AutoBoundary(plan, forecast, AutoSettings(believed=math.inf), planner)
    moved = moved_over_slow_links(boundary, planner, plan)
    for step in range(6, 9):
        assert boundary.advise(step, moved, reports(moved, 0.45), STEP_S) is None, "links are still slow"
    for step in range(9, 20):
        assert boundary.advise(step, moved, reports(moved, 0.9), STEP_S) is None
    assert boundary.state.calm


def test_going_back_to_slow_links_that_are_not_used_is_tried_after_a_while_and_again_after_a_longer_one():
    """Nobody knows of them, and each trial costs the way there and steps over slow links."""
    plan, planner = four_sites.plan(0.01), TablePlanner()
    forecast = OtherSites(moving_s=0.01, calm_s=0.01)
    boundary = AutoBoundary(plan, forecast, AutoSettings(believed=math.inf), planner)
    moved = moved_over_slow_links(boundary, planner, plan)
    waited = []
    step = 6
    for _ in range(2):
        began = step
        while boundary.advise(step, moved, reports(moved, 0.9), STEP_S) is None:
            step += 1
        waited.append(step + 1 - began)
        assert twice_at(boundary, step + 1, plan, 0.45) is not None, "they are still slow"
        planner.planned = moved
        proposal = boundary.advise(step + 3, plan, reports(plan, 0.45), STEP_S)
        assert proposal is not None
        assert proposal.plan == moved
        step += 4
    assert waited == [8, 32]


def test_a_change_that_would_not_be_worth_its_toll_yet_waits_and_is_forgotten_when_links_are_calm():
    """On calm links the plan for slow ones takes 2 s more, for a step and a half; it saves a little each step."""
    plan, forecast = four_sites.plan(0.01), SlowWhenCalm(moving_s=math.inf)
    boundary = AutoBoundary(plan, forecast, AutoSettings(believed=math.inf))

    def asked(part: float, steps: Sequence[int]) -> dict[int, PlanReplacement]:
        found = {step: boundary.advise(step, plan, reports(plan, part), STEP_S) for step in steps}
        return {step: proposal for step, proposal in found.items() if proposal is not None}

    assert not asked(1.0, range(3))
    assert not asked(0.5, range(3, 7))
    assert not asked(1.0, range(7, 9))
    ((step, due),) = asked(0.5, range(9, 29)).items()
    assert step == 9 + 18 - 1, "eighteen steps of 0.16 s are as much as a step and a half of 1.9 s"
    assert due.simulated == 0, "it is there at once"


class SlowWhenCalm(TableForecast):
    """As the table, but a plan with other micro-batches than the first takes longer on calm links."""

    def step_s(self, plan: Plan, state: LinkState) -> float:
        other = plan.stages[0].micro_batches[0].size != SIZE
        return super().step_s(plan, state) + 1.85 * (state.calm and other)
