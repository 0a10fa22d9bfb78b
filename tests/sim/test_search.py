"""The search for orders of work: it simulates as the simulator does, and never makes anything slower."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans, tapered_sizes
from spantrain.errors import PlanError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import check_orders
from spantrain.schedule.registry import schedule_names
from spantrain.sim.bounds import pipeline_bound_s, step_bound_s
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.search import search
from spantrain.sim.search.model import model_of, run_orders
from spantrain.sim.search.search import SearchEffort, quick_s, recuts, simulated_s, taper, with_hints
from spantrain_studies.exact_orders import shortest
from testing.made_up_costs import MadeUpCosts

few = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
LITTLE = SearchEffort(max_runs=40, max_actions=20_000)
OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def pipeline(make_plan, stages: int, count: int, limits: list[int], size: int = 1) -> tuple[Plan, MadeUpCosts]:
    """Uneven stages, slow links."""
    seconds = [(1.0, 1.3, 0.8), (2.7, 2.2, 2.4), (0.6, 0.9, 0.5), (1.8, 1.9, 1.1)][:stages]
    plan = make_plan([(equal_spans(count * size, size), [1.0], [limit * size]) for limit in limits])
    return plan, MadeUpCosts(
        sample_s=tuple(dict(zip(OPS, (s / size for s in row), strict=True)) for row in seconds),
        latency_s=(1.9, 0.4, 3.0)[: stages - 1],
        forward_s=tuple(s / size for s in (0.7, 1.6, 1.1)[: stages - 1]),
        backward_s=tuple(s / size for s in (0.7, 1.6, 1.1)[: stages - 1]),
    )


def step_s(plan: Plan, costs: MadeUpCosts, schedule: str) -> float:
    return simulate(replace(plan, schedule=schedule), costs, steps=1, options=SimulationOptions(trace=False)).step_s


@few
@given(data=st.data())
def test_hints_work_for_any_plan_and_are_never_slower_than_the_plain_rule(data, plans, table_costs) -> None:
    plan: Plan = data.draw(plans)
    costs: MadeUpCosts = data.draw(table_costs(plan))
    hinted = with_hints(plan, costs, effort=LITTLE)
    assert simulated_s(hinted, costs) <= simulated_s(plan, costs) + 1e-9
    if hinted.hints is not None:
        assert hinted.hints.predicted_s == pytest.approx(simulated_s(hinted, costs))
    # However the network and the devices turn out, all work is done, within memory.
    other: MadeUpCosts = data.draw(table_costs(plan))
    result = simulate(replace(hinted, schedule="critical-path"), other, steps=2)
    ran = [[result.orders[replica.devices[0]] for replica in stage.replicas] for stage in plan.stages]
    check_orders(ran, CutLayout.of(plan))


@pytest.mark.parametrize("limits", [[4, 3, 2, 1], [4, 4, 4, 4], [12, 12, 12, 12]])
def test_with_the_same_memory_it_is_never_slower_than_any_schedule(make_plan, limits) -> None:
    plan, costs = pipeline(make_plan, 4, 12, limits)
    hinted = with_hints(plan, costs)
    own_s = simulated_s(hinted, costs)
    for schedule in schedule_names():
        try:
            assert own_s <= step_s(plan, costs, schedule) + 1e-9, schedule
        except PlanError:
            continue
    assert own_s >= pipeline_bound_s(plan, costs) - 1e-9
    held = simulate(replace(hinted, schedule="critical-path"), costs, steps=2).peak_in_flight
    assert all(held[f"s{stage}r0"] <= limit for stage, limit in enumerate(limits))


def test_what_is_simulated_is_the_planned_order(make_plan) -> None:
    plan, costs = pipeline(make_plan, 4, 6, [4, 4, 4, 4])
    hinted = with_hints(plan, costs)
    assert hinted.hints is not None
    orders = simulate(replace(hinted, schedule="critical-path"), costs, steps=2).orders
    for stage, row in enumerate(hinted.hints.orders):
        assert "".join(action.op.value for action in orders[f"s{stage}r0"]) == row[0].ops
    assert hinted == with_hints(hinted, costs)
    assert "no order less than" in hinted.hints.reason


def test_the_plain_rule_needs_no_hints_where_it_reaches_the_bound(make_plan) -> None:
    plan = make_plan([(equal_spans(16, 1), [1.0], [16])] * 4)
    second = dict.fromkeys(OPS, 1.0)
    costs = MadeUpCosts(sample_s=(second,) * 4, latency_s=(1.0,) * 3, forward_s=(1.0,) * 3, backward_s=(1.0,) * 3)
    assert with_hints(plan, costs).hints is None
    assert quick_s(plan, costs) == pytest.approx(pipeline_bound_s(plan, costs))


def test_plans_that_are_too_large_keep_the_plain_rule(make_plan) -> None:
    plan, costs = pipeline(make_plan, 4, 6, [4, 4, 4, 4])
    assert with_hints(plan, costs, effort=SearchEffort(max_actions=100)).hints is None


@pytest.mark.parametrize(("stages", "count", "limit"), [(2, 3, 3), (2, 3, 2), (3, 2, 2), (3, 2, 1)])
def test_branch_and_bound_and_critical_path_find_the_best_of_all_orders(make_plan, stages, count, limit) -> None:
    plan, costs = pipeline(make_plan, stages, count, [limit] * stages)
    model = model_of(plan, costs)
    best_s = min(run_orders(model, list(each)).seconds for each in product(*map(all_orders, model.seconds)))
    found = shortest(model, beat_s=float("inf"))
    assert found.proven
    assert found.seconds == pytest.approx(best_s)
    assert simulated_s(with_hints(plan, costs), costs) == pytest.approx(best_s)


def all_orders(parts: list[list[float]]) -> list[list[int]]:
    """Return every order in which a device can do its parts, each by rising micro-batch."""
    found: list[list[int]] = []

    def extend(order: list[int], done: list[int]) -> None:
        if len(order) == sum(map(len, parts)):
            found.append(order)
        for part, row in enumerate(parts):
            if done[part] < len(row) and (part == 0 or done[part - 1] > done[part]):
                extend([*order, part], [*done[:part], done[part] + 1, *done[part + 1 :]])

    extend([], [0] * len(parts))
    return found


@pytest.mark.parametrize(("stages", "limits"), [(3, [4, 4, 4]), (3, [3, 2, 1]), (4, [5, 4, 3, 2])])
def test_critical_path_is_within_three_percent_of_the_best_order_there_is(make_plan, stages, limits) -> None:
    plan, costs = pipeline(make_plan, stages, 5, limits)
    own_s = simulated_s(with_hints(plan, costs), costs)
    best = shortest(model_of(plan, costs), beat_s=own_s, enough_s=pipeline_bound_s(plan, costs))
    assert best.proven
    assert own_s <= 1.03 * best.seconds


def test_branch_and_bound_wants_micro_batches_that_are_alike(make_plan) -> None:
    plan = make_plan([(equal_spans(5, 2), [1.0], [5])] * 2)
    costs = MadeUpCosts(sample_s=(dict.fromkeys(OPS, 1.0),) * 2, latency_s=(0.0,), forward_s=(1.0,), backward_s=(1.0,))
    model = model_of(plan, costs)
    with pytest.raises(ValueError, match="must be alike"):
        shortest(model, beat_s=1.0)


def test_a_step_seen_backwards_twice_is_the_step(make_plan) -> None:
    plan, costs = pipeline(make_plan, 3, 4, [4, 3, 2])
    model = model_of(plan, costs)
    assert model.backwards().backwards() == model


def test_whole_backwards_are_kept_where_halves_take_longer(make_plan) -> None:
    class Split(MadeUpCosts):
        def action_s(self, device, action):
            factor = 1.6 if action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) else 1.0
            return factor * super().action_s(device, action)

    plan, table = pipeline(make_plan, 3, 8, [3, 2, 1])
    costs = Split(**{name: getattr(table, name) for name in ("sample_s", "latency_s", "forward_s", "backward_s")})
    hinted = with_hints(plan, costs)
    assert hinted.hints is not None
    assert all("I" not in order.ops for row in hinted.hints.orders for order in row)
    assert simulated_s(hinted, costs) <= step_s(plan, costs, "1f1b") + 1e-9


def test_finer_micro_batches_go_further_with_the_same_memory(make_plan) -> None:
    plan, costs = pipeline(make_plan, 3, 8, [3, 2, 1], size=4)
    chosen = taper(plan, costs, effort=LITTLE)
    assert simulated_s(chosen, costs) < 0.92 * min(step_s(plan, costs, name) for name in ("1f1b", "zb-h1", "zb"))
    held = simulate(replace(chosen, schedule="critical-path"), costs, steps=1).peak_in_flight
    assert all(held[f"s{stage}r0"] <= limit for stage, limit in enumerate([12, 8, 4]))
    assert [stage.replicas for stage in chosen.stages] == [stage.replicas for stage in plan.stages]


def test_other_micro_batches_have_the_limits_that_they_are_given(make_plan) -> None:
    """Coarser ones have less room here, finer ones more: as where memory also holds what a micro-batch works with."""
    plan, costs = pipeline(make_plan, 3, 8, [3, 2, 1], size=4)

    def limited(other: Plan) -> Plan | None:
        size = max(span.size for stage in other.stages for span in stage.micro_batches)
        room = {1: 32, 2: 24}.get(size)
        return None if room is None else replace(other, stages=tuple(s.with_limits([room]) for s in other.stages))

    every = {candidate.stages for candidate in recuts(plan, limited=limited)}
    assert {stage.replicas[0].in_flight_limit for stages in every for stage in stages} == {32, 24}
    chosen = taper(plan, costs, effort=LITTLE, limited=limited)
    assert chosen.stages in every
    assert simulated_s(chosen, costs) < simulated_s(plan, costs)
    own = taper(plan, costs, effort=LITTLE, limited=lambda other: None)
    assert [stage.micro_batches for stage in own.stages] == [stage.micro_batches for stage in plan.stages]


def test_what_no_order_brings_under_the_wanted_seconds_is_not_searched(make_plan, monkeypatch) -> None:
    plan, costs = pipeline(make_plan, 3, 8, [3, 2, 1], size=4)
    found = taper(plan, costs, effort=LITTLE)
    found_s = simulated_s(found, costs)
    wanted = taper(plan, costs, effort=replace(LITTLE, below_s=1.05 * found_s))
    assert simulated_s(wanted, costs) <= found_s
    searched: list[Plan] = []

    def noted(other: Plan, *args: Any, **options: Any) -> Plan:
        searched.append(other)
        return with_hints(other, *args, **options)

    monkeypatch.setattr(search, "with_hints", noted)
    least_s = min(step_bound_s(other, costs) for other in (plan, *recuts(plan)))
    assert taper(plan, costs, effort=replace(LITTLE, below_s=0.5 * least_s)) == plan
    assert not searched


def test_coarse_micro_batches_are_kept_where_each_action_costs_by_itself(make_plan) -> None:
    plan, costs = pipeline(make_plan, 3, 8, [8, 8, 8], size=4)
    assert taper(plan, replace(costs, action_overhead_s=10.0), effort=LITTLE).stages[0].micro_batches[0].size >= 4


@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 16), st.booleans(), st.booleans())
def test_tapered_sizes_are_all_samples(total, size, small, first, last) -> None:
    sizes = tapered_sizes(total, size, small=min(small, size), first=first, last=last)
    assert sum(sizes) == total
    assert all(0 < each <= size for each in sizes)


def actions(plan: Plan) -> int:
    return 3 * sum(len(stage.replicas) * len(stage.micro_batches) for stage in plan.stages)


def test_other_micro_batches_are_tried_as_far_as_the_effort_goes(make_plan) -> None:
    plan, _ = pipeline(make_plan, 3, 12, [12, 12, 12], size=4)
    every, allowed = list(recuts(plan)), list(recuts(plan, SearchEffort(max_runs=10, max_actions=10 * actions(plan))))
    assert min(map(actions, every)) < actions(plan) < max(map(actions, every))
    assert allowed == [other for other in every if actions(other) <= actions(plan)]


def test_a_plan_that_is_too_large_to_search_may_be_so_in_coarser_micro_batches(make_plan) -> None:
    """Every action costs three seconds, however many samples it is of: twelve micro-batches are too many."""
    plan, costs = pipeline(make_plan, 2, 12, [12, 12])
    costs = replace(costs, action_overhead_s=3.0)
    effort = SearchEffort(max_runs=10, max_actions=10 * actions(plan) - 1)
    assert not effort.runs(actions(plan))
    assert len(taper(plan, costs, effort=effort).stages[0].micro_batches) < 12
    none = SearchEffort(max_runs=10, max_actions=9)
    assert taper(plan, costs, effort=none).stages == plan.stages
