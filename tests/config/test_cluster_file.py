"""cluster.yaml: what it means, and that all its mistakes are told in one message."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.config.cluster_file import load_cluster, parse_cluster
from spantrain.errors import ConfigError

GOOD = """
name: c
sites:
  - name: a
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a, count: 2, devices: {t4: 2, p4: 1}}
  - name: b
    network: {bandwidth: 100 Mbit/s, latency: 0 s}
    hosts:
      - {name: b, devices: {jetson-nano: 1}}
links:
  - {between: [a, b], bandwidth: 50 Mbit/s, latency: 20 ms, jitter: 1 ms, loss: 1 %}
"""


def _told(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, source="c.yaml")
    return str(caught.value)


def test_meaning() -> None:
    cluster = parse_cluster(GOOD, source="c.yaml")
    assert [host.name for host in cluster.hosts] == ["a-0", "a-1", "b"]
    assert [device.name for device in cluster.devices] == [
        "a-0-gpu0", "a-0-gpu1", "a-0-gpu2", "a-1-gpu0", "a-1-gpu1", "a-1-gpu2", "b",
    ]  # fmt: skip
    assert [device.kind for device in cluster.devices_at("a")] == ["t4", "t4", "p4"] * 2
    assert {kind.name for kind in cluster.kinds} == {"t4", "p4", "jetson-nano"}
    assert cluster.device_by_name["b"].memory_bytes == 4 * 2**30
    link = cluster.link("b", "a-1-gpu2")
    assert (link.source, link.target, link.latency_s, link.jitter_s, link.loss_ratio) == ("b", "a", 0.02, 0.001, 0.01)
    assert link.bandwidth_bytes_per_s == 6.25e6
    assert cluster.link("a-0-gpu0", "a-1-gpu0").bandwidth_bytes_per_s == 125e6
    assert all(device.emulated for device in cluster.devices)
    assert cluster.emulated_speed == 1.0


def test_examples_load(examples: Path) -> None:
    loaded = {path.name: load_cluster(path) for path in sorted(examples.glob("*.yaml"))}
    two = loaded["two-sites.yaml"]
    assert two.device_by_name["south-small"].memory_bytes == 6 * 2**30
    assert two.link("server-0-gpu0", "north").bandwidth_bytes_per_s == 25e6
    assert two.link("north", "server-0-gpu0").bandwidth_bytes_per_s == 5e6
    assert two.link("north", "south-large").bandwidth_bytes_per_s == 6.25e6  # its uplink's
    assert two.link("south-large", "north").bandwidth_bytes_per_s == 12.5e6
    assert two.link("south-large", "server-1-gpu1").loss_ratio == 0.001
    assert two.site_by_name["north"].uplink_bandwidth_bytes_per_s == 6.25e6
    assert two.site_by_name["north"].downlink_bandwidth_bytes_per_s == 31.25e6
    assert two.emulated_speed == 0.05
    real = loaded["real-machines.yaml"]
    assert [device.backend for device in real.devices] == ["cuda:0", "cuda:1", "cpu", "cuda:0"]
    assert real.host_by_name["desk"].address == "192.168.1.20"
    assert not real.emulated
    assert [device.name for device in loaded["one-machine.yaml"].devices] == ["here-cpu0", "here-cpu1"]


def test_all_mistakes_at_once() -> None:
    told = _told(
        """
name: c
emulated_sped: 2
sites:
  - name: a
    network: {bandwidth: -5 Mbit/s, latency: 20}
    hosts:
      - {name: a, devices: {rtx4090: 1}}
      - {name: a, devices: {t4: 0}}
  - name: b
    network: {bandwidth: 0 Mbit/s, latency: 1 ms}
    hosts:
      - {name: b, devices: [{kind: cpu, backend: gpu, memory: 8}], inside: nvlnk}
  - name: d
    network: {bandwith: 1 Gbit/s, latency: 1 ms}
    hosts: []
links:
  - {between: [a, b], bandwidth: 1 Gbit/s, latency: 1 ms, loss: 1}
  - {between: [a, b], bandwidth: 1 Gbit/s, latency: -1 ms}
