"""The emulated network, for real: processes, sockets and packets in namespaces."""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.errors import TestbedError
from spantrain.testbed.control import ShapedLinkStatus
from spantrain.testbed.testbed import Testbed
from spantrain_studies.testbed_traffic import Flow, measure_round_trips
from testing.bursts import burst
from testing.patience import until

pytestmark = [pytest.mark.root, pytest.mark.timeout(600), pytest.mark.usefixtures("namespaces_or_skip")]

MBIT = 1e6 / 8
LATENCY_S = 0.02
EARLY_S = 1e-3
"""Much more than the router may hand a packet over before its time; it never does because of a busy machine."""
LARGEST_PACKET_BYTES = 65536
RECEIVE_ONE = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind((sys.argv[1], 0))
print(receiver.getsockname()[1], flush=True)
print(len(receiver.recv(9000)), flush=True)
"""


def test_hosts_reach_each_other_and_nothing_else(testbed: Testbed) -> None:
    assert len(measure_round_trips(testbed, "cloud-0", "cloud-1", count=2)) == 2
    assert len(measure_round_trips(testbed, "cloud-0", "edge-1", count=2)) == 2
    seen = testbed.popen("edge-0", ["ip", "-json", "route"], stdout=subprocess.PIPE).communicate()[0]
    assert {route.get("gateway") for route in json.loads(seen)} == {None, "10.2.0.1"}
    assert testbed.interface("edge-0") in {name for route in json.loads(seen) for name in [route["dev"]]}


def link_of(testbed: Testbed, source: str) -> ShapedLinkStatus:
    return next(link for link in testbed.status().links if link.source == source)


def test_no_round_trip_is_shorter_than_asked_before_or_after_a_shape(testbed: Testbed) -> None:
    """How little longer they are is for benchmarks/testbed_accuracy.py to show."""
    assert min(measure_round_trips(testbed, "cloud-0", "edge-0", count=9)) >= 2 * LATENCY_S - EARLY_S
    testbed.shape("edge", "cloud", latency_s=0.15, jitter_s=0.01, loss_ratio=0.0)
    forth, back = testbed.status().links
    assert (forth.bandwidth_bytes_per_s, forth.latency_s, forth.jitter_s) == (100 * MBIT, LATENCY_S, 0.0)
    assert (back.bandwidth_bytes_per_s, back.latency_s, back.jitter_s) == (100 * MBIT, 0.15, 0.01)
    assert min(measure_round_trips(testbed, "cloud-0", "edge-0", count=3)) >= LATENCY_S + 0.15 - 0.01 - EARLY_S
    assert min(measure_round_trips(testbed, "edge-1", "cloud-1", count=3)) >= LATENCY_S + 0.15 - 0.01 - EARLY_S


def test_no_flow_is_faster_than_its_link_and_every_byte_is_counted(testbed: Testbed) -> None:
    """That it is as fast is for benchmarks/testbed_accuracy.py to show, and exactly for the shaper's own tests."""
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=20 * MBIT)
    began_s = time.monotonic()
    samples = Flow(testbed, "cloud-0", "edge-0", duration_s=0.5).finish()
    for at_s, received_bytes in samples:
        assert received_bytes <= 20 * MBIT * (at_s - began_s - LATENCY_S + EARLY_S)
    forth, back = testbed.status().links
    assert samples[-1][1] < forth.bytes_sent <= 20 * MBIT * (time.monotonic() - began_s)
    assert 0 < back.bytes_sent < forth.bytes_sent
    assert forth.packets_lost == back.packets_lost == 0


def test_shape_slows_and_speeds_up_a_flow_that_runs(testbed: Testbed) -> None:
    flow = Flow(testbed, "cloud-0", "edge-0", duration_s=0.5)
    until(lambda: link_of(testbed, "cloud").bytes_sent > 0)
    began_s = time.monotonic()
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=0.5 * MBIT)
    before = link_of(testbed, "cloud")
    assert before.bandwidth_bytes_per_s == 0.5 * MBIT
    measure_round_trips(testbed, "cloud-1", "edge-1", count=4)
    passed_bytes = link_of(testbed, "cloud").bytes_sent - before.bytes_sent
    assert passed_bytes <= 0.5 * MBIT * (time.monotonic() - began_s) + LARGEST_PACKET_BYTES
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=1000 * MBIT)
    assert flow.finish(), "what waited for the slow link would have taken minutes"


