"""Settings of gradient sums: those with which least is left behind the last backward, and which plans keep to."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import DEFAULT_BUCKET_BYTES, OWN_SUMS, GradientSums, Plan, SumModel
from spantrain.core.profile import Profile
from spantrain.cost.replicas import ReplicaCost
from spantrain.cost.sums import sum_options
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.assembly.tuning import with_best_sums
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain.planner.strategies.registry import strategies
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate
from testing.planner_requests import draw_sites, request_of

Sites = dict[str, dict[str, float]]

JOB = JobSpec(global_batch=32)
AMPLE = 2**50


@pytest.fixture(scope="module")
def profile() -> Profile:
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plans(profile) -> list[Plan]:
    request = PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))
    return [p.plan for name in ("ddp", "spantrain-dp", "gpipe") for p in strategies()[name].propose(request)]


def summing(plan: Plan, sums: GradientSums) -> Plan:
    return replace(plan, stages=tuple(replace(stage, sums=sums) for stage in plan.stages))


def step_s(plan: Plan, profile: Profile) -> float:
    return simulate(plan, ProfileCosts(profile, plan)).step_s


def tuned(plan: Plan, profile: Profile, free_bytes: float = AMPLE) -> Plan:
    return with_best_sums(plan, ReplicaCost(profile), dict.fromkeys(plan.devices, free_bytes))


def test_no_other_setting_makes_a_step_of_one_stage_shorter(profile, plans):
    total, chosen_sizes = profile.graph.parameter_bytes, set()
    for plan in (plan for plan in plans if len(plan.stages) == 1):
        own = summing(plan, OWN_SUMS)
        for start in (own, summing(plan, GradientSums(model=SumModel.TORCH_DDP))):
            chosen = tuned(start, profile)
            options = sum_options(start.stages[0].sums.model, total)
            assert chosen.stages[0].sums in options
            assert all(step_s(chosen, profile) <= step_s(summing(plan, sums), profile) + 1e-9 for sums in options)
        chosen_sizes.add(tuned(own, profile).stages[0].sums.bucket_bytes)
    assert chosen_sizes - {DEFAULT_BUCKET_BYTES}


def test_only_sums_change_and_choosing_again_changes_nothing(profile, plans):
    for plan in plans:
        chosen = tuned(plan, profile)
        assert tuned(chosen, profile) is chosen
        assert summing(chosen, OWN_SUMS) == summing(plan, OWN_SUMS)
        alone = [stage for stage in chosen.stages if len(stage.replicas) == 1]
        assert all(stage in plan.stages for stage in alone)


def test_a_plan_is_evaluated_with_its_sums(profile, plans):
    evaluator = Evaluator(profile, JOB)
    for plan in plans:
        bucketed = evaluator.bucketed(plan)
        assert bucketed == tuned(plan, profile)
        assert evaluator(plan).step_s == pytest.approx(step_s(bucketed, profile))


@pytest.fixture(scope="session")
def over(make_cluster, make_graph, make_profile):
    """A model of 75 MB over sites that far from each other."""

    def build(mbit: float, latency_s: float, *, sites: Sites, backend: str = "emulated") -> Profile:
        cluster = make_cluster(sites, bandwidth=mbit * 125e3, latency_s=latency_s)
        devices = tuple(replace(device, backend=backend) for device in cluster.devices)
        return make_profile(replace(cluster, devices=devices), make_graph(blocks=6, hidden=512))

    return build


NINE = {f"s{site}": {f"d{site}{number}": 0.5 for number in range(3)} for site in range(3)}


def ddp_plan(profile: Profile, sums: GradientSums = OWN_SUMS) -> Plan:
    return summing(strategies()["ddp"].propose(request_of(profile, JOB))[0].plan, sums)


@pytest.mark.parametrize("backend", ["emulated", "cuda:0"])
def test_buckets_grow_with_latency_beyond_the_default(over, backend):
    far, near = (over(200, latency_s, sites=NINE, backend=backend) for latency_s in (0.3, 1e-5))
    large, small = (tuned(ddp_plan(profile), profile).stages[0].sums.bucket_bytes for profile in (far, near))
    assert large > max(small, 2 * DEFAULT_BUCKET_BYTES)
    plan = ddp_plan(far)
    assert step_s(tuned(plan, far), far) < 0.8 * step_s(plan, far)


@pytest.mark.parametrize("backend", ["emulated", "cuda:0"])
def test_over_a_slow_link_each_system_takes_what_its_bytes_do(over, backend):
    """DDP and ZeRO-2 send all parameters twice round the ring; FSDP three times, none of them beside another."""
    profile = over(10, 1e-4, sites=NINE, backend=backend)
    request = request_of(profile, JOB)
    steps_s = {
        name: request.evaluate(strategies()[name].propose(request)[0].plan).step_s for name in ("ddp", "zero2", "fsdp")
    }
    ring_s = 2 * 8 / 9 * profile.graph.parameter_bytes / (10 * 125e3)
    assert steps_s["ddp"] == pytest.approx(ring_s, rel=0.05)
    assert steps_s["zero2"] == pytest.approx(ring_s, rel=0.05)
    assert steps_s["fsdp"] == pytest.approx(1.5 * ring_s, rel=0.05)


def test_buckets_larger_than_the_default_keep_to_the_memory_that_is_left(over):
    far = over(200, 0.1, sites=NINE)
    plan = ddp_plan(far)
    for free_bytes in (0, 40 * 2**20, AMPLE):
        copied = tuned(plan, far, free_bytes).stages[0].sums.copied_bytes
        assert copied <= max(free_bytes, OWN_SUMS.copied_bytes)
    # What a framework has of its own is its users' business.
    theirs = ddp_plan(far, GradientSums(model=SumModel.TORCH_DDP))
    assert tuned(theirs, far, 0) == tuned(theirs, far)


@settings(deadline=None, max_examples=15)
@given(
    data=st.data(),
    strategy=st.sampled_from(["ddp", "spantrain-dp", "spantrain", "asteroid"]),
    mbit=st.sampled_from([20, 200, 2000]),
    latency_s=st.sampled_from([1e-4, 0.01, 0.1]),
)
def test_choosing_by_the_link_is_never_slower_than_fixed_buckets(over, data, strategy, mbit, latency_s):
    profile = over(mbit, latency_s, sites=draw_sites(data, most_devices=2))
    request = request_of(profile, JOB)
    for proposal in strategies()[strategy].propose(request)[:2]:
        plan = summing(proposal.plan, OWN_SUMS)
        assert request.evaluate(plan).step_s <= step_s(plan, profile) * (1 + 1e-9)


@settings(deadline=None, max_examples=12)
@given(
    data=st.data(),
    model=st.sampled_from([SumModel.SPANTRAIN, SumModel.TORCH_DDP, SumModel.ALPA]),
    latency_s=st.sampled_from([1e-4, 0.01, 0.1]),
    backend=st.sampled_from(["emulated", "cuda:0"]),
)
def test_more_bandwidth_or_less_latency_never_makes_a_sum_slower(over, data, model, latency_s, backend):
    sites, before_s = draw_sites(data, most_devices=2), float("inf")
    for mbit in (10, 30, 100, 500, 2000):
        profile = over(mbit, latency_s, sites=sites, backend=backend)
        plan = tuned(ddp_plan(profile, GradientSums(model=model)), profile)
        now_s = step_s(plan, profile)
        assert now_s <= before_s * (1 + 1e-9)
        nearer = over(mbit, latency_s / 2, sites=sites, backend=backend)
        assert step_s(tuned(plan, nearer), nearer) <= now_s * (1 + 1e-9)
        before_s = now_s
