"""Links that follow a trace of speeds: exactly, with a virtual clock; and the real router, with real packets."""

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.cluster import Link, Site
from spantrain.core.speed import SpeedTrace
from spantrain.errors import TestbedError
from spantrain.testbed.forwarding import ShapedNetwork
from spantrain.testbed.load import Load
from spantrain.testbed.shaper import Packet, ShapedLink, room_bytes
from spantrain.testbed.testbed import Testbed
from spantrain_studies.testbed_traffic import Flow, measure_round_trips
from testing.bursts import HEADER_BYTES, burst
from testing.patience import PATIENCE_S, until

RATE, LATENCY_S, PACKET_BYTES = 1e6, 0.01, 1000
MBIT = 1e6 / 8


def collected(shaped: ShapedLink, now_s: float) -> list[bytes]:
    return [packet.data for _, packet in shaped.take(now_s)]


def network(*, line: float | None = None) -> ShapedNetwork:
    """Two sites; the first may have an uplink."""
    sites = tuple(
        Site(
            name=name,
            hosts=(),
            bandwidth_bytes_per_s=1e9,
            latency_s=0.0,
            uplink_bandwidth_bytes_per_s=line if name == "lab" else None,
            downlink_bandwidth_bytes_per_s=None,
        )
        for name in ("lab", "office")
    )
    links = tuple(
        Link(source=source, target=target, bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S)
        for source, target in (("lab", "office"), ("office", "lab"))
    )
    return ShapedNetwork(sites, links)


def trace(*changes: tuple[float, float]) -> SpeedTrace:
    return SpeedTrace(changes=changes)


def arrivals(shaped: ShapedNetwork) -> list[float]:
    found = []
    while (event_s := shaped.next_event_s) is not None:
        assert event_s < float("inf"), "nothing wakes a link that stands still"
        found += [event_s] * len(shaped.take(event_s))
    return found


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_packets_leave_when_the_trace_says_and_none_is_lost(data: st.DataObject) -> None:
    """The same `SpeedTrace` reckons for the simulator when work ends: the testbed's packets end with it."""
    at = sorted(data.draw(st.sets(st.integers(0, 200), min_size=1, max_size=6)))
    parts = [data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])) for _ in at[1:]]
    speed = trace(*zip([ms / 1000 for ms in at], [*parts, 0.5], strict=True))
    shaped = network()
    shaped.follow(0.0, {"lab->office": speed}, 0.0)
    for number in range(60):
        assert shaped.push(0.0, "lab", Packet(b"%d" % number, b"flow", PACKET_BYTES, 1, 2))
    there = arrivals(shaped)
    assert len(there) == 60
    for number, at_s in enumerate(there, start=1):
        # A packet that is through as the link stops may be taken to be on either side of that.
        early_s, late_s = (speed.end_s(0.0, number * PACKET_BYTES / RATE + by_s) for by_s in (-1e-9, 1e-9))
        assert early_s - 1e-6 <= at_s - LATENCY_S <= late_s + 1e-6


@pytest.mark.parametrize("part", [0.0, 0.25])
def test_what_is_being_sent_goes_on_at_the_new_speed(part: float) -> None:
    shaped = ShapedLink(Link(source="lab", target="home", bandwidth_bytes_per_s=RATE, latency_s=0.0), Random(1))
    shaped.push(0.0, Packet(b"a", b"flow", PACKET_BYTES))
    shaped.change_speed(0.0005, part)
    assert collected(shaped, 0.001) == []
    shaped.change_speed(0.0015, 1.0)
    left_s = 0.0005 - 0.001 * part
    assert shaped.next_event_s == pytest.approx(0.0015 + left_s)
    assert collected(shaped, 0.0015 + left_s + 1e-9) == [b"a"]


