"""Units to compute again: chosen where memory is short, by bytes a second, and only where that pays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.cost.memory import MemoryCost
from spantrain.errors import InfeasiblePlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.assembly.recompute import proposals_of, recompute_reasons, with_recomputation
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import over_time, predict
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Proposal

JOB = JobSpec(global_batch=32, optimizer="sgd", schedule="1f1b")
DEVICES = ("lab-0", "lab-1", "office-nx")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


def with_memory(profile: Profile, **memory_bytes: int) -> Profile:
    """The profile on devices of so much memory, by name with _ for -."""
    sizes = {name.replace("_", "-"): size for name, size in memory_bytes.items()}
    cluster = profile.cluster
    devices = tuple(
        replace(device, memory_bytes=sizes.get(device.name, device.memory_bytes)) for device in cluster.devices
    )
    return replace(profile, cluster=replace(cluster, devices=devices))


def request_of(profile: Profile, *, recompute: bool = True, job: JobSpec = JOB) -> PlanRequest:
    constraints = Constraints(recompute=recompute)
    return PlanRequest(profile=profile, job=job, constraints=constraints, evaluate=Evaluator(profile, job))


def three_stages(profile: Profile, *limits: int, size: int = 4) -> Plan:
    bounds = (0, 5, 10, 14)
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=JOB.global_batch,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=bounds[index],
                end_unit=bounds[index + 1],
                replicas=(Replica(devices=(DEVICES[index],), sample_share=1.0, in_flight_limit=limit),),
                micro_batches=equal_spans(JOB.global_batch, size),
            )
            for index, limit in enumerate(limits)
        ),
        schedule=JOB.schedule,
    )


def need(profile: Profile, plan: Plan, device: str) -> int:
    return MemoryCost(profile, JOB.optimizer).plan_peak_bytes(plan)[device]


def proposal(plan: Plan) -> Proposal:
    return Proposal(plan=plan, own_estimate_s=None)


def test_a_plan_that_does_not_fit_recomputes_as_little_as_it_must(profile) -> None:
    plan = three_stages(profile, 12, 8, 4)
    tight = with_memory(profile, lab_0=need(profile, plan, "lab-0") - 1)
    plan = replace(plan, cluster=tight.cluster)
    request = request_of(tight)
    assert request.evaluate(plan).over_memory == ("lab-0",)
    found = with_recomputation(request, proposal(plan))
    assert found is not None
    assert request.evaluate(found.plan).fits
    assert [len(stage.recompute) for stage in found.plan.stages] == [1, 0, 0]
    (reason,) = recompute_reasons(request, found.plan)
    assert reason.startswith("Unit ")
    assert "of stage 0 is computed again" in reason
    assert reason in found.reasons


def test_a_plan_with_room_is_left_alone(profile) -> None:
    request = request_of(profile)
    assert with_recomputation(request, proposal(three_stages(profile, 12, 8, 4))) is None


def test_memory_for_one_micro_batch_more_is_made_where_it_pays(profile) -> None:
    job = replace(JOB, schedule="critical-path")
    pressed = replace(three_stages(profile, 4, 4, 4), schedule="critical-path")
    own = {name.replace("-", "_"): need(profile, pressed, name) for name in DEVICES}
    tight = with_memory(profile, **own)
    pressed = replace(pressed, cluster=tight.cluster)
    request = request_of(tight, job=job)
    before = request.evaluate(pressed)
    assert before.fits
    found = with_recomputation(request, proposal(pressed))
    assert found is not None
    after = request.evaluate(found.plan)
    assert after.fits
    assert after.step_s < before.step_s
    for stage in found.plan.stages:
        if stage.replicas[0].in_flight_limit > 4:
            assert stage.recompute


def test_what_cannot_be_helped_is_not(profile) -> None:
    plan = three_stages(profile, 12, 8, 4)
    hopeless = with_memory(profile, lab_0=1000)
    assert with_recomputation(request_of(hopeless), proposal(replace(plan, cluster=hopeless.cluster))) is None


def refusing(request: PlanRequest) -> tuple[Proposal, ...]:
    """A strategy with one plan, which it proposes if it fits by its own reckoning."""
    plan = replace(three_stages(request.profile, 12, 8, 4), cluster=request.profile.cluster)
    own = request.profile.cluster.device_by_name
    peaks = MemoryCost(request.profile, request.job.optimizer).plan_peak_bytes(plan)
    if any(size > own[name].memory_bytes for name, size in peaks.items()):
        raise InfeasiblePlanError("too large")
    return (proposal(plan),)


def test_a_strategy_without_a_plan_gets_a_second_chance_unless_it_is_forbidden(profile) -> None:
    plan = three_stages(profile, 12, 8, 4)
    tight = with_memory(profile, lab_0=need(profile, plan, "lab-0") - 1, lab_1=need(profile, plan, "lab-1") - 1)
    (found,) = proposals_of(refusing, request_of(tight))
    assert [bool(stage.recompute) for stage in found.plan.stages] == [True, True, False]
    assert Evaluator(tight, JOB)(found.plan).fits
    with pytest.raises(InfeasiblePlanError, match="too large"):
        proposals_of(refusing, request_of(tight, recompute=False))
    with pytest.raises(InfeasiblePlanError, match="too large"):
        proposals_of(refusing, request_of(with_memory(profile, lab_0=1000)))


def test_where_memory_lets_few_wait_a_strategy_is_asked_as_if_units_were_light(profile) -> None:
    """It has micro-batches of four where units are computed again, and of two where they are not."""
    large = three_stages(profile, 12, 8, 4)
    tight = with_memory(profile, lab_0=need(profile, large, "lab-0") - 1, lab_1=need(profile, large, "lab-1") - 1)
    asked = []

    def strategy(request: PlanRequest) -> tuple[Proposal, ...]:
        asked.append(request.profile is tight)
        return (proposal(three_stages(profile, 2, 2, 2, size=2) if asked[-1] else large),)

    request = request_of(tight)
    plain, light = proposals_of(strategy, request, lightens=True)
    assert asked == [True, False]
    assert plain.plan.stages[0].micro_batches[0].size == 2
    assert light.plan.stages[0].micro_batches[0].size == 4
    assert any(stage.recompute for stage in light.plan.stages)
    assert Evaluator(tight, JOB)(light.plan).fits
    assert proposals_of(strategy, request) == (plain,)


def test_proposals_that_fit_stay_as_they_are(profile) -> None:
    request = request_of(profile)
    assert proposals_of(refusing, request, improves=True) == refusing(request)


@settings(deadline=None, max_examples=12)
@given(part=st.floats(0.2, 1.0), limits=st.tuples(*[st.integers(1, 3)] * 3))
def test_what_is_found_fits_and_keeps_cuts_devices_and_samples(profile, part, limits) -> None:
    plan = three_stages(profile, *(4 * limit for limit in limits))
    tight = with_memory(profile, lab_0=int(part * need(profile, plan, "lab-0")))
    plan = replace(plan, cluster=tight.cluster, schedule="critical-path")
    request = request_of(tight, job=replace(JOB, schedule="critical-path"))
    found = with_recomputation(request, proposal(plan))
    if found is None:
        return
    assert request.evaluate(found.plan).fits
    for before, after in zip(plan.stages, found.plan.stages, strict=True):
        assert (before.units, before.devices, before.micro_batches) == (after.units, after.devices, after.micro_batches)


def test_the_planner_says_what_is_computed_again(profile) -> None:
    """All devices so small that one micro-batch of eight does not fit without."""
    small = {device.name.replace("-", "_"): 300 * 2**20 + 8_000_000 for device in profile.cluster.devices}
    tight = with_memory(profile, **small)
    job = JobSpec(global_batch=64, micro_batches=(8,))
    with_it = make_plan(tight, job, PlanOptions(strategies=("spantrain-dp",)))
    assert any(stage.recompute for stage in with_it.plan.stages)
    assert any("computed again" in reason for reason in with_it.report.reasons)
    constraints = Constraints(recompute=False)
    with pytest.raises(InfeasiblePlanError):
        make_plan(tight, job, PlanOptions(strategies=("spantrain-dp",), constraints=constraints))


def test_room_is_kept_for_what_is_held_while_w_is_put_off(profile) -> None:
    units = tuple(
        replace(one, deferred_bytes_per_sample=2 * one.activation_bytes_per_sample) for one in profile.graph.units
    )
    profile = replace(profile, graph=replace(profile.graph, units=units))
    plan = replace(three_stages(profile, 12, 12, 12), schedule="critical-path")
    whole, apart = (need(profile, replace(plan, schedule=name), "office-nx") for name in ("1f1b", "critical-path"))
    assert whole < apart
    tight = with_memory(profile, office_nx=whole)
    plan = replace(plan, cluster=tight.cluster)
    assert Evaluator(tight, JOB)(replace(plan, schedule="1f1b")).fits
    assert Evaluator(tight, JOB)(plan).over_memory == ("office-nx",)
    wide = with_memory(profile, office_nx=apart)
    plan = replace(plan, cluster=wide.cluster)
    assert Evaluator(wide, JOB)(plan).fits
    assert over_time(plan, wide, JOB.optimizer) == ()


def test_a_plan_that_holds_too_much_over_time_says_so(profile) -> None:
    plan = replace(three_stages(profile, 12, 12, 12), schedule="critical-path")
    held = predict(plan, profile, optimizer=JOB.optimizer).peak_bytes["office-nx"]
    tight = with_memory(profile, office_nx=held - 1)
    (warning,) = over_time(replace(plan, cluster=tight.cluster), tight, JOB.optimizer)
    assert warning.startswith("office-nx may hold")