def test_a_ping_passes_what_waits_and_a_faster_shape_lets_that_go(testbed: Testbed) -> None:
    """Told by their order: all that waits takes 26 seconds, the bulk flow's first turn and then the ping four."""
    for number in (0, 1):  # so that the hosts know each other's addresses
        measure_round_trips(testbed, f"cloud-{number}", f"edge-{number}", count=1)
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=4000.0)
    before = link_of(testbed, "cloud")
    receiver = testbed.popen(
        "edge-1", [sys.executable, "-I", "-S", "-c", RECEIVE_ONE, testbed.address("edge-1")], stdout=subprocess.PIPE
    )
    assert receiver.stdout is not None
    port = int(receiver.stdout.readline())
    burst(testbed, "cloud-0", "edge-0", size_bytes=1000, count=100)
    until(lambda: link_of(testbed, "cloud").bytes_waiting >= 90_000)
    burst(testbed, "cloud-1", "edge-1", port=port, size_bytes=10, count=1)
    assert receiver.stdout.readline() == b"10\n"
    receiver.communicate()
    assert link_of(testbed, "cloud").bytes_waiting > 0
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=100 * MBIT)
    until(lambda: link_of(testbed, "cloud").bytes_waiting == 0)
    after = link_of(testbed, "cloud")
    assert after.packets_sent >= before.packets_sent + 100
    assert (after.packets_dropped, after.packets_lost) == (0, 0)


def test_lost_packets_are_counted_and_tcp_gets_through(testbed: Testbed) -> None:
    measure_round_trips(testbed, "cloud-0", "edge-0", count=1)
    testbed.shape("cloud", "edge", loss_ratio=0.3)
    before = link_of(testbed, "cloud")

    def seen() -> int:
        link = link_of(testbed, "cloud")
        return link.packets_sent + link.packets_lost - before.packets_sent - before.packets_lost

    burst(testbed, "cloud-0", "edge-0", size_bytes=100, count=200)
    until(lambda: seen() >= 200)
    assert 20 < link_of(testbed, "cloud").packets_lost < 100
    testbed.shape("cloud", "edge", loss_ratio=0.02)
    assert Flow(testbed, "cloud-0", "edge-0", duration_s=0.3).finish()[-1][1] > 0


def test_a_process_enters_by_itself_with_an_entrance(testbed: Testbed) -> None:
    namespace = testbed.namespace("edge-1")
    code = (
        "import sys, pickle, os; pickle.loads(bytes.fromhex(sys.argv[1])).enter(); "
        "os.execvp('ip', ['ip', '-4', 'addr'])"
    )
    seen = subprocess.run([sys.executable, "-c", code, pickle.dumps(namespace).hex()], capture_output=True, check=True)
    assert f"inet {testbed.address('edge-1')}/16".encode() in seen.stdout


def test_exit_codes_and_environment_pass_through(testbed: Testbed) -> None:
    assert testbed.popen("edge-0", ["sh", "-c", "exit $CODE"], env={**os.environ, "CODE": "7"}).wait() == 7
    missing = testbed.popen("edge-0", ["no-such-command"], stderr=subprocess.PIPE)
    assert b"no-such-command" in missing.communicate()[1]
    assert missing.returncode == 127
    with pytest.raises(ValueError, match="shell"):
        testbed.popen("edge-0", ["true"], shell=True)


def test_what_is_wrong_is_said(testbed: Testbed) -> None:
    with pytest.raises(TestbedError, match="did you mean 'cloud-0'"):
        testbed.address("clud-0")
    with pytest.raises(TestbedError, match=r"no site 'clod'.*did you mean 'cloud'"):
        testbed.shape("clod", "edge", latency_s=0.1)
    with pytest.raises(TestbedError, match="no link cloud -> cloud"):
        testbed.shape("cloud", "cloud", latency_s=0.1)
    with pytest.raises(TestbedError, match="bandwidth_bytes_per_s must be more than 0"):
        testbed.shape("cloud", "edge", bandwidth_bytes_per_s=0.0)
    with pytest.raises(TestbedError, match="finite"):
        testbed.shape("cloud", "edge", bandwidth_bytes_per_s=float("inf"))


