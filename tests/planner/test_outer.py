"""Sites joined by an outer optimizer: exchanges over the links, who takes part, what the round comes to."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.core.outer.groups import OuterGroup, OuterPlan
from spantrain.core.profile import Profile
from spantrain.cost.network import NetworkCost
from spantrain.planner.engine.clusters import clusters_of
from spantrain.planner.engine.outer import best_join, exchange_of, slow_boundaries
from spantrain.planner.groups import group_devices

MBIT = 125e3


@pytest.fixture
def profile(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Profile:
    cluster = make_cluster(
        {"a": {"a0": 1.0}, "b": {"b0": 1.0}, "c": {"c0": 1.0}}, bandwidth=100 * MBIT, latency_s=20e-3
    )
    return make_profile(cluster, make_graph(blocks=2))


def devices_of(profile: Profile) -> tuple[str, ...]:
    return tuple(device.name for device in profile.cluster.devices)


def test_sites_with_a_fast_link_are_one_cluster_and_a_slow_site_is_several(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable
) -> None:
    sites = {"edge": {"a": 1.0, "b": 1.0}, "end": {"c": 1.0, "d": 1.0}}
    near = make_profile(make_cluster(sites, bandwidth=125e6, latency_s=3e-4), make_graph(blocks=2))
    assert [group.name for group in clusters_of(near, devices_of(near))] == ["edge+end"]
    cluster = make_cluster(sites)
    slow_end = replace(cluster.sites[1], bandwidth_bytes_per_s=1e6, latency_s=10e-3)
    apart = make_profile(replace(cluster, sites=(cluster.sites[0], slow_end)), make_graph(blocks=2))
    found = clusters_of(apart, devices_of(apart))
    assert [(group.name, group.devices) for group in found] == [
        ("edge", ("a", "b")),
        ("end#1", ("c",)),
        ("end#2", ("d",)),
    ]
    (way,) = slow_boundaries(apart, found[1:])
    assert way.groups == ("end#1", "end#2")
    assert way.bandwidth_bytes_per_s == pytest.approx(1e6)


@pytest.mark.parametrize("lan_latency_s", [2e-4, 10e-3])
@pytest.mark.parametrize("wan_latency_s", [3e-4, 20e-3])
def test_a_few_devices_stand_for_many_described_ones(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable, lan_latency_s: float, wan_latency_s: float
) -> None:
    names = [[f"{site}{number}" for number in range(25)] for site in "abc"]
    cluster = make_cluster({own[0][0]: dict.fromkeys(own, 1.0) for own in names}, latency_s=wan_latency_s)
    sites = tuple(replace(site, latency_s=lan_latency_s) for site in cluster.sites)
    measured = make_profile(replace(cluster, sites=sites), make_graph(blocks=2))
    described = replace(measured, links=(), links_described=True)
    expected = {group.devices for group in group_devices(measured)}
    assert {group.devices for group in clusters_of(described, devices_of(described))} == expected


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
