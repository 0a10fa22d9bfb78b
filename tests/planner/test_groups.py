from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.profile import LinkMeasurement
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.groups import group_devices, group_levels, message_seconds, tree_lines

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)
RATE, LATENCY_S = 125e6, 2e-4
"""Inside the sites of `make_cluster`."""
APART = 1.54 * (LATENCY_S + 2**20 / RATE) - 2**20 / RATE
"""The latency with which a message takes so much longer that noise cannot hide it."""


def sites_of(profile):
    return {tuple(d.name for d in profile.cluster.devices_at(site.name)) for site in profile.cluster.sites}


@pytest.mark.parametrize(
    "name",
    ["laptop", "spantrain-setting-1", "spantrain-setting-2", "spantrain-table-1", "asteroid-c-100", "asteroid-d-1000"],
)
@pytest.mark.parametrize("seed", range(3))
def test_sites_come_out_of_noisy_measurements(preset_profile, name, seed):
    profile = preset_profile(name, noise=0.1, seed=seed)
    groups = group_devices(profile)
    assert {group.devices for group in groups} == sites_of(profile)
    assert [group.name for group in groups] == [site.name for site in profile.cluster.sites]


def test_kinds_come_out_as_second_level_groups(preset_profile):
    profile = preset_profile("asteroid-c-100")
    (group,) = group_devices(profile)
    kinds = [{profile.cluster.device_by_name[d].kind for d in part.devices} for part in group.subgroups]
    assert kinds == [{"xavier-nx"}, {"tx2"}, {"jetson-nano"}]
    assert [part.name for part in group.subgroups] == ["lan.0", "lan.1", "lan.2"]


def test_memory_alone_splits_second_level_groups(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 1.0, "b": 1.0}})
    devices = (cluster.devices[0], replace(cluster.devices[1], memory_bytes=4 * 2**30))
    profile = make_profile(replace(cluster, devices=devices), make_graph())
    (group,) = group_devices(profile)
    assert [part.devices for part in group.subgroups] == [("a",), ("b",)]


def test_sites_joined_as_well_as_inside_merge(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"edge": {"a": 1.0, "b": 1.0}, "end": {"c": 1.0, "d": 1.0}}, bandwidth=125e6, latency_s=3e-4)
    (group,) = group_devices(make_profile(cluster, make_graph()))
    assert group.name == "edge+end"


def test_lone_far_devices_are_not_neighbours(make_cluster, make_graph, make_profile):
    lone = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0}})
    assert len(group_devices(make_profile(lone, make_graph()))) == 3
    beside = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0, "d": 1.0}})
    assert len(group_devices(make_profile(beside, make_graph()))) == 3


def test_the_metric_is_symmetric_and_of_the_stated_size(preset_profile):
    profile = preset_profile("laptop", noise=0.1)
    metric = message_seconds(profile)
    assert all(metric[a, b] == metric[b, a] for a, b in metric)
    there, back = profile.link_by_pair["lab-0", "home-tx2"], profile.link_by_pair["home-tx2", "lab-0"]
    expected = sum(link.latency_s + 2**20 / link.bandwidth_bytes_per_s for link in (there, back)) / 2
    assert metric["lab-0", "home-tx2"] == pytest.approx(expected)


def test_of_a_described_cluster_only_the_pairs_of_some_devices_are_made(monkeypatch):
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    monkeypatch.setattr(type(profile), "link_by_pair", property(lambda _profile: pytest.fail("all pairs were made")))
    assert message_seconds(profile, ["lab-0", "lab-1"]).keys() == {("lab-0", "lab-1"), ("lab-1", "lab-0")}


def test_the_tree_names_every_device_once(preset_profile):
    profile = preset_profile("laptop")
    text = "\n".join(tree_lines(group_devices(profile), profile))
    assert all(text.count(f" {device.name}:") == 1 for device in profile.cluster.devices)
    assert "├── lab: inside" in text
    assert "└── home: inside" in text


def sites_and_devices(sizes):
    return {f"s{site}": {f"d{site}-{number}": 1.0 for number in range(size)} for site, size in enumerate(sizes)}


def parts_of(profile):
    """Both levels, whatever their order and names."""
    groups = group_devices(profile)
    return {(frozenset(g.devices), frozenset(frozenset(part.devices) for part in g.subgroups)) for g in groups}


def with_latency(profile, sites, latency_s):
    """The latency of one boundary as it would have been measured with the same noise."""
    devices = profile.cluster.device_by_name

    def changed(link):
        if {devices[link.source].site, devices[link.target].site} != set(sites):
            return link
        described = LinkMeasurement.described(profile.cluster, link.source, link.target)
        return replace(link, latency_s=link.latency_s * latency_s / described.latency_s)

    return replace(profile, links=tuple(map(changed, profile.links)))


