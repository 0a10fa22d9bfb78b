"""Plans by counts of alike devices: the form that Megatron-like frameworks run, and clusters of many devices."""

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster, Device, Host, Link, Site
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest, Quota, Restriction
from spantrain.planner.strategies.auto.strategy import auto

MEGATRON = PlanOptions(restriction=Restriction.MEGATRON)


@pytest.fixture(scope="module")
def many() -> Profile:
    """Hosts of four devices of two kinds at two sites, forty devices in all."""
    kinds = load_preset("spantrain-setting-2").kinds[1:]
    hosts, devices = [], []
    for number in range(10):
        name, site = f"h{number}", "near" if number < 6 else "far"
        own = tuple(f"{name}-{index}" for index in range(4))
        hosts.append(Host(name=name, site=site, devices=own))
        kind = kinds[number % 2]
        devices += [
            Device(
                name=device, kind=kind.name, host=name, site=site, backend="emulated", memory_bytes=kind.memory_bytes
            )
            for device in own
        ]
    cluster = Cluster(
        name="forty",
        kinds=kinds,
        sites=tuple(
            Site(
                name=site,
                hosts=tuple(host.name for host in hosts if host.site == site),
                bandwidth_bytes_per_s=1.25e9,
                latency_s=1e-4,
            )
            for site in ("near", "far")
        ),
        hosts=tuple(hosts),
        devices=tuple(devices),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1.25e8, latency_s=0.01)
            for a, b in (("near", "far"), ("far", "near"))
        ),
    )
    return described_profile(cluster, resolve_model("gpt2-small"))


def check_form(plan):
    """1F1B, micro-batches of one size, equal widths and shares, groups inside hosts."""
    host = {device.name: (device.host, device.kind) for device in plan.cluster.devices}
    assert plan.schedule == "1f1b"
    assert len({len(stage.replicas) for stage in plan.stages}) == 1
    sizes = {span.size for stage in plan.stages for span in stage.micro_batches}
    assert len(sizes) == 1
    width = len(plan.stages[0].replicas)
    assert sizes.pop() % width == 0
    for stage in plan.stages:
        for replica in stage.replicas:
            assert replica.sample_share == stage.replicas[0].sample_share
            assert len({host[name] for name in replica.devices}) == 1
            assert set(replica.tp_shares) == {1.0}


@pytest.mark.parametrize(("preset", "model"), [("laptop", "gpt2-tiny"), ("spantrain-setting-2", "gpt2-small")])
def test_a_restricted_plan_has_the_form(preset, model):
    outcome = make_plan(
        described_profile(load_preset(preset), resolve_model(model)), JobSpec(global_batch=32), MEGATRON
    )
    assert outcome.chosen == "auto"
    assert list(outcome.strategies) == ["auto"]
    check_form(outcome.plan)
    assert any("Megatron-like" in reason for reason in outcome.report.reasons)


def test_limits_hold_for_restricted_plans_too(many):
    job = JobSpec(global_batch=48)
    free = make_plan(many, job, MEGATRON)
    kind = many.cluster.kinds[0].name
    limits = Constraints(quotas=(Quota(kind=kind, count=8),), leave_out=("far",), max_step_s=4 * free.step_s_predicted)
    options = PlanOptions(objective=Objective.COST, constraints=limits, restriction=Restriction.MEGATRON)
    cheap = make_plan(many, job, options)
    check_form(cheap.plan)
    used = [many.cluster.device_by_name[name] for name in cheap.plan.devices]
    assert {device.site for device in used} == {"near"}
    assert sum(device.kind == kind for device in used) <= 8
    assert cheap.step_s_predicted <= 4 * free.step_s_predicted
    assert cheap.strategies["auto"].money_per_step <= free.strategies["auto"].money_per_step


def test_a_restriction_is_for_auto_alone():
    with pytest.raises(PlanError, match="strategies ddp cannot be asked for too"):
        PlanOptions(strategies=("ddp",), restriction=Restriction.MEGATRON)
    with pytest.raises(PlanError, match="every schedule cannot be asked for too"):
        PlanOptions(any_schedule=True, restriction=Restriction.MEGATRON)


def test_a_model_that_fits_nowhere_is_refused():
    profile = described_profile(load_preset("asteroid-c-100"), resolve_model("gpt2-xl"))
    first, *others = (device.name for device in profile.cluster.devices)
    alone = PlanOptions(
        restriction=Restriction.MEGATRON, constraints=Constraints(leave_out=tuple(others), keep=(first,))
    )
    with pytest.raises(InfeasiblePlanError, match="nothing that --restrict megatron allows fits"):
        make_plan(profile, JobSpec(global_batch=8), alone)


def test_many_devices_are_searched_by_counts(many):
    job = JobSpec(global_batch=48)
    evaluate = Evaluator(many, job)
    best, *others = auto(PlanRequest(profile=many, job=job, evaluate=evaluate))
    found = evaluate(best.plan)
    assert found.fits
    assert best.plan.schedule == "critical-path"
    assert all(evaluate(other.plan).step_s >= found.step_s for other in others)
    assert all(len(replica.devices) == 1 for stage in best.plan.stages for replica in stage.replicas)
    single = make_plan(many, job, PlanOptions(strategies=("single-device",)))
    assert found.step_s < single.step_s_predicted / 4