def three_sites(uplink_bytes_per_s: float | None = None) -> Cluster:
    """A lab with two hosts and two other sites, each pair joined by 100 Mbit/s."""
    hosts = {"lab": ("lab-0", "lab-1"), "office": ("office-0",), "home": ("home-0",)}
    return Cluster(
        name="three sites",
        kinds=(),
        devices=(),
        sites=tuple(
            Site(
                name=site,
                hosts=names,
                bandwidth_bytes_per_s=1.25e8,
                latency_s=1e-4,
                uplink_bandwidth_bytes_per_s=uplink_bytes_per_s if site == "lab" else None,
            )
            for site, names in hosts.items()
        ),
        hosts=tuple(Host(name=name, site=site, devices=()) for site, names in hosts.items() for name in names),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=100 * MBIT, latency_s=LATENCY_S)
            for a in hosts
            for b in hosts
            if a != b
        ),
    )


def test_pairs_that_leave_a_site_share_its_uplink(own_runtime_dir: Path) -> None:
    """Told by counted bytes: what waits in the uplink leaves it in turns, and never faster than its rate."""
    pairs = (("lab-0", "office-0"), ("lab-1", "home-0"))
    with Testbed.up(three_sites(100 * MBIT)) as testbed:
        for source, target in pairs:  # so that the hosts know each other's addresses
            measure_round_trips(testbed, source, target, count=1)
        testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=1000.0)
        for source, target in pairs:
            burst(testbed, source, target, size_bytes=1000, count=60)
        until(lambda: testbed.status().lines[0].bytes_waiting >= 80_000)
        began_s, before = time.monotonic(), testbed.status()
        testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=40_000.0)
        wanted_bytes = before.lines[0].bytes_waiting - 30_000

        def passed() -> tuple[int, int]:
            found = {(link.source, link.target): link.bytes_sent for link in testbed.status().links}
            old = {(link.source, link.target): link.bytes_sent for link in before.links}
            return tuple(found["lab", site] - old["lab", site] for site in ("office", "home"))

        until(lambda: sum(passed()) >= wanted_bytes)
        first, second = passed()
        assert first + second <= 40_000.0 * (time.monotonic() - began_s) + LARGEST_PACKET_BYTES
        assert min(first, second) >= (wanted_bytes - 2 * 16384 - 9000) / 2
        testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=100 * MBIT)

        def all_has_passed() -> bool:
            found = testbed.status()
            links_bytes = sum(link.bytes_sent for link in found.links if link.source == "lab")
            return found.lines[0].bytes_waiting == 0 and found.lines[0].bytes_sent == links_bytes

        until(all_has_passed)
        (line,) = testbed.status().lines
        assert (line.site, line.way, line.packets_dropped) == ("lab", "up", 0)


def test_a_pair_alone_has_a_whole_uplink_and_no_more(own_runtime_dir: Path) -> None:
    """That it gets all of it is for benchmarks/testbed_accuracy.py to show, and exactly for the shaper's own tests."""
    with Testbed.up(three_sites()) as testbed:
        assert testbed.status().lines == ()
        testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=20 * MBIT, downlink_bandwidth_bytes_per_s=30 * MBIT)
        assert [(line.way, line.bandwidth_bytes_per_s) for line in testbed.status().lines] == [
            ("up", 20 * MBIT),
            ("down", 30 * MBIT),
        ]
        began_s = time.monotonic()
        samples = Flow(testbed, "lab-0", "office-0", duration_s=0.5).finish()
        for at_s, received_bytes in samples:
            assert received_bytes <= 20 * MBIT * (at_s - began_s - LATENCY_S + EARLY_S)
        up, down = testbed.status().lines
        assert samples[-1][1] < up.bytes_sent <= 20 * MBIT * (time.monotonic() - began_s)
        assert 0 < down.bytes_sent < up.bytes_sent
        with pytest.raises(TestbedError, match=r"no site 'lob'; known: home, lab, office"):
            testbed.shape_site("lob", uplink_bandwidth_bytes_per_s=1.0)
        with pytest.raises(TestbedError, match="uplink must be positive"):
            testbed.shape_site("lab", uplink_bandwidth_bytes_per_s=0.0)
