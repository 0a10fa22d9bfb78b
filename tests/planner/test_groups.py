from dataclasses import replace

import pytest

from spantrain.planner.groups import group_devices, message_seconds, tree_lines


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
    assert {group.devices for group in groups.first_level} == sites_of(profile)
    assert [group.name for group in groups.first_level] == [site.name for site in profile.cluster.sites]


def test_kinds_come_out_as_second_level_groups(preset_profile):
    profile = preset_profile("asteroid-c-100")
    (group,) = group_devices(profile).first_level
    kinds = [{profile.cluster.device_by_name[d].kind for d in part.devices} for part in group.subgroups]
    assert kinds == [{"xavier-nx"}, {"tx2"}, {"jetson-nano"}]
    assert [part.name for part in group.subgroups] == ["lan.0", "lan.1", "lan.2"]


def test_memory_alone_splits_second_level_groups(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 1.0, "b": 1.0}})
    devices = (cluster.devices[0], replace(cluster.devices[1], memory_bytes=4 * 2**30))
    profile = make_profile(replace(cluster, devices=devices), make_graph())
    (group,) = group_devices(profile).first_level
    assert [part.devices for part in group.subgroups] == [("a",), ("b",)]


def test_sites_joined_as_well_as_inside_merge(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"edge": {"a": 1.0, "b": 1.0}, "end": {"c": 1.0, "d": 1.0}}, bandwidth=125e6, latency_s=3e-4)
    (group,) = group_devices(make_profile(cluster, make_graph())).first_level
    assert group.name == "edge+end"


def test_lone_far_devices_are_not_neighbours(make_cluster, make_graph, make_profile):
    lone = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0}})
    assert len(group_devices(make_profile(lone, make_graph())).first_level) == 3
    beside = make_cluster({"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"c": 1.0, "d": 1.0}})
    assert len(group_devices(make_profile(beside, make_graph())).first_level) == 3


def test_the_metric_is_symmetric_and_of_the_stated_size(preset_profile):
    profile = preset_profile("laptop", noise=0.1)
    metric = message_seconds(profile, 2**20)
    assert all(metric[a, b] == metric[b, a] for a, b in metric)
    there, back = profile.link_by_pair["lab-0", "home-tx2"], profile.link_by_pair["home-tx2", "lab-0"]
    expected = sum(link.latency_s + 2**20 / link.bandwidth_bytes_per_s for link in (there, back)) / 2
    assert metric["lab-0", "home-tx2"] == pytest.approx(expected)


def test_the_tree_names_every_device_once(preset_profile):
    profile = preset_profile("laptop")
    text = "\n".join(tree_lines(group_devices(profile), profile))
    assert all(text.count(f" {device.name}:") == 1 for device in profile.cluster.devices)
    assert "├── lab: inside" in text
    assert "└── home: inside" in text
