"""What a sample holds while W is put off is kept room for: in plans, in limits and in the arrays that planners read."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.shares import ALONE, MemberShare, even_share
from spantrain.core.span import equal_spans
from spantrain.core.units import UnitGraph
from spantrain.cost.held_sizes import Division
from spantrain.cost.memory import MemoryCost
from spantrain.cost.span_tables import in_flight_bytes
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.predict import predict, with_best_order
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain.planner.strategies.registry import strategies
from spantrain.schedule.registry import schedule_names, splits_backward

MIB = 2**20
PLANNERS = ("auto", "spantrain", "spantrain-dp")
ratios = st.lists(st.sampled_from([None, 0.0, 0.7, 1.6, 2.5]), min_size=6, max_size=6)


def putting_off(graph: UnitGraph, ratios: list[float | None]) -> UnitGraph:
    """Units that hold, from I to W, so many times what they hold before; None: nobody measured it."""
    units = tuple(
        replace(
            unit,
            deferred_bytes_per_sample=None if ratio is None else round(ratio * unit.activation_bytes_per_sample),
            tensor_sums=2 if 0 < index < len(graph.units) - 1 else 0,
        )
        for index, (unit, ratio) in enumerate(zip(graph.units, ratios, strict=True))
    )
    return replace(graph, units=units)


def with_room(profile: Profile, room_bytes: int) -> Profile:
    """All devices have the framework's and so many bytes."""
    cluster = profile.cluster
    devices = tuple(replace(device, memory_bytes=300 * MIB + room_bytes) for device in cluster.devices)
    return replace(profile, cluster=replace(cluster, devices=devices))


@pytest.fixture
def profile(make_profile, make_cluster, make_graph) -> Profile:
    sites = {"here": {"a": 4.0, "b": 2.0}, "there": {"c": 1.0}}
    return make_profile(make_cluster(sites), make_graph(blocks=4))


@settings(deadline=None, max_examples=40)
@given(
    ratios=ratios, splits=st.booleans(), share=st.sampled_from([ALONE, even_share(2), MemberShare(shares=(3.0, 7.0))])
)
def test_arrays_say_what_the_memory_model_says(make_profile, make_cluster, make_graph, ratios, splits, share) -> None:
    graph = putting_off(make_graph(blocks=4), ratios)
    cost = MemoryCost(make_profile(make_cluster({"here": {"a": 1.0}}), graph))
    found, division = (
        in_flight_bytes(graph, range(7), splits=splits, tp_share=share),
        Division(tp_share=share, splits=splits),
    )
    for i in range(7):
        for j in range(7):
            wanted = cost.in_flight_bytes_per_sample(range(i, j), division) if i < j else 0
            assert found[i, j] == pytest.approx(wanted, abs=1)
    some = in_flight_bytes(graph, (0, 2, 3, 6), splits=splits, tp_share=share)
    assert some.tolist() == found[[0, 2, 3, 6]][:, [0, 2, 3, 6]].tolist()


def test_the_first_stage_and_whole_backwards_count_what_they_held_before(profile) -> None:
    graph = putting_off(profile.graph, [1.6] * 6)
    cost = MemoryCost(replace(profile, graph=graph))
    held = graph.stage_held_bytes(range(2, 4))
    assert cost.in_flight_bytes_per_sample(range(2, 4)) == held
    assert cost.in_flight_bytes_per_sample(range(2, 4), Division(splits=True)) > 1.6 * held
    assert cost.in_flight_bytes_per_sample(range(4), Division(splits=True)) == graph.stage_held_bytes(range(4))


@settings(deadline=None, max_examples=40)
@given(
    ratios=st.lists(st.sampled_from([0.7, 1.6, 2.5]), min_size=6, max_size=6),
    room_mib=st.integers(8, 24),
    schedule=st.sampled_from(schedule_names()),
    strategy=st.sampled_from(PLANNERS),
)
def test_no_plan_holds_more_over_time_than_its_peak_says(
    make_profile, make_cluster, make_graph, ratios, room_mib, schedule, strategy
) -> None:
    """Messages aside, of which more may wait than two; in any schedule that a plan was made for."""
    sites = {"here": {"a": 4.0, "b": 2.0}, "there": {"c": 1.0}}
    made = make_profile(make_cluster(sites), putting_off(make_graph(blocks=4), ratios))
    tight = with_room(made, room_mib * MIB)
    job = JobSpec(global_batch=32, schedule=schedule, micro_batches=(2, 4))
    request = PlanRequest(profile=tight, job=job, evaluate=Evaluator(tight, job))
    try:
        proposals = strategies()[strategy].propose(request)
    except InfeasiblePlanError:
        return
    own = tight.cluster.device_by_name
    for proposal in proposals[:2]:
        plan = proposal.plan
        peaks = MemoryCost(tight).plan_peak_bytes(plan)
        assert all(peaks[name] <= own[name].memory_bytes for name in plan.devices)
        try:
            memory = predict(plan, tight, optimizer="adamw").memory
        except PlanError:
            continue  # A static order that needs more samples in flight than there is room for.
        for name, most in memory.items():
            messages = most.peak.received_bytes + most.peak.sending_bytes
            assert most.peak_bytes - messages <= peaks[name]


@pytest.mark.parametrize("schedule", schedule_names())
def test_schedules_that_put_w_off_do_so_behind_the_first_stage(profile, schedule) -> None:
    stages = tuple(
        Stage(
            first_unit=2 * index,
            end_unit=2 * index + 2,
            replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=16),),
            micro_batches=equal_spans(16, 2),
        )
        for index, name in enumerate("abc")
    )
    plan = Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=16,
        dtype=profile.dtype,
        stages=stages,
        schedule=schedule,
    )
    orders = predict(with_best_order(plan, profile), profile).orders
    apart = {name: any(action.op is Op.BACKWARD_INPUT for action in orders[name]) for name in "abc"}
    assert not apart["a"]
    assert splits_backward(plan.schedule) or not (apart["b"] or apart["c"])
    assert not splits_backward(plan.schedule) or schedule == "critical-path" or (apart["b"] and apart["c"])
