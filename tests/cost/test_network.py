from dataclasses import replace

import pytest

from spantrain.core.profile import BandwidthCurve, BandwidthPoint
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


def test_a_host_has_one_port_for_all_its_traffic(cost_profile):
    cost = NetworkCost(cost_profile)
    names = [shared.name for shared in cost.route("a0", "b0")]
    assert names == ["near->far", "near/h-a0 out", "far/h-b0 in"]
    carries = {
        shared.name: shared.bandwidth_bytes_per_s
        for pair in (("a0", "b0"), ("a0", "a1"))
        for shared in cost.route(*pair)
    }
    # h-b0 has no neighbour that could be measured: its site's figure stands for its port.
    assert carries == {
        "near->far": 1e6,
        "near/h-a0 out": 1e8,
        "far/h-b0 in": 1e8,
        "near/h-a0->near/h-a1": 1e8,
        "near/h-a1 in": 1e8,
    }


def test_a_curve_changes_the_seconds_of_small_messages_only(cost_profile):
    points = tuple(BandwidthPoint(size_bytes=n, bandwidth_bytes_per_s=b) for n, b in ((1000, 1e5), (10**6, 1e6)))
    links = tuple(
        replace(link, curve=BandwidthCurve(points=points)) if link.target == "b0" else link
        for link in cost_profile.links
    )
    cost = NetworkCost(replace(cost_profile, links=links))
    assert cost.occupancy_seconds("a0", "b0", 1000) == pytest.approx(0.01)
    assert cost.occupancy_seconds("a0", "b0", 2e6) == pytest.approx(2.0)
    assert cost.occupancy_seconds("b0", "a0", 1000) == pytest.approx(0.001)
    # A path says what large messages get.
    assert cost.path((("a0", 1.0),), (("b0", 1.0),)).s_per_byte == pytest.approx(1e-6)


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
