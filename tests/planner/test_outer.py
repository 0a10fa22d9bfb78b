"""Sites joined by an outer optimizer: exchanges over the links, who takes part, what the round comes to."""

from collections.abc import Callable

import pytest

from spantrain.core.outer import OuterGroup, OuterPlan
from spantrain.core.profile import Profile
from spantrain.cost.network import NetworkCost
from spantrain.planner.outer import best_join, exchange_of

MBIT = 125e3


@pytest.fixture
def profile(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Profile:
    cluster = make_cluster(
        {"a": {"a0": 1.0}, "b": {"b0": 1.0}, "c": {"c0": 1.0}}, bandwidth=100 * MBIT, latency_s=20e-3
    )
    return make_profile(cluster, make_graph(blocks=2))


def test_an_exchange_is_all_parameters_there_and_back(profile: Profile) -> None:
    size = 12_500_000  # a second at 100 Mbit/s
    found = exchange_of(NetworkCost(profile), ("a0", "b0"), size)
    assert found.server in ("a0", "b0")
    assert found.seconds == pytest.approx(2 * (1 + 20e-3), rel=0.02)


def test_the_joined_sites_share_the_batch_by_speed(profile: Profile) -> None:
    speeds = {"a": 30.0, "b": 10.0}
    found = best_join(NetworkCost(profile), speeds, {"a": "a0", "b": "b0"}, 1_000, 64, 100)
    assert found is not None
    assert found.samples == {"a": 48, "b": 16}
    assert found.samples_per_s == pytest.approx(40.0, rel=0.05)


def test_a_site_that_costs_more_than_it_brings_is_left_out(profile: Profile) -> None:
    leaders = {name: f"{name}0" for name in "abc"}
    speeds = {"a": 30.0, "b": 30.0, "c": 0.5}
    found = best_join(NetworkCost(profile), speeds, leaders, 12_500_000, 64, 10)
    assert found is not None
    assert set(found.samples) == {"a", "b"}


def test_no_join_where_a_site_gets_no_sample(profile: Profile) -> None:
    speeds = {"a": 100.0, "b": 0.1}
    assert best_join(NetworkCost(profile), speeds, {"a": "a0", "b": "b0"}, 1_000, 4, 100) is None


def test_rarer_exchanges_give_more_samples(profile: Profile) -> None:
    args = (NetworkCost(profile), {"a": 30.0, "b": 10.0}, {"a": "a0", "b": "b0"}, 12_500_000, 64)
    rates = [found.samples_per_s for every in (1, 10, 100, 1000) if (found := best_join(*args, every)) is not None]
    assert rates == sorted(rates)
    assert len(rates) == 4


def test_a_round_is_the_slowest_group_and_the_exchange() -> None:
    groups = tuple(
        OuterGroup(name=name, devices=(f"{name}0",), global_batch=8, step_s=step_s, stages="units 0-3 on it")
        for name, step_s in (("a", 1.0), ("b", 2.0))
    )
    plan = OuterPlan(groups=groups, inner_steps=10, exchange_s=5.0, server="a0", samples_per_s=6.4, allowed=False)
    assert plan.round_s == 25.0
    assert plan.global_batch == 16
    with pytest.raises(ValueError, match="two groups at least"):
        OuterPlan(groups=groups[:1], inner_steps=10, exchange_s=5.0, server="a0", samples_per_s=6.4, allowed=False)
