from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.cost.memory import MemoryCost
from spantrain.cost.step import StepCost
from spantrain.errors import InfeasiblePlanError, PlanError, ProfileError
from spantrain.planner.assembly.assemble import ReplicaDevices
from spantrain.planner.groups import group_devices
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.planner.strategies.baselines import single_device, single_site
from spantrain.planner.strategies.spantrain.strategy import build_plan
from spantrain.planner.strategies.spantrain.tables import WayTables
from spantrain.planner.strategies.spantrain.ways import Slot
from spantrain.planner.strategies.spantrain_dp.strategy import candidates, spantrain_dp


def slot_of(*devices):
    return Slot(members=tuple(ReplicaDevices((name,), (1.0,)) for name in devices), even=False)


def plan_spantrain_dp(profile, job):
    devices = tuple(device.name for device in profile.cluster.devices)
    return candidates(profile, job, devices)[0]


def request_of(profile, job, **constraints):
    def evaluate(plan):
        raise AssertionError("the paper's strategy does not simulate")

    return PlanRequest(profile=profile, job=job, constraints=Constraints(**constraints), evaluate=evaluate)


def estimate_best(strategy, profile, job):
    """The strategy's best plan by its own estimate."""
    return min(strategy(request_of(profile, job)), key=lambda proposal: proposal.own_estimate_s)


def with_memory(cluster, memory_bytes):
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return replace(cluster, devices=devices)


def check(profile, proposal):
    """What must hold of every plan beyond the checks of Plan itself."""
    plan = proposal.plan
    assert plan.stages[-1].end_unit == len(profile.graph.units)
    memory = MemoryCost(profile, "adamw", plan.dtype)
    for device, peak in memory.plan_peak_bytes(plan).items():
        assert peak <= profile.cluster.device_by_name[device].memory_bytes
    for stage in plan.stages:
        assert sum(s.size for k in range(len(stage.replicas)) for s in stage.replica_spans(k)) == plan.global_batch
    assert proposal.reasons
    assert proposal.own_estimate_s > 0


def test_the_laptop_uses_all_sites(preset_profile):
    profile = preset_profile("laptop", noise=0.02)
    found = plan_spantrain_dp(profile, JobSpec(global_batch=64))
    check(profile, found)
    sites = {profile.cluster.device_by_name[d].site for d in found.plan.devices}
    assert sites == {"lab", "office", "home"}
    site = estimate_best(single_site, profile, JobSpec(global_batch=64))
    device = estimate_best(single_device, profile, JobSpec(global_batch=64))
    assert found.own_estimate_s < site.own_estimate_s / 1.3
    assert site.own_estimate_s < device.own_estimate_s
    assert len({profile.cluster.device_by_name[d].site for d in site.plan.devices}) == 1
    assert len(device.plan.devices) == 1


def test_a_link_ten_times_slower_leaves_the_far_site_out(preset_profile):
    profile = preset_profile("laptop")
    job = JobSpec(global_batch=64)
    assert any(d.startswith("home") for d in plan_spantrain_dp(profile, job).plan.devices)
    slow = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 10)
        if link.source.startswith("home") != link.target.startswith("home")
        else link
        for link in profile.links
    )
    found = plan_spantrain_dp(replace(profile, links=slow), job)
    assert not any(d.startswith("home") for d in found.plan.devices)
    assert any(reason.startswith("Group home is left out") for reason in found.reasons)


def test_too_little_memory_is_refused_with_the_numbers(preset_profile, make_graph, make_profile):
    profile = preset_profile("laptop")
    tight = make_profile(with_memory(profile.cluster, 301 * 2**20), make_graph())
    with pytest.raises(InfeasiblePlanError, match=r"lab-0 needs 30\d MiB for units \d+-\d+, has 301 MiB") as caught:
        plan_spantrain_dp(tight, JobSpec(global_batch=64))
    assert "too much" in str(caught.value)
    assert "adamw state take" in str(caught.value)
    for strategy in (single_device, single_site):
        with pytest.raises(InfeasiblePlanError, match="does not fit on"):
            strategy(request_of(tight, JobSpec(global_batch=64)))


def test_less_memory_spreads_the_model_and_limits_samples_in_flight(preset_profile, make_graph, make_profile):
    profile = preset_profile("laptop")
    tight = make_profile(with_memory(profile.cluster, 325 * 2**20), make_graph())
    found = plan_spantrain_dp(tight, JobSpec(global_batch=64))
    check(tight, found)
    assert any(replica.in_flight_limit < 64 * replica.sample_share for s in found.plan.stages for replica in s.replicas)