@pytest.mark.parametrize("name", ["spantrain-setting-1", "spantrain-setting-2", "spantrain-table-1"])
@pytest.mark.parametrize("seed", range(4))
def test_groups_change_once_while_edge_and_end_move_apart(preset_profile, name, seed):
    profile = preset_profile(name, noise=0.1, seed=seed)
    found = {
        ms: [group.name for group in group_devices(with_latency(profile, ("edge", "end"), ms / 1e3))]
        for ms in (0.2, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 10, 25)
    }
    merged = [ms for ms, names in found.items() if names == ["cloud", "edge+end"]]
    assert all(names == ["cloud", "edge", "end"] for ms, names in found.items() if ms not in merged)
    assert merged == [ms for ms in found if ms <= max(merged)]
    assert 1.5 <= max(merged) < 5


def test_the_divisions_to_try_are_the_same_whether_sites_merge_or_not(preset_profile):
    profile = preset_profile("spantrain-setting-1")
    names = tuple(device.name for device in profile.cluster.devices)
    found = [
        [
            [group.name for group in row]
            for row in group_levels(with_latency(profile, ("edge", "end"), s), names, most=3)
        ]
        for s in (1e-3, 5e-3)
    ]
    assert found[0] == found[1][::-1] == [["cloud", "edge+end"], ["cloud", "edge", "end"]]
    assert len(group_levels(profile, names, most=0)) == 1


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_noise_parts_no_sites_that_are_joined_as_well_as_inside(make_cluster, make_graph, make_profile, sizes, seed):
    cluster = make_cluster(sites_and_devices(sizes), bandwidth=RATE, latency_s=LATENCY_S)
    profile = make_profile(cluster, make_graph(1), noise=0.1, seed=seed)
    (group,) = group_devices(profile)
    assert len(group.subgroups) == 1


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, seed=st.integers(0, 2**32), latency_s=st.floats(APART, 25e-3), slower=st.sampled_from([1, 10]))
def test_noise_joins_no_sites_that_are_apart(make_cluster, make_graph, make_profile, sizes, seed, latency_s, slower):
    cluster = make_cluster(sites_and_devices(sizes), bandwidth=RATE / slower, latency_s=latency_s)
    profile = make_profile(cluster, make_graph(1), noise=0.1, seed=seed)
    assert {group.devices for group in group_devices(profile)} == sites_of(profile)


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, draw=st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(make_cluster, make_graph, make_profile, sizes, draw):
    """On networks without any structure but many ties."""
    cluster = make_cluster(sites_and_devices(sizes))
    profile = make_profile(cluster, make_graph(1))
    profile = replace(
        profile,
        links=tuple(replace(link, latency_s=draw.choice([1e-4, 2e-3, 5e-3])) for link in profile.links),
        scores=tuple(replace(entry, score=draw.choice([1.0, 1.1, 1.2, 1.5])) for entry in profile.scores),
    )

    def mixed(entries):
        return tuple(draw.sample(entries, len(entries)))

    other = replace(cluster, sites=mixed(cluster.sites), hosts=mixed(cluster.hosts), devices=mixed(cluster.devices))
    again = replace(profile, cluster=other, links=mixed(profile.links), scores=mixed(profile.scores))
    assert parts_of(again) == parts_of(profile)


def test_a_slow_site_is_not_drawn_into_a_fast_one(make_cluster, make_graph, make_profile):
    """Its boards are as far from each other as from the fast site, which is one place all the same."""
    cluster = make_cluster({"lab": {"a": 1.0, "b": 1.0}, "home": {"c": 1.0, "d": 1.0}}, bandwidth=RATE / 10)
    slow = replace(cluster.sites[1], bandwidth_bytes_per_s=RATE / 10, latency_s=cluster.links[0].latency_s)
    profile = make_profile(replace(cluster, sites=(cluster.sites[0], slow)), make_graph(1))
    assert [group.name for group in group_devices(profile)] == ["lab", "home"]


@pytest.mark.parametrize("latency_s", [2e-4, 1e-3, 5e-3])
def test_hosts_alone_at_their_sites_are_apart_by_rate_too(make_cluster, make_graph, make_profile, latency_s):
    """A way that takes ten times as long as their sites' networks joins nothing, whatever its latency."""
    lone = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0}}, bandwidth=RATE / 10, latency_s=latency_s)
    assert len(group_devices(make_profile(lone, make_graph(1)))) == 3
    near = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0}}, bandwidth=RATE, latency_s=LATENCY_S)
    assert len(group_devices(make_profile(near, make_graph(1)))) == 1
