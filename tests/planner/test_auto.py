"""The default planner: near the optimum, no worse than its starts, inside memory and constraints, deterministic."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.units import UnitGraph
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.assembly.recompute import proposals_of
from spantrain.planner.engine import engine, predict
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import PlanOrders
from spantrain.planner.request import Constraints, Evaluation, JobSpec, Objective, PlanRequest, Proposal, Quota
from spantrain.planner.strategies.auto.strategy import auto
from spantrain.planner.strategies.baselines import DDP, single_device, single_site
from spantrain.planner.strategies.score import looks_of
from spantrain.planner.strategies.spantrain_dp.strategy import spantrain_dp
from spantrain_studies.planners.exhaustive import exhaustive

MIB = 2**20
JOB = JobSpec(global_batch=8, micro_batches=(1, 2, 4))


def request_of(profile: Profile, job: JobSpec = JOB, **more: object) -> PlanRequest:
    return PlanRequest(profile=profile, job=job, evaluate=Evaluator(profile, job), **more)  # type: ignore[arg-type]


def best_of(request: PlanRequest) -> Evaluation:
    return request.evaluate(auto(request)[0].plan)


@pytest.fixture
def case(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    """Return a maker of profiles: two sites of unequal devices over a slow link."""

    def build(memory_bytes: int = 8 * 2**30, blocks: int = 4, seed: int = 0) -> Profile:
        cluster = make_cluster(
            {"a": {"a0": 1.0, "a1": 0.4}, "b": {"b0": 0.7, "b1": 0.7}},
            bandwidth=5e6 * (1 + seed),
            memory_bytes=memory_bytes,
        )
        return make_profile(cluster, make_graph(blocks=blocks, hidden=512), noise=0.05, seed=seed)

    return build


def test_a_model_of_one_unit_is_planned(case: Callable[..., Profile]) -> None:
    """It has no cuts, and so no bytes that cross any."""
    profile = case()
    graph = UnitGraph(units=(replace(profile.graph.units[1], outputs=()),), shared_bytes={})
    assert best_of(request_of(replace(profile, graph=graph))).fits


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("memory_bytes", [8 * 2**30, 420 * MIB])
def test_near_the_optimum(case: Callable[..., Profile], seed: int, memory_bytes: int) -> None:
    request = request_of(case(memory_bytes, seed=seed))
    ours, least = best_of(request), request.evaluate(exhaustive(request)[0].plan)
    assert ours.fits
    assert least.step_s * (1 - 1e-9) <= ours.step_s <= least.step_s * 1.05


def test_no_worse_than_its_starts(preset_profile: Callable[..., Profile]) -> None:
    request = request_of(preset_profile("laptop"), JobSpec(global_batch=16))
    ours = best_of(request).step_s
    for strategy in (single_device, single_site, spantrain_dp):
        others = [request.evaluate(proposal.plan) for proposal in strategy(request)]
        assert ours <= min(other.step_s for other in others if other.fits) * (1 + 1e-9)


@pytest.mark.parametrize("memory_bytes", [8 * 2**30, 420 * MIB, 370 * MIB])
@pytest.mark.parametrize("seed", [1, 4])
def test_what_the_planner_answers_is_no_worse_than_what_any_strategy_does(case, seed: int, memory_bytes: int) -> None:
    """With the order of work that is searched for the plan of each."""
    profile = case(memory_bytes, seed=seed)
    evaluate = Evaluator(profile, JOB)
    ours = evaluate(make_plan(profile, JOB, PlanOptions()).plan).step_s
    for name in ("spantrain", "spantrain-dp", "single-site", "dapple", "eddl"):
        try:
            plan = make_plan(profile, JOB, PlanOptions(strategies=(name,))).plan
        except InfeasiblePlanError:
            continue
        assert plan.divides_tensors or ours <= evaluate(plan).step_s * 1.005, name


def test_a_plan_of_another_strategy_is_taken_where_it_is_faster(case: Callable[..., Profile]) -> None:
    """Memory is so tight that units have to be computed again, which the search for cuts does not know of."""
    profile, limits = case(450 * MIB, blocks=6, seed=2), Constraints(interleaving=False)
    outcome = make_plan(profile, JOB, PlanOptions(constraints=limits))
    assert any(reason.startswith("Found beside the search") for reason in outcome.report.reasons)
    request = request_of(profile, constraints=limits)
    own = [request.evaluate(found.plan) for found in proposals_of(auto, request, improves=True)]
    assert outcome.step_s_predicted < min(found.step_s for found in own if found.fits)


def test_whoever_waits_hears_how_many_plans_were_simulated(case: Callable[..., Profile]) -> None:
    heard: list[int] = []
    make_plan(case(), JOB, PlanOptions(heard=heard.append))
    assert heard == list(range(1, len(heard) + 1))
    assert len(heard) > 10


def test_same_answer_twice(case: Callable[..., Profile]) -> None:
    profile = case()
    assert auto(request_of(profile)) == auto(request_of(profile))


def test_proposals_are_by_rising_time(case: Callable[..., Profile]) -> None:
    request = request_of(case())
    steps = [request.evaluate(proposal.plan).step_s for proposal in auto(request)]
    assert steps == sorted(steps)


def test_memory_is_a_hard_limit(case: Callable[..., Profile]) -> None:
    request = request_of(case(420 * MIB, blocks=6))
    for proposal in auto(request):
        assert request.evaluate(proposal.plan).fits


def test_objectives_are_followed(case: Callable[..., Profile]) -> None:
    profile = case()
    fast, frugal = (best_of(request_of(profile, objective=goal)) for goal in (Objective.THROUGHPUT, Objective.ENERGY))
    assert frugal.joules_per_sample <= fast.joules_per_sample
    assert fast.step_s <= frugal.step_s
    request = request_of(profile, objective=Objective.ENERGY)
    assert frugal.joules_per_sample <= request.evaluate(exhaustive(request)[0].plan).joules_per_sample * 1.05


def test_constraints_are_kept(case: Callable[..., Profile]) -> None:
    profile = case()
    quota = Quota(kind="kind-0.7", count=1)
    limits = Constraints(leave_out=("a1",), keep=("b",), quotas=(quota,))
    plan = auto(request_of(profile, constraints=limits))[0].plan
    assert limits.broken_by_devices(profile.cluster, plan.devices) == []
    assert "a1" not in plan.devices
    assert len({"b0", "b1"} & set(plan.devices)) == 1


def test_frugal_plan_keeps_a_time_limit(case: Callable[..., Profile]) -> None:
    profile = case()
    free = best_of(request_of(profile, objective=Objective.ENERGY))
    fast = best_of(request_of(profile))
    assert fast.step_s < free.step_s
    limits = Constraints(max_step_s=(fast.step_s + free.step_s) / 2)
    kept = best_of(request_of(profile, objective=Objective.ENERGY, constraints=limits))
    assert kept.broken(limits) == []
    assert free.joules_per_sample <= kept.joules_per_sample <= fast.joules_per_sample * (1 + 1e-9)


def test_a_sentence_for_each_site(case: Callable[..., Profile]) -> None:
    request = request_of(case(), constraints=Constraints(leave_out=("b",)))
    reasons = auto(request)[0].reasons
    assert reasons[0].startswith("a is in with")
    assert reasons[1] == "b is out: it was to be left out."
    kept = auto(request_of(case(), constraints=Constraints(keep=("b0",))))[0].reasons
    assert kept[1].startswith("b is in with")
    assert "): it was to be kept." in kept[1]


def test_nothing_fits(case: Callable[..., Profile]) -> None:
    with pytest.raises(InfeasiblePlanError, match="does not fit"):
        auto(request_of(case(memory_bytes=301 * MIB)))
    small = case(memory_bytes=MIB)
    units = tuple(replace(unit, frozen_bytes=unit.parameter_bytes) for unit in small.graph.units)
    frozen = replace(small, graph=replace(small.graph, units=units))
    timings = tuple(replace(timing, dtype="bfloat16-weights") for timing in frozen.timings)
    low = replace(frozen, dtype="bfloat16-weights", timings=timings)
    for profile, told in ((small, False), (frozen, True), (low, False)):
        said = str(infeasible(profile, JobSpec(global_batch=8), ["a0"]))
        assert ("(--dtype bfloat16-weights)" in said) is told
        assert "(too much)" in said


def test_static_orders_run(case: Callable[..., Profile]) -> None:
    job = JobSpec(global_batch=8, micro_batches=(1, 2), schedule="1f1b")
    request = request_of(case(400 * MIB), job)
    plan = auto(request)[0].plan
    assert plan.schedule == "1f1b"
    assert request.evaluate(plan).fits


def test_many_devices_move_in_blocks(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> None:
    cluster = make_cluster({site: {f"{site}{k}": 1.0 for k in range(20)} for site in ("a", "b")}, bandwidth=125e6)
    request = request_of(make_profile(cluster, make_graph(blocks=8)), JobSpec(global_batch=64, micro_batches=(32, 64)))
    assert best_of(request).fits


def test_recut_plans_get_the_limits_that_memory_allows(case: Callable[..., Profile]) -> None:
    profile = case(420 * MIB)
    request, evaluator = request_of(profile), Evaluator(profile, JOB)
    plan = next(one.plan for one in auto(request) if len(one.plan.stages) > 1)
    fine, coarse = (
        evaluator.limited(
            replace(plan, stages=tuple(replace(s, micro_batches=equal_spans(8, size)) for s in plan.stages))
        )
        for size in (1, 4)
    )
    assert fine is not None
    assert evaluator(fine).fits
    own = [[replica.in_flight_limit for replica in stage.replicas] for stage in fine.stages]
    short = {
        name
        for stage in fine.stages
        for index, replica in enumerate(stage.replicas)
        if replica.in_flight_limit < stage.samples_of(index)
        for name in replica.devices
    }
    assert short, "memory keeps some device from holding all its samples"
    assert short <= {*evaluator(fine.with_limits([[limit + 1 for limit in row] for row in own])).over_memory}
    assert coarse is None or evaluator(coarse).fits


def test_a_replica_that_gets_no_sample_of_small_micro_batches_keeps_its_limit(case: Callable[..., Profile]) -> None:
    """Such plans are worth trying: a stage of two replicas that works on one sample at a time uses one of them."""
    profile = case()
    request, evaluator = request_of(profile), Evaluator(profile, JOB)
    plan = DDP(request)[0].plan
    small = replace(plan, stages=tuple(replace(stage, micro_batches=equal_spans(8, 1)) for stage in plan.stages))
    (stage,) = small.stages
    idle = [index for index in range(len(stage.replicas)) if not stage.replica_spans(index)]
    assert idle
    limited = evaluator.limited(small)
    assert limited is not None
    assert all(limited.stages[0].replicas[index] == stage.replicas[index] for index in idle)
    assert evaluator(limited).fits


def orders_of(
    planning: engine._Planning, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Plan, object]]
) -> PlanOrders:
    """Return what searches orders, and finds none, but notes what it is asked for."""
    orders = planning._orders

    def ordered(
        proposal: Proposal, evaluation: Evaluation, effort: predict.SearchEffort = predict._EFFORT
    ) -> tuple[Proposal, Evaluation]:
        asked.append((proposal.plan, effort.max_runs))
        return proposal, evaluation

    monkeypatch.setattr(orders, "ordered", ordered)
    return orders


def test_plans_that_differ_in_names_alone_have_their_order_searched_once(
    make_cluster, make_graph, make_profile, monkeypatch
) -> None:
    cluster = make_cluster({site: {f"{site}0": 1.0} for site in "abc"}, bandwidth=125e6)
    planning = engine._Planning(
        make_profile(cluster, make_graph(blocks=6, hidden=512)),
        JobSpec(global_batch=32),
        PlanOptions(constraints=Constraints(interleaving=False)),
    )
    ranked = planning._answer("auto").ranked
    looks = [looks_of(proposal.plan, evaluation.step_s) for proposal, evaluation in ranked]
    assert len(set(looks)) < len(looks), "plans of other strategies are among them, too"
    for name, value in (("_FURTHER_GAINS", 100.0), ("_IDLE", 100.0), ("_FURTHER_BEST", 0)):
        monkeypatch.setattr(predict, name, value)
    asked: list[tuple[Plan, object]] = []
    orders_of(planning, monkeypatch, asked).further(ranked, ranked[0])
    unlike = {one: entry[0].plan for one, entry in reversed(list(zip(looks, ranked, strict=True)))}
    assert len(asked) > 2
    assert {plan.stages for plan, _ in asked} <= {plan.stages for plan in unlike.values() if len(plan.stages) > 1}
    assert len({plan.stages for plan, _ in asked}) == len(asked)


def test_plans_of_other_numbers_of_stages_and_sizes_of_micro_batches_have_their_order_searched_first(
    case: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = engine._Planning(case(blocks=6), JobSpec(global_batch=8), PlanOptions())
    ranked = planning._answer("auto").ranked
    for name, value in (("_FURTHER_GAINS", 100.0), ("_LESS_MISSES", 100.0), ("_IDLE", 100.0), ("_FURTHER_BEST", 0)):
        monkeypatch.setattr(predict, name, value)
    asked: list[tuple[Plan, object]] = []
    more = orders_of(planning, monkeypatch, asked).further(ranked, ranked[0])
    assert more == (), "what is known already is not given again"
    kinds = [(len(plan.stages), plan.stages[0].micro_batches[0].size) for plan, _ in asked]
    unlike = list(dict.fromkeys(kinds))
    assert 2 < len(unlike) < len(kinds), "some are alike in both"
    assert kinds[: len(unlike)] == unlike


def test_of_further_plans_the_best_few_have_their_order_searched_with_more_effort(
    case: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = engine._Planning(case(blocks=6), JobSpec(global_batch=8), PlanOptions())
    ranked = planning._answer("auto").ranked
    for name, value in (("_LESS_MISSES", 100.0), ("_IDLE", 100.0), ("_FURTHER_BEST", 2)):
        monkeypatch.setattr(predict, name, value)
    asked: list[tuple[Plan, object]] = []
    orders_of(planning, monkeypatch, asked).further(ranked, ranked[0])
    efforts = [effort for _, effort in asked]
    assert len(efforts) > 4
    assert efforts == [predict._LESS.max_runs] * (len(efforts) - 2) + [predict._EFFORT.max_runs] * 2
    seconds = [planning._evaluator(plan).step_s for plan, _ in asked]
    assert seconds[-2:] == sorted(seconds[:-2])[:2], "nothing was found"


def test_further_orders_make_the_answer_better(case: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    """What an order of work, and other micro-batches, bring differs from plan to plan."""
    profile, job, options = (
        case(blocks=6),
        JobSpec(global_batch=8),
        PlanOptions(constraints=Constraints(interleaving=False)),
    )
    with_all = make_plan(profile, job, options).step_s_predicted
    monkeypatch.setattr(predict, "_FURTHER", 0)
    assert with_all < 0.99 * make_plan(profile, job, options).step_s_predicted


def test_the_first_plan_that_is_small_enough_has_its_order_searched(
    case: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever plans are before it whose schedules have none to search."""
    planning, asked = engine._Planning(case(), JOB, PlanOptions()), list[tuple[Plan, object]]()
    orders = orders_of(planning, monkeypatch, asked)
    found = [strategy(planning._request)[0] for strategy in (DDP, single_device)]
    plans = [replace(one.plan, schedule=name) for name in ("gpipe", "critical-path") for one in found]
    rows = tuple((replace(found[0], plan=plan), planning._evaluator(plan)) for plan in plans)
    monkeypatch.setattr(predict, "ORDER_MAY_GAIN", 100.0)
    for most_devices, expected in ((4, 4), (1, 1)):
        monkeypatch.setattr(predict, "_ORDERED_UP_TO", most_devices)
        orders.first_ordered(rows)
        told = [(plan.schedule, len(plan.devices), effort) for plan, effort in asked]
        assert told == [("critical-path", expected, predict._EFFORT.max_runs)]
        asked.clear()