def test_replicas_share_samples_by_capacity(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lab": {"fast": 0.03, "slow": 0.01}}), make_graph(4))
    tables, slot = WayTables(profile, JobSpec(global_batch=32)), slot_of("fast", "slow")
    assert tables.counts(slot, range(6), 16) == (12, 4)
    plan = build_plan(tables, (slot,), (0, 6), 16)
    assert [replica.sample_share for replica in plan.stages[0].replicas] == [12.0, 4.0]
    assert [span.size for span in plan.stages[0].replica_spans(1)] == [4, 4]


def test_a_useless_device_is_left_out_of_its_domain(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lab": {"a": 0.02, "b": 0.02, "snail": 0.00001}}), make_graph(4))
    found = plan_spantrain_dp(profile, JobSpec(global_batch=32))
    assert set(found.plan.devices) == {"a", "b"}
    assert any("snail of lab left out" in reason for reason in found.reasons)


def test_twenty_two_devices_are_planned(preset_profile, make_graph):
    profile = preset_profile("spantrain-setting-1", noise=0.02, graph=make_graph(24, 768, 512))
    check(profile, plan_spantrain_dp(profile, JobSpec(global_batch=128)))


def test_leave_out_is_obeyed_and_checked(preset_profile):
    profile = preset_profile("laptop")
    job = JobSpec(global_batch=32)
    for proposal in spantrain_dp(request_of(profile, job, leave_out=("home", "lab-1"))):
        assert not {"home-tx2", "home-nano", "lab-1"} & set(proposal.plan.devices)
    with pytest.raises(PlanError, match="cannot leave out hme"):
        spantrain_dp(request_of(profile, job, leave_out=("hme",)))
    with pytest.raises(PlanError, match="leaves no device"):
        spantrain_dp(request_of(profile, job, leave_out=("lab", "office", "home")))


@pytest.mark.parametrize(
    "fields", [{"global_batch": 0}, {"global_batch": 8, "optimizer": "x"}, {"global_batch": 8, "micro_batches": (9,)}]
)
def test_a_job_is_checked(fields):
    with pytest.raises(PlanError):
        JobSpec(**fields)


def test_micro_batch_sizes():
    assert JobSpec(global_batch=48).micro_batch_sizes() == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    assert JobSpec(global_batch=7).micro_batch_sizes() == (1, 2, 4, 7)
    assert JobSpec(global_batch=48, micro_batches=(5, 2)).micro_batch_sizes() == (2, 5)


def test_a_dtype_that_was_not_profiled_is_refused(preset_profile):
    with pytest.raises(ProfileError, match="bfloat16"):
        plan_spantrain_dp(preset_profile("laptop"), JobSpec(global_batch=32, dtype="bfloat16"))


def test_candidates_are_different_and_ranked(preset_profile):
    profile = preset_profile("laptop")
    devices = [device.name for device in profile.cluster.devices]
    found = candidates(profile, JobSpec(global_batch=32), devices, limit=5)
    assert len(found) == len({proposal.plan.stages for proposal in found}) == 5
    times = [proposal.own_estimate_s for proposal in found]
    assert times == sorted(times)
    for proposal in found:
        check(profile, proposal)
        assert proposal.plan.schedule == "critical-path"
    assert plan_spantrain_dp(profile, JobSpec(global_batch=32)).own_estimate_s == times[0]


def test_the_chosen_cuts_are_near_the_best_of_all(make_cluster, make_graph, make_profile):
    from itertools import combinations

    profile = make_profile(make_cluster({"a": {"d0": 0.01}, "b": {"d1": 0.02}, "c": {"d2": 0.015}}), make_graph(6))
    job = JobSpec(global_batch=32)
    chosen = plan_spantrain_dp(profile, job)
    tables, cost = WayTables(profile, job), StepCost(profile)
    slots = tuple(slot_of(*stage.devices) for stage in chosen.plan.stages)
    size = chosen.plan.stages[0].micro_batches[0].size
    best = min(
        cost.estimate(build_plan(tables, slots, begins, size)).step_s
        for begins in ((0, *cuts, 8) for cuts in combinations(range(1, 8), len(slots) - 1))
    )
    assert chosen.own_estimate_s <= best * 1.01


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_every_plan_is_valid(data, make_cluster, make_graph, make_profile):
    sites = {
        f"s{k}": {
            f"d{k}{n}": data.draw(st.sampled_from([0.002, 0.01, 0.03])) for n in range(data.draw(st.integers(1, 3)))
        }
        for k in range(data.draw(st.integers(1, 3)))
    }
    cluster = make_cluster(
        sites,
        bandwidth=data.draw(st.sampled_from([1e6, 1e7, 1e8])),
        latency_s=data.draw(st.sampled_from([1e-3, 2e-2])),
        memory_bytes=data.draw(st.sampled_from([305, 315, 400, 4000])) * 2**20,
    )
    profile = make_profile(cluster, make_graph(data.draw(st.integers(1, 6))), noise=0.05)
    job = JobSpec(global_batch=data.draw(st.integers(1, 40)))
    try:
        found = candidates(profile, job, [d.name for d in cluster.devices], limit=3)
    except InfeasiblePlanError:
        return
    for proposal in found:
        check(profile, proposal)
    assert set(found[0].plan.devices) <= {d for g in group_devices(profile) for d in g.devices}