def test_a_link_that_stands_still_keeps_its_buffer() -> None:
    shaped = ShapedLink(Link(source="lab", target="home", bandwidth_bytes_per_s=RATE, latency_s=0.1), Random(1))
    shaped.change_speed(0.0, 0.0)
    room = room_bytes(shaped.shape.bandwidth_bytes_per_s, shaped.shape.latency_s)
    for number in range(2 * room // PACKET_BYTES):
        shaped.push(0.0, Packet(b"%d" % number, b"flow", PACKET_BYTES))
    assert room - 2 * PACKET_BYTES < shaped.waiting_bytes <= room
    assert shaped.counters.packets_dropped > 0
    shaped.change_speed(30.0, 1.0)
    assert len(collected(shaped, 60.0)) == 2 * room // PACKET_BYTES - shaped.counters.packets_dropped


def test_a_late_caller_changes_no_time() -> None:
    shaped = network()
    shaped.follow(0.0, {"lab->office": trace((0.01, 0.5), (0.02, 1.0))}, 0.0)
    for number in range(40):
        shaped.push(0.0, "lab", Packet(b"%d" % number, b"flow", PACKET_BYTES, 1, 2))
    assert len(shaped.take(0.0351 + LATENCY_S)) == 30


def test_a_trace_may_have_begun_and_another_takes_its_place() -> None:
    shaped = network(line=2 * RATE)
    shaped.follow(5.0, {"lab->office": trace((1.0, 0.5), (3.0, 0.25)), "lab up": trace((1.0, 0.5))}, 3.0)
    assert {name: link.speed for name, link in shaped.by_name.items()} == {
        "lab->office": 0.5, "office->lab": 1.0, "lab up": 0.5,
    }  # fmt: skip
    shaped.take(6.0)
    assert shaped.by_name["lab->office"].speed == 0.25
    shaped.follow(6.5, {"office->lab": trace((0.0, 0.1))}, 6.5)
    assert [link.speed for link in shaped.by_name.values()] == [1.0, 0.1, 1.0]
    assert shaped.next_event_s is None


def test_what_is_not_there_cannot_follow() -> None:
    with pytest.raises(TestbedError, match="no link lab up to follow a trace; there are lab->office, office->lab"):
        network().follow(0.0, {"lab up": trace((0.0, 0.5))}, 0.0)


def passed(testbed: Testbed) -> tuple[float, int, float]:
    """Return what has passed from cloud to edge at some time between two others.

    The router answers with what had passed when it last looked, and looks again behind each answer.
    """
    before_s = time.monotonic()
    testbed.status()
    sent_bytes = testbed.status().links[0].bytes_sent
    return before_s, sent_bytes, time.monotonic()


@pytest.mark.root
@pytest.mark.timeout(600)
def test_the_router_keeps_each_segments_rate(testbed: Testbed) -> None:
    """To a datagram, however late anybody wakes: what waits leaves at its own time."""
    rate, size_bytes = 8_000.0, 250
    speed = trace((0.0, 1.0), (1.0, 0.4), (2.0, 0.7), (3.0, 1.0))
    measure_round_trips(testbed, "cloud-0", "edge-0", count=1)  # so that the hosts know each other's addresses
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=rate)
    burst(testbed, "cloud-0", "edge-0", size_bytes=size_bytes - HEADER_BYTES, count=400)
    until(lambda: testbed.status().links[0].bytes_waiting > 10 * rate)
    start_s = testbed.follow({"cloud->edge": speed})
    for number in range(4):
        seen = []
        for within_s in (0.1, 0.9):
            time.sleep(max(0.0, start_s + number + within_s - time.monotonic()))
            seen.append(passed(testbed))
        (before_s, first_bytes, after_s), (since_s, last_bytes, until_s) = seen
        least_bytes = rate * speed.work_s(after_s - start_s, since_s - start_s)
        most_bytes = rate * speed.work_s(before_s - start_s, until_s - start_s)
        assert least_bytes - size_bytes <= last_bytes - first_bytes <= most_bytes + size_bytes
    assert testbed.status().links[0].speed == 1.0


@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_flow_outlives_an_outage(testbed: Testbed) -> None:
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=10_000.0)
    flow = Flow(testbed, "cloud-0", "edge-0", duration_s=0.5)
    until(lambda: testbed.status().links[0].bytes_sent > 0)
    testbed.follow({"cloud->edge": trace((0.0, 0.0), (1000.0, 1.0))})
    testbed.shape("cloud", "edge", bandwidth_bytes_per_s=100 * MBIT)
    _, before_bytes, begun_s = passed(testbed)
    until(lambda: time.monotonic() > begun_s + 1.0)
    assert passed(testbed)[1] == before_bytes
    ended_s = testbed.follow({"cloud->edge": trace((0.0, 1.0))})
    assert flow.finish()[-1][0] > ended_s, "what waited for the slow link would have taken half a minute"


@pytest.mark.root
@pytest.mark.timeout(600)
def test_competing_traffic_is_counted_apart_and_leaves_nothing(testbed: Testbed) -> None:
    flow = Flow(testbed, "cloud-0", "edge-0", duration_s=0.3)
    flow.finish()
    before = testbed.status().links[0]
    assert (before.load_bytes_sent, before.bytes_sent > 0) == (0, True)
    with Load(testbed, "cloud-1", "edge-1", bytes_per_s=10 * MBIT, connections=2) as load:
        deadline_s = time.monotonic() + PATIENCE_S
        while load.received_bytes(wait_s=0.1) < 1_000_000:
            assert load.running
            assert time.monotonic() < deadline_s
        assert load.elapsed_s >= 0.7 * 1_000_000 / (10 * MBIT)
    received = load.stop()
    after = testbed.status().links[0]
    assert 1_000_000 <= received <= after.load_bytes_sent <= after.bytes_sent - before.bytes_sent
    assert not load.running
