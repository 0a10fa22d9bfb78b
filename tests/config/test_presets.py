"""The presets hold what the papers say, and loading them is little work."""

from collections import Counter
from importlib import resources

import pytest

from spantrain.config.artefacts import check_cluster
from spantrain.config.cluster_file import PRESET_NAMES, load_preset
from spantrain.config.kinds import load_kinds
from spantrain.core.quantities import parse_bandwidth
from spantrain.errors import ConfigError
from testing.effort import calls_of


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_loading_a_preset_is_little_work(name: str) -> None:
    assert calls_of(lambda: load_preset(name)) < 200_000, "some tens of milliseconds on most machines"


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_are_sound(name: str) -> None:
    cluster = load_preset(name)
    assert cluster.name == name
    assert cluster.description
    assert all(device.emulated for device in cluster.devices)
    notes: list[str] = []
    check_cluster(cluster, lambda path, text: notes.append(f"{path}: {text}"))
    assert not notes


def test_every_file_is_listed() -> None:
    folder = resources.files("spantrain.config") / "presets"
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(f"{name}.yaml" for name in PRESET_NAMES)


@pytest.mark.parametrize(
    ("name", "end", "cloud_edge", "cloud_end", "edge_end", "inside"),
    [
        ("spantrain-setting-1", "rtx-3080", 100, 100, 1000, 1000),
        ("spantrain-setting-2", "rtx-3080", 500, 500, 500, 500),
        ("spantrain-table-1", "rtx-3090", 100, 100, 1000, 1000),
    ],
)
def test_spantrain_presets(name: str, end: str, cloud_edge: int, cloud_end: int, edge_end: int, inside: int) -> None:
    cluster = load_preset(name)
    assert len(cluster.hosts) == 10
    assert len(cluster.devices) == 22
    kinds = {site.name: Counter(device.kind for device in cluster.devices_at(site.name)) for site in cluster.sites}
    assert kinds == {"cloud": {"rtx-4090": 12}, "edge": {"rtx-3090": 6}, "end": {end: 4}}
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in cluster.links}
    for a, b, wanted in (("cloud", "edge", cloud_edge), ("cloud", "end", cloud_end), ("edge", "end", edge_end)):
        assert rates[a, b] == rates[b, a] == parse_bandwidth(f"{wanted} Mbit/s")
    assert {site.bandwidth_bytes_per_s for site in cluster.sites} == {parse_bandwidth(f"{inside} Mbit/s")}


@pytest.mark.parametrize(
    ("letter", "kinds"),
    [
        ("a", {"jetson-nano": 5}),
        ("b", {"xavier-nx": 3, "tx2": 2}),
        ("c", {"xavier-nx": 1, "tx2": 2, "jetson-nano": 3}),
        ("d", {"tx2": 1, "jetson-nano": 3}),
    ],
)
@pytest.mark.parametrize("mbit_per_s", [100, 1000])
def test_asteroid_presets(letter: str, kinds: dict[str, int], mbit_per_s: int) -> None:
    cluster = load_preset(f"asteroid-{letter}-{mbit_per_s}")
    assert Counter(device.kind for device in cluster.devices) == kinds
    assert len(cluster.hosts) == len(cluster.devices)
    assert [site.bandwidth_bytes_per_s for site in cluster.sites] == [mbit_per_s * 1e6 / 8]


def test_laptop() -> None:
    cluster = load_preset("laptop")
    assert [(d.name, d.site, d.kind) for d in cluster.devices] == [
        ("lab-0", "lab", "xavier-nx"),
        ("lab-1", "lab", "xavier-nx"),
        ("office-nx", "office", "xavier-nx"),
        ("office-tx2", "office", "tx2"),
        ("home-tx2", "home", "tx2"),
        ("home-nano", "home", "jetson-nano"),
    ]
    assert len(cluster.hosts) == 6
    assert cluster.link("home-nano", "lab-0").latency_s == 0.01


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'setting-1'; did you mean 'spantrain-setting-1'"):
        load_preset("setting-1")
    with pytest.raises(ConfigError, match=r"unknown preset '\.\./laptop'"):
        load_preset("../laptop")


@pytest.mark.parametrize(
    ("name", "fp16", "fp32", "gigabytes", "bandwidth", "power"),
    [
        ("p100", 18.7, 9.3, 16, 732, 250),
        ("a10", 125, 31.2, 24, 600, 150),
        ("a100", 312, 19.5, 40, 1555, 400),
        ("p4", 5.5, 5.5, 8, 192, 75),
        ("rtx-4090", 165.2, 82.6, 24, 1008, 450),
        ("rtx-3090", 71.16, 35.58, 24, 936.2, 350),
        ("rtx-3080", 59.54, 29.77, 10, 760, 320),
    ],
)
def test_kinds(name: str, fp16: float, fp32: float, gigabytes: int, bandwidth: float, power: float) -> None:
    kind = load_kinds()[name]
    assert kind.peak_fp16_flop_per_s == pytest.approx(fp16 * 1e12)
    assert kind.peak_fp32_flop_per_s == pytest.approx(fp32 * 1e12)
    assert kind.memory_bytes == gigabytes * 2**30
    assert kind.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert kind.power_w == power


def test_every_kind_has_a_source() -> None:
    kinds = load_kinds()
    assert {"jetson-nano", "tx2", "xavier-nx", "v100", "t4", "h100", "cpu"} <= set(kinds)
    assert all(kind.source for kind in kinds.values())
