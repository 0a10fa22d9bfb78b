"""HexiScale's and Zorse's planners: their graph of devices by hand, and what holds of every plan of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.shares import StateSharding
from spantrain.cost.network import NetworkCost
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Quota
from spantrain_studies.planners.asymmetric.graph import DeviceGraph
from spantrain_studies.planners.asymmetric.hexiscale import hexiscale
from spantrain_studies.planners.asymmetric.zorse import zorse
from testing.hosts import cluster_of_hosts, divisible

BOTH = pytest.mark.parametrize("strategy", [hexiscale, zorse], ids=["hexiscale", "zorse"])
TWO_PLACES = {"s": [("k", 1)] * 2, "t": [("k", 1)] * 2}


def ask(strategy, profile, *, batch=16, sizes=(), **constraints):
    job = JobSpec(global_batch=batch, micro_batches=sizes)
    return strategy(
        PlanRequest(profile=profile, job=job, constraints=Constraints(**constraints), evaluate=Evaluator(profile, job))
    )


@pytest.fixture
def two_places(make_profile, make_graph):
    return make_profile(cluster_of_hosts(TWO_PLACES, speed={"k": 0.01}), make_graph(6))


@pytest.fixture
def graph(two_places):
    return DeviceGraph([device.name for device in two_places.cluster.devices], NetworkCost(two_places))


def test_what_talks_fast_is_one_group_and_slow_links_are_cut(graph):
    assert [set(group) for group in graph.groupings()[2]] == [{"s-0-0", "s-1-0"}, {"t-0-0", "t-1-0"}]
    assert graph.groupings()[4] == tuple((name,) for name in graph.devices)
    assert graph.least_inside(("s-0-0", "s-1-0")) > 50 * graph.least_inside(("s-0-0", "t-0-0"))
    assert graph.least_inside(("s-0-0",)) == float("inf")


def test_pipelines_are_even_and_have_the_slow_links_inside(graph):
    alike = dict.fromkeys(graph.devices, 1.0)
    assert [{name[0] for name in part} for part in graph.dealt(2, alike)] == [{"s", "t"}] * 2
    weight = {"s-0-0": 3.0, "s-1-0": 1.0, "t-0-0": 1.0, "t-1-0": 1.0}
    assert sorted(map(len, graph.dealt(2, weight))) == [1, 3]


def test_a_chain_goes_from_the_fastest_neighbour_to_the_next(graph):
    chain = graph.best_chain([(name,) for name in ("s-0-0", "t-0-0", "s-1-0", "t-1-0")])
    assert [group[0][0] for group in chain] in (list("sstt"), list("ttss"))


def test_hexiscale_has_pipelines_with_tensor_groups(make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 4), ("k", 4)]}, speed={"k": 0.01}, memory_bytes=420 * 2**20, between=1e6)
    profile = make_profile(cluster, divisible(make_graph(1, hidden=1024)))
    plans = [proposal.plan for proposal in ask(hexiscale, profile, batch=8)]
    groups = {len(one.devices) for plan in plans for stage in plan.stages for one in stage.replicas}
    assert max(groups) > 1
    assert any(len(stage.replicas) > 1 for plan in plans for stage in plan.stages)


def test_hexiscale_gives_a_faster_pipeline_more_samples(make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("fast", 1), ("slow", 1)]}, speed={"fast": 0.03, "slow": 0.01})
    plans = [proposal.plan for proposal in ask(hexiscale, make_profile(cluster, make_graph(0)), batch=32)]
    (stage,) = next(plan for plan in plans if len(plan.stages) == 1).stages
    share = {replica.devices[0]: replica.sample_share for replica in stage.replicas}
    assert share["s-0-0"] == pytest.approx(3 * share["s-1-0"], rel=0.35)


def test_zorse_makes_each_place_a_stage_with_samples_by_what_devices_get_done(make_profile, make_graph):
    hosts = {"s": [("fast", 1), ("slow", 1)], "t": [("slow", 1)] * 2}
    cluster = cluster_of_hosts(hosts, speed={"fast": 0.03, "slow": 0.01}, between=2.5e6)
    plans = [proposal.plan for proposal in ask(zorse, make_profile(cluster, make_graph(12)), batch=32)]
    plan = next(plan for plan in plans if len(plan.stages) == 2)
    assert [{name[0] for name in stage.devices} for stage in plan.stages] in ([{"s"}, {"t"}], [{"t"}, {"s"}])
    mixed = next(stage for stage in plan.stages if "s-0-0" in stage.devices)
    share = {replica.devices[0]: replica.sample_share for replica in mixed.replicas}
    assert share["s-0-0"] > 2 * share["s-1-0"]
    other = plan.stages[1 - plan.stages.index(mixed)]
    assert len(mixed.units) > 1.3 * len(other.units)  # they get twice as much done


def test_zorse_divides_state_where_it_does_not_fit_whole(make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 1)] * 4}, speed={"k": 0.01}, memory_bytes=380 * 2**20)
    profile = make_profile(cluster, make_graph(0, hidden=1024))
    (first, *_) = ask(zorse, profile, batch=16)
    assert {stage.state_sharding for stage in first.plan.stages} >= {StateSharding.ZERO2}


def test_zorse_interleaves_but_where_that_is_forbidden(two_places):
    assert any(one.plan.interleaved for one in ask(zorse, two_places))
    assert not any(one.plan.interleaved for one in ask(zorse, two_places, interleaving=False))


@BOTH
def test_a_graph_of_too_many_devices_is_refused(strategy, make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 129)]}, speed={"k": 0.01})
    with pytest.raises(InfeasiblePlanError, match="graphs of up to 128 devices, got 129"):
        ask(strategy, make_profile(cluster, make_graph(2)))


@BOTH
def test_what_fits_nowhere_is_refused(strategy, make_profile, make_graph):
    cluster = cluster_of_hosts({"s": [("k", 2)]}, speed={"k": 0.01}, memory_bytes=302 * 2**20)
    with pytest.raises(InfeasiblePlanError, match="2 devices ha"):
        ask(strategy, make_profile(cluster, make_graph(4)))


@BOTH
def test_quotas_are_kept(strategy, two_places):
    for proposal in ask(strategy, two_places, quotas=(Quota(kind="k", count=3),)):
        assert len(proposal.plan.devices) <= 3


HOSTS = st.lists(st.tuples(st.sampled_from(["fast", "slow"]), st.integers(1, 4)), min_size=1, max_size=3)


@BOTH
@settings(deadline=None, max_examples=15)
@given(sites=st.lists(HOSTS, min_size=1, max_size=3), batch=st.sampled_from([4, 12, 32]), blocks=st.integers(0, 6))
def test_every_plan_fits_and_uses_devices_once(strategy, sites, batch, blocks, make_profile, make_graph):
    cluster = cluster_of_hosts(
        {f"s{number}": hosts for number, hosts in enumerate(sites)}, speed={"fast": 0.03, "slow": 0.01}
    )
    profile = make_profile(cluster, divisible(make_graph(blocks)))
    try:
        proposals = ask(strategy, profile, batch=batch)
    except InfeasiblePlanError:
        return
    evaluate = Evaluator(profile, JobSpec(global_batch=batch))
    for proposal in proposals:
        assert evaluate(proposal.plan).fits
        assert set(proposal.plan.devices) <= {device.name for device in cluster.devices}
