"""A site's uplink in what is shown of a plan, and in what-ifs."""

import pytest

from made_up_sites import RATE, sites_cluster, sites_profile, two_stages
from spantrain.app.evaluate import link_loads
from spantrain.app.what_if import with_faster_link
from spantrain.cost.network import NetworkCost


def test_an_uplink_has_the_load_of_all_its_links() -> None:
    cluster = sites_cluster(lab_up=0.8 * RATE)
    loads = link_loads(two_stages(cluster, "a", "cd"), sites_profile(cluster))
    to_office, to_home, uplink = (loads[name] for name in ("lab->office", "lab->home", "lab up"))
    assert uplink.size_bytes == to_office.size_bytes + to_home.size_bytes == 8 * 20
    assert uplink.bandwidth_bytes_per_s == 0.8 * RATE
    assert uplink.busy_ratio > to_office.busy_ratio
    assert not [name for name in loads if name.endswith(" down")]


@pytest.mark.parametrize("measured", [True, False])
def test_a_faster_link_does_not_widen_the_line_before_it(measured: bool) -> None:
    profile = sites_profile(sites_cluster(lab_up=1.5 * RATE), measured=measured)
    faster = NetworkCost(with_faster_link(profile, ("lab", "office"), 2.0))
    assert faster.link("a", "c").bandwidth_bytes_per_s == 1.5 * RATE
    assert faster.link("c", "a").bandwidth_bytes_per_s == 2 * RATE
    assert {shared.name: shared.bandwidth_bytes_per_s for shared in faster.route("a", "c")}["lab up"] == 1.5 * RATE
