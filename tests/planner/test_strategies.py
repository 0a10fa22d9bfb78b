"""What holds of every strategy: plans are valid, fit, keep constraints, and show what the paper's planner is for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_cluster
from spantrain.core.shares import StateSharding
from spantrain.errors import InfeasiblePlanError, UsageError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Quota
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY, strategies, strategies_named

PLAIN = (
    "ddp",
    "zero2",
    "fsdp",
    "eddl",
    "gpipe",
    "1f1b",
    "pipedream",
    "dapple",
    "hetpipe",
    "alpa",
    "single-device",
    "single-site",
)


def ask(name, profile, job, **constraints):
    request = PlanRequest(
        profile=profile, job=job, constraints=Constraints(**constraints), evaluate=Evaluator(profile, job)
    )
    return strategies()[name].propose(request)


@pytest.mark.parametrize("name", PLAIN)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_every_proposal_is_a_plan_that_fits(name, data, make_cluster, make_graph, make_profile):
    sites = {
        f"s{k}": {f"d{k}{n}": data.draw(st.sampled_from([0.002, 0.01])) for n in range(data.draw(st.integers(1, 3)))}
        for k in range(data.draw(st.integers(1, 3)))
    }
    cluster = make_cluster(sites, memory_bytes=data.draw(st.sampled_from([305, 315, 4000])) * 2**20)
    profile = make_profile(cluster, make_graph(data.draw(st.integers(1, 6))))
    job = JobSpec(global_batch=data.draw(st.integers(1, 24)))
    evaluator = Evaluator(profile, job)
    try:
        proposals = ask(name, profile, job)
    except InfeasiblePlanError:
        return
    assert proposals
    for proposal in proposals:
        plan = proposal.plan
        assert plan.stages[-1].end_unit == len(profile.graph.units)
        evaluation = evaluator(plan)
        assert evaluation.fits
        assert evaluation.step_s > 0
        assert proposal.own_estimate_s is None or 0 < proposal.own_estimate_s < float("inf")


def test_ddp_shares_equally_and_eddl_by_capacity(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lab": {"fast": 0.03, "slow": 0.01}}), make_graph(4))
    job = JobSpec(global_batch=32)
    for proposal in ask("ddp", profile, job):
        (stage,) = proposal.plan.stages
        assert len({replica.sample_share for replica in stage.replicas}) == 1
        assert stage.devices == ("fast", "slow")
    shares = [r.sample_share for r in ask("eddl", profile, job)[0].plan.stages[0].replicas]
    assert shares[0] == pytest.approx(3 * shares[1], rel=0.35)


def test_sharding_divides_state_and_fits_where_plain_data_parallelism_does_not(make_cluster, make_graph, make_profile):
    graph, job = make_graph(6), JobSpec(global_batch=32, micro_batches=(8,))
    devices = {f"d{n}": 0.01 for n in range(4)}
    roomy = make_profile(make_cluster({"lab": devices}, memory_bytes=2**32), graph)
    wanted = {"ddp": StateSharding.NONE, "zero2": StateSharding.ZERO2, "fsdp": StateSharding.ZERO3}
    peaks = {}
    for name, sharding in wanted.items():
        (proposal,) = ask(name, roomy, job)
        (stage,) = proposal.plan.stages
        assert (stage.state_sharding, len(stage.micro_batches), len(stage.replicas)) == (sharding, 4, 4)
        assert {replica.sample_share for replica in stage.replicas} == {1.0}
        peaks[name] = max(Evaluator(roomy, job)(proposal.plan).peak_bytes.values())
    assert peaks["ddp"] > peaks["zero2"] > peaks["fsdp"]
    tight = make_profile(make_cluster({"lab": devices}, memory_bytes=(peaks["ddp"] + peaks["zero2"]) // 2), graph)
    with pytest.raises(InfeasiblePlanError, match="needs"):
        ask("ddp", tight, job)
    assert ask("zero2", tight, job)


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_data_parallelism_takes_the_micro_batches_that_are_given(name, make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lab": {"a": 0.03, "b": 0.01}}), make_graph(4))
    for proposal in ask(name, profile, JobSpec(global_batch=32, micro_batches=(8, 16))):
        assert len(proposal.plan.stages[0].micro_batches) in (2, 4)
    with pytest.raises(InfeasiblePlanError, match="micro-batches of 1: 2 devices"):
        ask(name, profile, JobSpec(global_batch=32, micro_batches=(1,)))


@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_slow_networks_make_sharding_slow(name, make_cluster, make_graph, make_profile):
    steps = []
    for bandwidth in (1e9, 1e6):
        cluster = make_cluster({f"s{n}": {f"d{n}": 0.01} for n in range(2)}, bandwidth=bandwidth, latency_s=1e-3)
        profile, job = make_profile(cluster, make_graph(4)), JobSpec(global_batch=32, micro_batches=(4,))
        plain, sharded = (Evaluator(profile, job)(ask(n, profile, job)[0].plan).step_s for n in ("ddp", name))
        steps.append((plain, sharded))
    assert steps[0][1] == pytest.approx(steps[0][0], rel=0.2)
    assert steps[1][1] > 1.5 * steps[1][0]


def test_ddp_refuses_fewer_samples_than_devices(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lab": {"a": 0.03, "b": 0.01}}), make_graph(4))
    with pytest.raises(InfeasiblePlanError, match="2 devices, but only 1 samples"):
        ask("ddp", profile, JobSpec(global_batch=1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_layers_are_equal_whatever_the_devices(name, preset_profile):
    profile = preset_profile("laptop")
    plan = ask(name, profile, JobSpec(global_batch=32))[0].plan
    assert plan.schedule == name
    assert plan.devices == tuple(device.name for device in profile.cluster.devices)
    assert {len(stage.units) for stage in plan.stages} <= {2, 3}


def test_gpipe_holds_all_samples_and_1f1b_a_few(preset_profile):
    profile = preset_profile("laptop")
    job = JobSpec(global_batch=32, micro_batches=(4,))
    limits = {
        name: [r.in_flight_limit for stage in ask(name, profile, job)[0].plan.stages for r in stage.replicas]
        for name in ("gpipe", "1f1b")
    }
    assert limits == {"gpipe": [32] * 6, "1f1b": [24, 20, 16, 12, 8, 4]}


def test_what_a_schedule_holds_is_refused_where_it_does_not_fit(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.01, "b": 0.01}}, memory_bytes=320 * 2**20)
    profile = make_profile(cluster, make_graph(4))
    assert ask("1f1b", profile, JobSpec(global_batch=64, micro_batches=(1,)))
    with pytest.raises(InfeasiblePlanError, match=r"a needs .* for units 0-2, has 320 MiB"):
        ask("gpipe", profile, JobSpec(global_batch=64, micro_batches=(1,)))


def test_pipedream_makes_no_replicas_where_summing_weights_is_dear(make_cluster, make_graph, make_profile):
    cluster = make_cluster({f"s{n}": {f"d{n}": 0.01} for n in range(3)}, bandwidth=1e5)
    profile = make_profile(cluster, make_graph(12))
    plan = ask("pipedream", profile, JobSpec(global_batch=32, micro_batches=(1,)))[0].plan
    assert [len(stage.devices) for stage in plan.stages] == [1, 1, 1]


def test_hetpipe_makes_workers_of_every_kind(preset_profile):
    profile = preset_profile("laptop")
    kinds = {device.name: device.kind for device in profile.cluster.devices}
    for proposal in ask("hetpipe", profile, JobSpec(global_batch=32)):
        for stage in proposal.plan.stages:
            assert len({kinds[name] for name in stage.devices}) == 1
        assert len({len(stage.devices) for stage in proposal.plan.stages}) == 1


def test_alpas_submeshes_are_alike(preset_profile):
    for proposal in ask("alpa", preset_profile("laptop"), JobSpec(global_batch=32)):
        assert len({len(stage.devices) for stage in proposal.plan.stages}) == 1
        assert len(proposal.plan.devices) == 6


def test_single_site_stays_in_one_and_single_device_on_one(preset_profile):
    profile = preset_profile("laptop")
    for proposal in ask("single-site", profile, JobSpec(global_batch=32)):
        assert len({profile.cluster.device_by_name[name].site for name in proposal.plan.devices}) == 1
    for proposal in ask("single-device", profile, JobSpec(global_batch=32)):
        assert len(proposal.plan.devices) == 1


@pytest.mark.parametrize("name", PLAIN)
def test_constraints_on_devices_are_kept(name, preset_profile):
    profile = preset_profile("laptop")
    constraints = {"leave_out": ("home",), "quotas": (Quota(kind="xavier-nx", count=2),)}
    for proposal in ask(name, profile, JobSpec(global_batch=32), **constraints):
        assert Constraints(**constraints).broken_by_devices(profile.cluster, proposal.plan.devices) == []


def test_names_are_checked():
    assert strategies_named(("ddp", "ddp", "eddl")) == ("ddp", "eddl")
    assert set(PLAIN) <= set(strategies_named(("all",)))
    assert DEFAULT_STRATEGY in strategies()
    with pytest.raises(UsageError, match="did you mean hetpipe"):
        strategies_named(("hetpip",))


EQUAL = """
name: equal
sites:
  - name: zone
    network: {bandwidth: 10 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: spot, count: 32, backend: emulated, devices: {v100: 1}}
links: []
"""


@pytest.mark.slow
def test_a_plan_that_divides_a_block_between_stages_is_taken_over(tmp_path):
    """Of 32 equal devices one is left out: blocks of `auto` are of several devices, and `spantrain` knows no blocks."""
    path = tmp_path / "cluster.yaml"
    path.write_text(EQUAL)
    cluster = load_cluster(path)
    gone = cluster.devices[3].name
    options = PlanOptions(constraints=Constraints(leave_out=(gone,), interleaving=False))
    profile = described_profile(cluster, resolve_model("gpt2-xl"))
    plan = make_plan(profile, JobSpec(global_batch=128, optimizer="adamw"), options).plan
    assert gone not in plan.devices
