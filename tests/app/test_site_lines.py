"""A site's uplink in what is shown of a plan, and in what-ifs."""

from dataclasses import replace

import pytest

from spantrain.app.planning.explain import explain_plan, with_faster_line, with_faster_link
from spantrain.cost.network import NetworkCost
from spantrain.planner.engine.evaluate import link_loads
from testing.sites import RATE, sites_cluster, sites_profile, two_stages


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


@pytest.mark.parametrize("measured", [True, False])
def test_a_wider_line_gives_its_pairs_what_the_links_behind_it_carry(measured: bool) -> None:
    rates = {("lab", "office"): 0.7 * RATE, ("lab", "home"): 0.2 * RATE}
    profile = sites_profile(sites_cluster(rates, lab_up=0.4 * RATE, office_up=0.5 * RATE), measured=measured)
    wider = NetworkCost(with_faster_line(profile, "lab", "uplink", 2.0))
    assert wider.link("a", "c").bandwidth_bytes_per_s == pytest.approx(0.7 * RATE)
    assert wider.link("a", "d").bandwidth_bytes_per_s == pytest.approx(0.2 * RATE), "it did not fill the line"
    assert wider.link("c", "a").bandwidth_bytes_per_s == pytest.approx(0.5 * RATE), "another way"
    shared = {way.name: way.bandwidth_bytes_per_s for way in wider.route("a", "c")}
    assert shared["lab up"] == pytest.approx(0.8 * RATE)
    with pytest.raises(ValueError, match="has no downlink"):
        with_faster_line(profile, "lab", "downlink", 2.0)


def test_of_a_line_that_limits_a_plan_more_is_said_to_help() -> None:
    profile = sites_profile(sites_cluster(lab_up=0.1 * RATE, office_down=50 * RATE), measured=False)
    plan = replace(two_stages(profile.cluster, "ab", "cd"), schedule="gpipe")
    helps = {entry.change: entry for entry in explain_plan(plan, profile).helps}
    assert helps["twice the uplink of lab"].kind == "line"
    assert helps["twice the uplink of lab"].times_as_fast == max(entry.times_as_fast for entry in helps.values())
    assert "twice the downlink of office" not in helps
