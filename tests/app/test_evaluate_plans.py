"""The scale on which strategies are compared is the simulator's."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.span import equal_spans
from spantrain.cost.memory import MemoryCost
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.evaluate import Evaluator, link_loads
from spantrain.planner.engine.predict import predict
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain.planner.strategies.registry import strategies

JOB = JobSpec(global_batch=32)


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plans(profile):
    request = PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))
    return [p.plan for name in ("gpipe", "hetpipe", "spantrain-dp") for p in strategies()[name].propose(request)]


def test_an_evaluation_is_what_is_predicted_of_the_plan(profile, plans):
    evaluator = Evaluator(profile, JOB)
    for plan in plans:
        predicted = predict(evaluator.bucketed(plan), profile)
        found = evaluator(plan)
        assert found.step_s == pytest.approx(predicted.step_s, rel=1e-9)
        assert found.bubble_ratio == pytest.approx(sum(predicted.bubble_ratio.values()) / len(plan.devices))
        assert found.samples_per_s == pytest.approx(32 / found.step_s)
        assert found.peak_bytes == MemoryCost(profile).plan_peak_bytes(plan)
        assert found.fits
        assert found.usd_per_step > 0
        assert found.joules_per_sample > 0


def test_a_plan_is_simulated_once(profile, plans):
    evaluator = Evaluator(profile, JOB)
    first = evaluator(plans[0])
    assert evaluator(replace(plans[0], strategy="another")) is first
    assert len(list(evaluator.seen())) == 1
    coarser = equal_spans(32, 16)
    other = replace(plans[0], stages=tuple(replace(stage, micro_batches=coarser) for stage in plans[0].stages))
    assert evaluator(other).step_s != first.step_s
    assert len(list(evaluator.seen())) == 2


def test_too_little_memory_does_not_fit(profile, plans):
    tight = replace(
        profile.cluster, devices=tuple(replace(device, memory_bytes=2**20) for device in profile.cluster.devices)
    )
    found = Evaluator(replace(profile, cluster=tight), JOB)(plans[0])
    assert not found.fits
    assert set(found.over_memory) == set(plans[0].devices)


def test_link_loads_count_every_byte(profile, plans):
    for plan in plans:
        loads = link_loads(plan, profile)
        result = predict(plan, profile)
        assert sum(load.size_bytes for load in loads.values()) >= sum(result.link_bytes.values())
        for load in loads.values():
            assert load.busy_ratio == pytest.approx(load.size_bytes / load.bandwidth_bytes_per_s / result.step_s)
        evaluator = Evaluator(profile, JOB)
        assert {name: load.size_bytes for name, load in evaluator.link_loads(plan).items()} == {
            name: load.size_bytes for name, load in loads.items()
        }


def test_a_described_profile_is_the_law_and_the_description(profile):
    assert profile.links == ()
    assert profile.links_described
    assert "nothing was measured" in profile.provenance.method
    link = profile.link("lab-0", "home-nano")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (2.5e6, 0.01)
    assert profile.link("lab-0", "lab-0") is None
    assert len(profile.link_by_pair) == 30


@pytest.mark.parametrize("preset", ["laptop", "spantrain-setting-2"])
def test_described_links_are_worth_what_measuring_them_would_be(preset):
    described = described_profile(load_preset(preset), resolve_model("gpt2-small"))
    measured = replace(described, links=tuple(described.link_by_pair.values()), links_described=False)
    request = PlanRequest(profile=described, job=JOB, evaluate=Evaluator(described, JOB))
    for name in ("1f1b", "eddl", "dapple"):
        for proposal in strategies()[name].propose(request):
            assert Evaluator(measured, JOB)(proposal.plan) == Evaluator(described, JOB)(proposal.plan)
