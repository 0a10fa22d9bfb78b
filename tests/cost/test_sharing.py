"""Which links pairs make scarce for each other."""

import pytest

from spantrain.cost.network import NetworkCost, scarce_links
from spantrain.errors import ProfileError


def test_pairs_between_sites_share_the_line_and_nothing_else(cost_profile):
    uses = scarce_links(NetworkCost(cost_profile), [("a0", "b0"), ("a1", "b0"), ("b0", "a0")])
    line = (("near->far", 1.0),)
    assert uses == {("a0", "b0"): line, ("a1", "b0"): line, ("b0", "a0"): (("far->near", 1.0),)}


def test_a_port_that_two_ways_leave_by_is_shared(cost_profile):
    uses = scarce_links(NetworkCost(cost_profile), [("a0", "a1"), ("a0", "b0")])
    assert uses[("a0", "a1")] == (("near/h-a0 out", 1.0),)
    # The line takes a hundredth of the port when it is full.
    assert uses[("a0", "b0")] == (("near->far", 1.0), ("near/h-a0 out", pytest.approx(0.01)))


def test_a_pair_alone_has_the_way_between_its_places(cost_profile):
    assert scarce_links(NetworkCost(cost_profile), [("a0", "a1")]) == {("a0", "a1"): (("near/h-a0->near/h-a1", 1.0),)}


def test_a_pair_that_was_not_measured_is_named(cost_profile):
    with pytest.raises(ProfileError, match="from a0 to a0"):
        scarce_links(NetworkCost(cost_profile), [("a0", "a0")])
