"""What steps that overlap need of a plan: room for two, and what is refused."""

from dataclasses import replace

import pytest

from spantrain.app.planning.plan_files import check_staleness, with_room_for_two
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.cost.memory import MemoryCost
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import predict
from spantrain.planner.request import JobSpec

JOB = TrainJob(steps=10, staleness=1, adapter="off")


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plan(profile) -> Plan:
    """Its first stage may hold all of a step, the others less."""
    options = PlanOptions(strategies=("pipedream",))
    found = make_plan(profile, JobSpec(global_batch=48, schedule="1f1b"), options).plan
    first = found.stages[0]
    replicas = tuple(
        replace(own, in_flight_limit=share) for own, share in zip(first.replicas, shares(found), strict=False)
    )
    return replace(found, stages=(replace(first, replicas=replicas), *found.stages[1:]))


def shares(plan: Plan) -> list[int]:
    return [
        sum(span.size for span in stage.replica_spans(number))
        for stage in plan.stages
        for number in range(len(stage.replicas))
    ]


def limits(plan: Plan) -> list[int]:
    return [replica.in_flight_limit for stage in plan.stages for replica in stage.replicas]


def test_limits_of_a_whole_share_become_those_of_two(plan, profile):
    wider = with_room_for_two(plan, profile, "adamw")
    for before, after, share in zip(limits(plan), limits(wider), shares(plan), strict=True):
        assert after == (2 * share if before >= share else before)
    assert limits(wider) != limits(plan)
    assert with_room_for_two(wider, profile, "adamw") == wider
    check_staleness(wider, profile, JOB)


def test_the_prediction_is_of_steps_that_overlap_and_counts_both_sets(plan, profile):
    wider = with_room_for_two(plan, profile, "adamw")
    exact = predict(plan, profile, optimizer="adamw")
    stale = predict(wider, profile, optimizer="adamw", staleness=1)
    assert stale.step_s < exact.step_s
    for device in plan.devices:
        before, after = exact.memory[device].peak, stale.memory[device].peak
        assert after.parameter_bytes == 2 * before.parameter_bytes
        assert after.gradient_bytes == 2 * before.gradient_bytes
        assert after.optimizer_bytes == before.optimizer_bytes
    whole, size = range(len(profile.graph.units)), profile.graph.parameter_bytes
    assert MemoryCost(profile, staleness=1).state_bytes(whole) == MemoryCost(profile).state_bytes(whole) + 2 * size


def test_a_second_set_that_does_not_fit_is_refused_with_the_figures(plan, profile):
    peak = MemoryCost(profile, "adamw", plan.dtype).plan_peak_bytes(plan)
    cluster = profile.cluster
    devices = tuple(replace(device, memory_bytes=peak.get(device.name, 2**30)) for device in cluster.devices)
    tight = replace(profile, cluster=replace(cluster, devices=devices))
    assert limits(with_room_for_two(plan, tight, "adamw")) == limits(plan)
    with pytest.raises(PlanError, match=r"--staleness 1: .* needs .* with a second set of weights .* it has "):
        check_staleness(plan, tight, JOB)


def test_a_loop_of_its_own_is_refused(plan, profile):
    with pytest.raises(PlanError, match="waits for every step's loss"):
        check_staleness(plan, profile, JOB, own_loop=True)
