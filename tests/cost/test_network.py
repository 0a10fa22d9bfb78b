import pytest

from spantrain.cost.network import NetworkCost
from spantrain.errors import ProfileError


def test_a_transfer_is_latency_and_occupancy(cost_profile):
    cost = NetworkCost(cost_profile)
    assert cost.occupancy_seconds("a0", "b0", 1e6) == pytest.approx(1.0)
    assert cost.transfer_seconds("a0", "b0", 1e6) == pytest.approx(1.01)
    assert cost.transfer_seconds("a0", "a0", 1e6) == 0.0


def test_all_devices_share_the_link_between_sites_in_each_direction(cost_profile):
    cost = NetworkCost(cost_profile)
    assert cost.shared_link("a0", "b0") == cost.shared_link("a1", "b0") == "near->far"
    assert cost.shared_link("b0", "a0") == "far->near"
    assert cost.shared_link("a0", "a1") != cost.shared_link("a1", "a0")


def test_ring_sum_is_equation_5_with_latency(cost_profile):
    cost = NetworkCost(cost_profile)
    assert cost.all_reduce_seconds(("a0",), 1e6) == 0.0
    assert cost.all_reduce_seconds(("a0", "a1"), 1e6) == pytest.approx(2 * 0.5 * 1e6 / 1e8 + 2 * 1e-3)
    slowest = 2 * 2 / 3 * 1e6 / 1e6 + 4 * 1e-2
    assert cost.all_reduce_seconds(("a0", "a1", "b0"), 1e6) == pytest.approx(slowest)


def test_replicas_together_fill_the_link_between_sites(cost_profile):
    path = NetworkCost(cost_profile).path((("a0", 1.0), ("a1", 1.0)), (("b0", 1.0),))
    assert path.link_s_per_byte == {"near->far": pytest.approx(1e-6)}
    assert path.seconds(1e6) == pytest.approx(1.01)


def test_replicas_that_meet_inside_a_site_use_links_of_their_own(cost_profile):
    path = NetworkCost(cost_profile).path((("a0", 1.0), ("b0", 1.0)), (("a1", 1.0),))
    assert path.link_s_per_byte["near/h-a0->near/h-a1"] == pytest.approx(0.5e-8)
    assert path.link_s_per_byte["far->near"] == pytest.approx(0.5e-6)
    assert path.latency_s == 1e-2


def test_a_pair_that_was_not_measured_is_named(cost_profile):
    with pytest.raises(ProfileError, match="from a0 to nowhere"):
        NetworkCost(cost_profile).link("a0", "nowhere")