"""
    )
    for part in (
        "c.yaml: 18 problems",
        "line 3, emulated_sped: unknown key 'emulated_sped'; did you mean 'emulated_speed'?",
        "line 6, sites[0].network.bandwidth: '-5 Mbit/s' is negative; it must be more than zero",
        "line 6, sites[0].network.latency: '20' needs a number and one of s, ms",
        "line 8, sites[0].hosts[0].devices.rtx4090: unknown device kind 'rtx4090'; did you mean 'rtx-4090'?",
        "line 9, sites[0].hosts[1].devices.t4: '0' must be a whole number from 1 to 64",
        "line 9, sites[0].hosts[1]: two hosts are named 'a' (the first on line 8)",
        "line 11, sites[1].network.bandwidth: '0 Mbit/s' must be more than zero",
        "line 13, sites[1].hosts[0].devices[0].backend: unknown backend 'gpu'",
        "line 13, sites[1].hosts[0].devices[0].memory: '8' needs a number and one of B, kB",
        "line 13, sites[1].hosts[0].inside: 'nvlnk' needs a number and one of bit/s, kbit/s, Mbit/s, Gbit/s",
        "e.g. '100 Mbit/s'; or nvlink, pcie or none",
        "line 15, sites[2].network.bandwith: unknown key 'bandwith'; did you mean 'bandwidth'?",
        "line 15, sites[2].network: needs bandwidth",
        "line 16, sites[2].hosts: a site needs at least one host",
        "line 18, links[0].loss: '1' must be at least 0 and less than 1",
        "links[1]: a second link a -> b (the first on line 18)",
    ):
        assert part in told
    assert "no link a <-> d, b <-> d" in told
    lines = [int(number) for number in re.findall(r"^  line (\d+)", told, re.MULTILINE)]
    assert len(lines) == 18
    assert lines == sorted(lines)


def test_what_a_sites_links_share() -> None:
    text = GOOD.replace("  - name: b\n", "  - name: b\n    uplink: 20 Mbit/s\n    downlink: 40 Mbit/s\n")
    here, there = parse_cluster(text, source="c.yaml").sites
    assert (here.uplink_bandwidth_bytes_per_s, here.downlink_bandwidth_bytes_per_s) == (None, None)
    assert (there.uplink_bandwidth_bytes_per_s, there.downlink_bandwidth_bytes_per_s) == (2.5e6, 5e6)


def test_memory_of_hosts_and_what_kinds_share_with_the_processor() -> None:
    text = GOOD.replace("count: 2,", "count: 2, memory: 64 GiB,")
    text += (
        "kinds: {x: {peak_fp16: 1 TFLOP/s, peak_fp32: 1 TFLOP/s, memory: 1 GiB, memory_bandwidth: 1 GB/s, power: 1 W, "
    )
    text += "source: a test, unified_memory: true}}\n"
    cluster = parse_cluster(text.replace("jetson-nano: 1", "jetson-nano: 1, x: 1"), source="c.yaml")
    assert [host.memory_bytes for host in cluster.hosts] == [64 * 2**30] * 2 + [None]
    assert {kind.name: kind.unified_memory for kind in cluster.kinds} == {
        "t4": False, "p4": False, "jetson-nano": True, "x": True,
    }  # fmt: skip
    assert "kinds.x.unified_memory: 'yes' must be true or false" in _told(text.replace("true}", "yes}"))
    assert "hosts[0].memory: '64 GB/s'" in _told(text.replace("64 GiB", "64 GB/s"))


def test_a_site_alone_has_no_use_for_a_line() -> None:
    text = GOOD[: GOOD.index("  - name: b\n")].replace("  - name: a\n", "  - name: a\n    uplink: 20 Mbit/s\n")
    assert "sites[0].uplink: the cluster has one site, so nothing would use its uplink; remove it" in _told(text)


def test_one_transfer_gets_the_narrowest_of_link_and_lines() -> None:
    text = GOOD.replace("  - name: b\n", "  - name: b\n    uplink: 20 Mbit/s\n    downlink: 1 Gbit/s\n")
    cluster = parse_cluster(text, source="c.yaml")
    a, b = (cluster.devices_at(site)[0].name for site in ("a", "b"))
    assert cluster.link(b, a).bandwidth_bytes_per_s == 2.5e6
    assert cluster.link(a, b).bandwidth_bytes_per_s == cluster.links[0].bandwidth_bytes_per_s == 50e6 / 8


def test_disconnected_sites_are_named() -> None:
    without = GOOD[: GOOD.index("links:")]
    assert "sites are disconnected: no link a <-> b; add it" in _told(without)
    one_way = without + "links:\n  - {from: a, to: b, bandwidth: 1 Mbit/s, latency: 1 ms}\n"
    assert "line 12, links: sites are disconnected: no link b -> a" in _told(one_way)


def test_yaml_does_not_guess() -> None:
    text = GOOD.replace("name: b\n", "name: no\n").replace("[a, b]", "[a, no]").replace("1 %", "1e-4")
    cluster = parse_cluster(text.replace("name: c", "name: 010"), source="c.yaml")
    assert [site.name for site in cluster.sites] == ["a", "no"]
    assert cluster.name == "010"
    assert cluster.links[0].loss_ratio == 1e-4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("name: c\n", "", "c.yaml: line 2: needs name"),
        ("name: c\n", "name: c\nname: d\n", "name: is given twice"),
        ("name: c\n", "name: a/b\n", "'a/b' is no name"),
        ("name: c\n", "name:\n", "name: must be text, got nothing"),
        ("name: c\n", "name: c\nemulated_speed: 0\n", "emulated_speed: 0 must be more than zero"),
        ("name: c\n", "name: c\nemulated_speed: fast\n", "emulated_speed: 'fast' is not a number"),
        ("name: c\n", "name: !!python/name:os.system c\n", "YAML tags such as !!python/name:os.system are not used"),
        ("1 Gbit/s", "1e999 Gbit/s", "'1e999 Gbit/s' is too large"),
        ("{t4: 2, p4: 1}", "{}", "a host needs at least one device"),
        ("{t4: 2, p4: 1}", "t4", "devices: must be `key: value` lines, got 't4'"),
        ("{t4: 2, p4: 1}", "[t4]", "devices[0]: must be"),
        ("{t4: 2, p4: 1}", "[{kind: t4, name: x}]", "hosts with a count share this entry"),
        ("{t4: 2, p4: 1}", "[{kind: t4, backend: cpu}]", "a t4 cannot have the backend cpu"),
        ("{t4: 2, p4: 1}", "[{kind: cpu, backend: cuda}]", "kind cpu cannot have the backend cuda"),
        ("{t4: 2, p4: 1}", '[{kind: t4, backend: "cuda:1"}, {kind: t4, backend: cuda}]', "cuda:1 is used twice"),
        ("{t4: 2, p4: 1}", "[{kind: t4, memory: 1e999 GB}]", "devices[0].memory: "),
        ("count: 2", "count: many", "'many' must be a whole number from 1 to 131072"),
        ("count: 2", "count: 2, address: 10.0.0.1", "2 hosts cannot share one address"),
        ("[a, b]", "[a, bb]", "unknown site 'bb'; known: a, b"),
        ("[a, b]", "[a, a]", "a link joins different sites"),
        ("[a, b]", "[a]", "name the sites it joins"),
        ("[a, b]", "some", "must be a list"),
        ("[a, b]", "[a, b], from: a", "cannot stand beside `between`"),
        ("between: [a, b]", "from: a", "needs `between: [a, b]` for both directions"),
        ("between: [a, b]", "from: a, to: a", "a link joins different sites"),
        ("1 %", "-1 %", "'-1 %' must be at least 0 and less than 1"),
        ("- {name: b, dev", "- {name: a-1, dev", "two hosts are named 'a-1'"),
        ("  - name: b\n", "  - name: a\n", "two sites are named 'a'"),
        (
            "  - name: b\n",
            "  - name: b\n    uplnk: 1 Mbit/s\n",
            "sites[1].uplnk: unknown key 'uplnk'; did you mean 'uplink'?",
        ),
        (
            "  - name: b\n",
            "  - name: b\n    downlink: 0 Mbit/s\n",
            "sites[1].downlink: '0 Mbit/s' must be more than zero",
        ),
        ("  - name: b\n", "  - name: b\n    uplink: 5\n", "sites[1].uplink: '5' needs a number and one of"),
        ("links:\n", "kinds: {t4: {}}\nlinks:\n", "kind 't4' ships with the program"),
        ("links:\n", "kinds: {x: {power: 1 V}}\nlinks:\n", "kinds.x.power: '1 V' needs a number and one of W, kW"),
        ("links:\n", "links:\n  - {between: all, latency: 1 ms}\n", "links[0]: needs bandwidth"),
        ("links:\n", "links:\n\t-", "is not valid YAML"),
        ("links:\n", "---\nlinks:\n", "is not valid YAML"),
    ],
)
def test_mistakes(old: str, new: str, told: str) -> None:
    assert old in GOOD
    assert told in _told(GOOD.replace(old, new, 1))


def test_a_mistake_is_told_once() -> None:
    assert "\n" not in _told(GOOD.replace("50 Mbit/s", "50"))
    assert "\n" not in _told(GOOD.replace("[a, b]", "[a, bb]"))
    assert "\n" not in _told(GOOD.replace("t4: 2, p4", "t44: 2, p4"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file") as caught:
        load_cluster(tmp_path / "c.yaml")
    assert caught.value.exit_code == 2
    assert "is empty" in _told("# nothing\n")
    assert "is nested more than 50 deep" in _told("name: " + "[" * 20_000)
    assert "an alias stands inside" in _told(GOOD[: GOOD.index("links:")] + "links: &x [*x]\n")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_text_gives_a_cluster_or_one_config_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOOD)))
    length = data.draw(st.integers(0, 12))
    put = data.draw(st.text(alphabet="ab -:{}[],&*!#'\"\n\t0%|>?~é\0", max_size=6))
    with contextlib.suppress(ConfigError):
        parse_cluster(GOOD[:at] + put + GOOD[at + length :], source="c.yaml")
