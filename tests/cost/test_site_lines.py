"""Uplinks and downlinks that all pairs of a site share, in costs."""

from dataclasses import replace

import pytest

from spantrain.cost.network import NetworkCost, scarce_links
from testing.sites import LATENCY_S, RATE, sites_cluster, sites_profile


def costs(rates: dict[tuple[str, str], float] | None = None, *, measured: bool = True, **lines: float) -> NetworkCost:
    return NetworkCost(sites_profile(sites_cluster(rates, **lines), measured=measured))


def rates_of(network: NetworkCost, source: str, target: str) -> dict[str, float]:
    return {shared.name: shared.bandwidth_bytes_per_s for shared in network.route(source, target)}


@pytest.mark.parametrize("measured", [True, False])
def test_a_transfer_between_sites_passes_their_lines(measured: bool) -> None:
    network = costs(measured=measured, lab_up=150.0, office_down=120.0)
    assert list(rates_of(network, "a", "c")) == ["lab->office", "lab/ha out", "office/hc in", "lab up", "office down"]
    assert rates_of(network, "a", "c")["lab up"] == 150.0
    assert "lab up" in rates_of(network, "b", "d")
    assert not {"lab up", "office down"} & set(rates_of(network, "c", "a"))
    assert not {"lab up", "lab down"} & set(rates_of(network, "a", "b"))


@pytest.mark.parametrize("measured", [True, False])
def test_one_pair_gets_the_narrowest_of_link_and_lines(measured: bool) -> None:
    network = costs(measured=measured, lab_up=50.0, home_down=20.0)
    assert network.transfer_seconds("a", "c", 100) == pytest.approx(LATENCY_S + 2.0)
    assert network.transfer_seconds("a", "d", 100) == pytest.approx(LATENCY_S + 5.0)
    assert network.transfer_seconds("c", "a", 100) == pytest.approx(LATENCY_S + 1.0)
    # Behind a line that the measurement filled, the link is what the description says.
    assert rates_of(network, "a", "c")["lab->office"] == RATE
    assert rates_of(network, "c", "a")["office->lab"] == RATE


def test_what_was_measured_through_a_line_it_carries() -> None:
    cluster = sites_cluster(lab_up=50.0)
    faster = sites_profile(sites_cluster()).links
    profile = replace(sites_profile(cluster), links=faster)
    assert rates_of(NetworkCost(profile), "a", "c")["lab up"] == RATE


def test_pairs_to_different_sites_share_the_uplink() -> None:
    network = costs(lab_up=RATE)
    alone, both = network.busy_together_s([("a", "c")], 100), network.busy_together_s([("a", "c"), ("b", "d")], 100)
    assert alone == [pytest.approx(1.0)]
    assert both == [pytest.approx(2.0)] * 2
    assert network.busy_together_s([("a", "c")], 100, [("b", "d")]) == [pytest.approx(2.0)]
    assert costs().busy_together_s([("a", "c"), ("b", "d")], 100) == [pytest.approx(1.0)] * 2


def test_what_a_slow_pair_leaves_of_a_line_is_for_the_others() -> None:
    network = costs({("lab", "home"): 20.0}, lab_up=RATE)
    assert network.busy_together_s([("a", "c"), ("b", "d")], 100) == [pytest.approx(100 / 80), pytest.approx(5.0)]


def test_a_path_to_several_sites_is_as_slow_as_its_uplink() -> None:
    senders, receivers = (("a", 1.0),), (("c", 1.0), ("d", 1.0))
    assert costs().path(senders, receivers).s_per_byte == pytest.approx(0.5 / RATE)
    path = costs(lab_up=RATE).path(senders, receivers)
    assert path.s_per_byte == path.link_s_per_byte["lab up"] == pytest.approx(1 / RATE)


def test_a_ring_that_leaves_a_site_twice_shares_its_uplink() -> None:
    """c -> a -> d -> b -> c leaves the lab by two links at once; c -> a -> b -> d leaves it once."""
    twice, once = ("c", "a", "d", "b"), ("c", "a", "b", "d")
    free, shared = costs(), costs(lab_up=RATE)
    assert free.collectives.seconds(twice, 400) == pytest.approx(6 * (LATENCY_S + 1.0))
    assert shared.collectives.seconds(twice, 400) > 6 * (LATENCY_S + 1.0) + 1.0
    assert shared.collectives.seconds(once, 400) == pytest.approx(free.collectives.seconds(once, 400))


def test_lines_and_ways_stay_since_they_may_change() -> None:
    uses = scarce_links(costs(lab_up=150.0), [("a", "c"), ("b", "d")])
    assert dict(uses["a", "c"]) == {"lab->office": 1.0, "lab up": pytest.approx(100 / 150)}
    assert dict(scarce_links(costs(lab_up=500.0), [("a", "c")])["a", "c"]) == {
        "lab->office": 1.0,
        "lab up": pytest.approx(0.2),
    }
    assert dict(scarce_links(costs(), [("a", "c"), ("b", "d")])["a", "c"]) == {"lab->office": 1.0}


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_line_that_carries_nothing_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"site lab: uplink_bandwidth_bytes_per_s must be (finite and )?more than 0"):
        sites_cluster(lab_up=wrong)
