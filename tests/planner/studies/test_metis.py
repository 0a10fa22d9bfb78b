"""Metis's planner: its groupings by hand, its balance of samples and layers, and what holds of every plan of it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Quota
from spantrain_studies.planners.metis import arrangements, kind_orders, metis
from testing.hosts import cluster_of_hosts, divisible


def ask(profile, *, batch=16, sizes=(), **constraints):
    job = JobSpec(global_batch=batch, micro_batches=sizes)
    return metis(
        PlanRequest(profile=profile, job=job, constraints=Constraints(**constraints), evaluate=Evaluator(profile, job))
    )


def test_kinds_come_in_every_order_and_many_by_speed():
    assert kind_orders({"slow": 1.0, "fast": 2.0}) == (("fast", "slow"), ("slow", "fast"))
    assert len(kind_orders({"a": 1.0, "b": 2.0, "c": 3.0})) == 6
    assert kind_orders({"a": 1.0, "d": 4.0, "c": 3.0, "b": 2.0}) == (tuple("dcba"), tuple("abcd"))


def test_the_most_even_groups_come_first():
    assert arrangements([1, 1, 1, 1, 2, 2], 3, most=1) == ((2, 2, 2),)
    assert arrangements([4, 4, 1, 1, 1, 1], 3, most=1) == ((1, 1, 4),)
    assert arrangements([1] * 6, 1, most=3) == ((6,),)
    assert arrangements([1] * 3, 3, most=3) == ((1, 1, 1),)


@settings(deadline=None, max_examples=50)
@given(capacity=st.lists(st.integers(1, 8), min_size=1, max_size=40), data=st.data())
def test_groups_have_every_device_once(capacity, data):
    groups = data.draw(st.integers(1, len(capacity)))
    for sizes in arrangements(capacity, groups, most=4):
        assert len(sizes) == groups
        assert sum(sizes) == len(capacity)
        assert all(size.bit_count() == 1 for size in sizes[:-1])


def test_layers_follow_capacity(make_graph, make_profile):
    cluster = cluster_of_hosts({"s": [("fast", 1), ("slow", 1)]}, speed={"fast": 0.03, "slow": 0.01}, bandwidth=2e7)
    plans = [proposal.plan for proposal in ask(make_profile(cluster, make_graph(12)), batch=32)]
    units = {stage.devices[0]: len(stage.units) for stage in plans[0].stages}
    assert units["s-0-0"] > 2 * units["s-1-0"]


def test_samples_follow_capacity(make_graph, make_profile):
    cluster = cluster_of_hosts({"s": [("fast", 1), ("slow", 1)]}, speed={"fast": 0.03, "slow": 0.01})
    profile = make_profile(cluster, make_graph(0))
    plan = next(proposal.plan for proposal in ask(profile, batch=32) if len(proposal.plan.stages) == 1)
    share = {replica.devices[0]: replica.sample_share for replica in plan.stages[0].replicas}
    assert share["s-0-0"] == pytest.approx(3 * share["s-1-0"], rel=0.35)


def test_the_network_is_all_alike_to_it(make_graph, make_profile):
    hosts = {"s": [("k", 1)] * 2, "t": [("k", 1)] * 2}
    cluster = cluster_of_hosts(hosts, speed={"k": 0.01}, between=1.25e5)
    profile = make_profile(cluster, make_graph(6))
    best = ask(profile)[0]
    assert sorted(best.plan.devices) == sorted(device.name for device in cluster.devices)
    assert Evaluator(profile, JobSpec(global_batch=16))(best.plan).step_s > 1.5 * best.own_estimate_s


def test_a_model_too_large_for_a_device_is_divided_inside_a_host(make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 4)]}, speed={"k": 0.01}, memory_bytes=420 * 2**20)
    profile = make_profile(cluster, divisible(make_graph(1, hidden=1024)))
    plan = ask(profile, batch=4)[0].plan
    assert max(len(replica.devices) for stage in plan.stages for replica in stage.replicas) > 1


def test_what_fits_nowhere_is_refused_with_numbers(make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 2)]}, speed={"k": 0.01}, memory_bytes=302 * 2**20)
    with pytest.raises(InfeasiblePlanError, match=r"all 2 devices .* needs .* for unit \d with one sample, has 302"):
        ask(make_profile(cluster, make_graph(4)))


def test_quotas_and_micro_batches_are_kept(make_graph, make_profile):
    cluster = cluster_of_hosts({"s": [("k", 2)] * 2, "t": [("q", 2)]}, speed={"k": 0.01, "q": 0.02})
    profile = make_profile(cluster, make_graph(6))
    kind = {device.name: device.kind for device in cluster.devices}
    for proposal in ask(profile, sizes=(8,), quotas=(Quota(kind="k", count=2),), leave_out=("t-0-0",)):
        assert {span.size for stage in proposal.plan.stages for span in stage.micro_batches} == {8}
        assert Counter(kind[name] for name in proposal.plan.devices) == {"k": 2, "q": 1}


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_plan_is_valid_and_fits(data, make_graph, make_profile):
    sites = {
        f"s{site}": [
            (data.draw(st.sampled_from(["k", "q", "r"])), data.draw(st.integers(1, 4)))
            for _ in range(data.draw(st.integers(1, 3)))
        ]
        for site in range(data.draw(st.integers(1, 2)))
    }
    memory = {kind: data.draw(st.sampled_from([308, 320, 4000])) * 2**20 for kind in ("k", "q", "r")}
    cluster = cluster_of_hosts(sites, speed={"k": 0.002, "q": 0.01, "r": 0.02}, memory_bytes=memory)
    profile = make_profile(cluster, divisible(make_graph(data.draw(st.integers(1, 6)))))
    job = JobSpec(global_batch=data.draw(st.integers(1, 24)))
    evaluator = Evaluator(profile, job)
    try:
        proposals = metis(PlanRequest(profile=profile, job=job, evaluate=evaluator))
    except InfeasiblePlanError:
        return
    for proposal in proposals:
        plan, device = proposal.plan, cluster.device_by_name
        assert evaluator(plan).fits
        assert 0 < proposal.own_estimate_s < float("inf")
        assert sorted(plan.devices) == sorted(device)
        for stage in plan.stages:
            taken = sum(span.size for index in range(len(stage.replicas)) for span in stage.replica_spans(index))
            assert taken == job.global_batch
            for replica in stage.replicas:
                assert len({(device[name].host, device[name].kind) for name in replica.devices}) == 1
