"""Parameters that stages share and nobody trains: no planner pays for sums of their gradients."""

from dataclasses import replace

import pytest

from spantrain.cost.step import StepCost
from spantrain.planner.request import JobSpec
from spantrain.planner.strategies.auto.strategy import auto
from spantrain.planner.strategies.pools.costs import PoolPlan, PoolReplica, PoolStage
from spantrain.planner.strategies.pools.profile_costs import ProfilePools
from spantrain.planner.strategies.spantrain.strategy import spantrain
from testing.planner_requests import request_of

JOB = JobSpec(global_batch=8)


@pytest.fixture
def pair(make_cluster, make_graph, make_profile):
    """A profile of two devices far apart, and the same with the shared embedding frozen."""
    cluster = make_cluster({"here": {"a": 0.002}, "there": {"b": 0.002}}, bandwidth=1e7, latency_s=0.001)
    trained = make_profile(cluster, make_graph(6))
    return trained, replace(trained, graph=replace(trained.graph, frozen_shared=("wte",)))


def exchange_s(profile):
    return profile.graph.shared_bytes["wte"] / 1e7


@pytest.mark.parametrize("strategy", [auto, spantrain])
def test_estimates_hold_their_exchange_only_where_it_is_trained(pair, strategy):
    trained, frozen = (
        min(p.own_estimate_s for p in strategy(request_of(profile, JOB, keep=("a", "b")))) for profile in pair
    )
    assert trained - frozen > 0.5 * exchange_s(pair[0])


def test_so_does_the_closed_form(pair):
    (plan, *_) = (p.plan for p in spantrain(request_of(pair[0], JOB, keep=("a", "b"))) if len(p.plan.stages) == 2)
    trained, frozen = (StepCost(profile).estimate(plan).step_s for profile in pair)
    assert trained - frozen == pytest.approx(exchange_s(pair[0]), rel=0.2)


def test_so_does_the_search_by_counts(pair):
    half = len(pair[0].graph.units) // 2
    stages = (range(half), range(half, len(pair[0].graph.units)))
    plan = PoolPlan(
        micro_batch=1,
        micro_batches=8,
        stages=tuple(PoolStage(units=u, runs=((PoolReplica(n, 1), 1),)) for n, u in enumerate(stages)),
    )
    trained, frozen = (ProfilePools(request_of(profile, JOB), most_degree=1).tied_s(plan) for profile in pair)
    assert trained == pytest.approx(exchange_s(pair[0]), rel=0.2)
    assert frozen == 0.0
