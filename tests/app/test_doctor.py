"""The doctor on real ways: ssh into namespaces, closed ports, narrow packets, clocks that differ, a shaped link."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spantrain.app.machines.describe import found_cluster
from spantrain.app.machines.doctor import DoctorOptions, examine
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.reach.facts import probe
from spantrain.reach.machines import this_machine
from spantrain.reach.pairs import PairPrograms, addresses_of, load_ways, pairs_of, try_ways
from spantrain.testbed.testbed import Testbed, why_unavailable
from spantrain.transport.control.address import Address
from testing.machines import by_ssh, interpreter, ssh_config
from testing.namespaces import quietly, three_places

QUICK = DoctorOptions(quick=True)


@pytest.fixture
def places(tmp_path) -> Iterator[list[str]]:
    """Three namespaces in a row, a - r - b; between r and b packets have 1,280 bytes at most."""
    with three_places(tmp_path, forwards=True, far_mtu=1280) as names:
        yield names


def machines_in(places, folder, **clocks):
    config = ssh_config(
        folder, {name: ["ip", "netns", "exec", place] for name, place in zip("ab", places[::2], strict=True)}
    )
    return [by_ssh(name, config, interpreter(folder, name, clock_ahead_s=clocks.get(name, 0.0))) for name in "ab"]


def told(report, verdict):
    return {(line.check, line.where): line.text for line in report.lines if line.verdict == verdict}


@pytest.mark.root
def test_narrow_packets_and_a_clock_that_is_ahead_are_found(places, tmp_path):
    report = examine(machines_in(places, tmp_path, b=90.0), QUICK, SilentReporter())
    assert told(report, "fail") == {
        ("mtu", "a->b"): "packets of 1280 bytes pass, and the interface sends 1500: larger ones are lost or divided"
    }
    warned = told(report, "warn")
    assert warned["mtu", "b->a"] == "packets of 1280 bytes at most, as tunnels have them"
    assert warned["clock", "a->b"].startswith("b's clock is 90 s ahead of a's")
    assert told(report, "ok")["ports", "a->b"] == "reaches 10.77.2.2"
    assert told(report, "ok")["code", "all"].endswith("on 3 machines")


@pytest.mark.root
def test_a_port_that_is_closed_one_way_is_found(places, tmp_path):
    if not shutil.which("iptables-legacy"):
        pytest.skip("needs iptables-legacy (Debian's iptables)")
    closed = ["-p", "tcp", "--syn", "-d", "10.77.1.2", "-j", "DROP"]
    quietly("ip", "netns", "exec", places[1], "iptables-legacy", "-A", "FORWARD", *closed)
    report = examine(machines_in(places, tmp_path), QUICK, SilentReporter())
    failed = told(report, "fail")
    assert failed["ports", "b->a"].startswith("b cannot connect to a (a.test: ")
    assert failed["ports", "b->a"].endswith("10.77.1.2: no answer); the other way it can")
    assert ("rate", "a->b") in told(report, "ok")


@pytest.mark.root
def test_who_cannot_be_reached_is_a_line_and_others_are_checked(places, tmp_path):
    a, b = machines_in(places, tmp_path)
    (tmp_path / "known_hosts").write_text((tmp_path / "known_hosts").read_text().replace("*", "a.test"))
    report = examine([a, b], QUICK, SilentReporter())
    failed = told(report, "fail")
    assert "cannot be reached" in failed["reach", "b"]
    assert ("reach", "a") in told(report, "ok")


@pytest.mark.root
def test_what_a_shaped_link_lets_through_makes_sites_and_links(tmp_path, monkeypatch):
    if why_unavailable() is not None:
        pytest.skip(why_unavailable())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    names = ("cloud-0", "edge-0")
    sites = {"cloud": names[:1], "edge": names[1:]}
    link = {"bandwidth_bytes_per_s": 40e6 / 8, "latency_s": 0.005}
    cluster = Cluster(
        name="shaped", kinds=(), devices=(),
        sites=tuple(
            Site(name=one, hosts=of, bandwidth_bytes_per_s=1.25e8, latency_s=1e-4) for one, of in sites.items()
        ),
        hosts=tuple(Host(name=name, site=site, devices=()) for site, of in sites.items() for name in of),
        links=(Link(source="cloud", target="edge", **link), Link(source="edge", target="cloud", **link)),
    )  # fmt: skip
    with Testbed.up(cluster) as testbed:
        inside = {name: testbed.namespace(name).command([]) for name in names}
        config = ssh_config(tmp_path, inside)
        machines = [by_ssh(name, config, interpreter(tmp_path, name)) for name in names]
        outcome = found_cluster(machines, name="found", measure=True, reporter=SilentReporter())
        addresses = {name: testbed.address(name) for name in names}
    found = outcome.cluster
    assert outcome.notes == ()
    assert [(site.name, site.hosts) for site in found.sites] == [(name, (name,)) for name in names]
    assert {host.name: host.address for host in found.hosts} == addresses
    for one in found.links:
        assert one.latency_s >= 0.005
        assert 1e6 / 8 < one.bandwidth_bytes_per_s < 50e6 / 8


def test_this_machine_alone_and_the_coordinators_ports():
    here = this_machine("here")
    with PairPrograms([here]) as programs:
        taken = programs.listen("here", 0)
        options = DoctorOptions(quick=True, listen=Address(host="127.0.0.1", port=taken))
        report = examine([here], options, SilentReporter())
    assert told(report, "fail")["coordinator", "this-machine"].startswith(
        f"cannot listen on 127.0.0.1:{taken}: the port"
    )
    elsewhere = examine([here], replace(options, listen=Address(host="192.0.2.250", port=7000)), SilentReporter())
    assert "it is no address of this machine" in told(elsewhere, "fail")["coordinator", "this-machine"]
    assert ("python", "here") in told(report, "ok")
    assert {line.check for line in report.lines if line.where == "here"} >= {"python", "spantrain", "torch", "disk"}
    assert any(line.check == "testbed" for line in report.lines)


def test_only_who_knows_the_runs_secret_is_answered_and_believed():
    here, other = this_machine("here"), this_machine("other")
    with PairPrograms([here, other]) as programs, PairPrograms([this_machine("stranger")]) as strangers:
        port = programs.listen("here", 0)
        assert programs.dial("other", "here", ["127.0.0.1"], port=port).is_open
        wrong_name = programs.dial("other", "elsewhere", ["127.0.0.1"], port=port)
        assert set(wrong_name.errors.values()) == {"another program or machine answers there"}
        strange = strangers.dial("stranger", "here", ["127.0.0.1"], port=port)
        assert set(strange.errors.values()) == {"another program or machine answers there"}
        assert programs.dial("other", "here", ["127.0.0.1"], port=port).is_open


def test_rates_are_measured_both_ways_over_the_way_that_is_open():
    machines = [this_machine("a"), this_machine("b")]
    with PairPrograms(machines) as programs:
        ways = try_ways(programs, {"a": ["127.0.0.1"], "b": ["192.0.2.1", "127.0.0.1"]})
        assert ways["a", "b"].address == "127.0.0.1"
        loaded = load_ways(programs, ways, pairs_of(["a", "b"]), seconds=0.05)
    there, back = loaded["a", "b"], loaded["b", "a"]
    assert there.up_bytes_per_s == back.down_bytes_per_s > 0
    assert there.down_bytes_per_s == back.up_bytes_per_s > 0
    assert there.path_mtu == there.interface_mtu


def test_where_others_may_reach_a_machine():
    here = this_machine("here")
    facts = probe(here)
    assert set(facts.addresses) <= set(addresses_of(here, facts))


def test_where_a_cluster_file_says_where_a_machine_is_reached_it_is_reached_there():
    """Workers are dialled there and nowhere else, so an address that it had yesterday is a failure."""
    text = """
name: stale
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a, backend: cpu, devices: {cpu: 1}}
      - {name: b, address: 192.0.2.1, backend: cpu, devices: {cpu: 1}}
"""
    options = replace(QUICK, cluster=parse_cluster(text, source="this test"))
    report = examine([this_machine("a"), this_machine("b")], options, SilentReporter())
    assert told(report, "fail")["ports", "a->b"].startswith("a cannot connect to b (192.0.2.1: ")
    assert ("ports", "b->a") in told(report, "ok")
