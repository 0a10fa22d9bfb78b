"""Uplinks and downlinks that a site's links share, with a virtual clock."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.cluster import Link, Site
from spantrain.testbed.forwarding import ShapedNetwork
from spantrain.testbed.shaper import Packet, room_bytes

SITES = ("lab", "office", "home")
RATE, LATENCY_S = 1e6, 0.01
PACKET_BYTES = 1000
QUANTA_BYTES = 2 * 16384
"""By how much flows that share fairly may be apart: a turn of each."""


def network(rate: float = RATE, **lines: float) -> ShapedNetwork:
    """All pairs of three sites at one rate; lines as `lab_up=1e6`."""
    sites = tuple(
        Site(
            name=name,
            hosts=(),
            bandwidth_bytes_per_s=1e9,
            latency_s=0.0,
            uplink_bandwidth_bytes_per_s=lines.get(f"{name}_up"),
            downlink_bandwidth_bytes_per_s=lines.get(f"{name}_down"),
        )
        for name in SITES
    )
    links = tuple(
        Link(source=a, target=b, bandwidth_bytes_per_s=rate, latency_s=LATENCY_S)
        for a in SITES
        for b in SITES
        if a != b
    )
    return ShapedNetwork(sites, links)


def run(shaped: ShapedNetwork, until_s: float) -> list[tuple[float, str, bytes]]:
    """Look after a network at each of its events; return what arrived, when and where."""
    there = []
    while (event_s := shaped.next_event_s) is not None and event_s <= until_s:
        there += [(event_s, site, packet.data) for site, packet in shaped.take(event_s)]
    return there


def flood(
    shaped: ShapedNetwork, pairs: dict[tuple[str, str], float], begin_s: float, end_s: float
) -> list[tuple[float, str, bytes]]:
    """Send packets between sites at given rates; return what arrived until the end."""
    sends = sorted(
        (begin_s + number * PACKET_BYTES / rate, source, target)
        for (source, target), rate in pairs.items()
        for number in range(int((end_s - begin_s) * rate / PACKET_BYTES))
    )
    there = []
    for at_s, source, target in sends:
        there += run(shaped, at_s)
        flow = f"{source}>{target}".encode()
        assert shaped.push(at_s, source, Packet(flow, flow, PACKET_BYTES, 1, SITES.index(target) + 1))
    return there + run(shaped, end_s)


def bytes_between(there: list[tuple[float, str, bytes]], begin_s: float, end_s: float) -> Counter[bytes]:
    return Counter({
        flow: PACKET_BYTES * sum(begin_s < at_s <= end_s for at_s, _, data in there if data == flow)
        for flow in {data for _, _, data in there}
    })  # fmt: skip


def test_two_pairs_get_half_of_an_uplink_each_and_one_alone_gets_all() -> None:
    shaped = network(lab_up=RATE)
    both = flood(shaped, {("lab", "office"): 1.2 * RATE, ("lab", "home"): 1.2 * RATE}, 0.0, 2.0)
    shares = bytes_between(both, 0.5, 2.0)
    assert sum(shares.values()) == pytest.approx(1.5 * RATE, abs=2 * PACKET_BYTES)
    assert shares[b"lab>office"] == pytest.approx(0.75 * RATE, abs=QUANTA_BYTES)
    shaped = network(lab_up=RATE)
    alone = bytes_between(flood(shaped, {("lab", "office"): 1.2 * RATE}, 0.0, 2.0), 0.5, 2.0)
    assert alone[b"lab>office"] == pytest.approx(1.5 * RATE, abs=2 * PACKET_BYTES)


def test_without_lines_pairs_do_not_touch_each_other() -> None:
    there = flood(network(), {("lab", "office"): 1.2 * RATE, ("lab", "home"): 1.2 * RATE}, 0.0, 2.0)
    for carried in bytes_between(there, 0.5, 2.0).values():
        assert carried == pytest.approx(1.5 * RATE, abs=2 * PACKET_BYTES)


def test_sites_that_send_to_one_share_its_downlink() -> None:
    pairs = {("lab", "home"): 1.2 * RATE, ("office", "home"): 1.2 * RATE}
    there = flood(network(home_down=RATE), pairs, 0.0, 2.0)
    shares = bytes_between(there, 0.5, 2.0)
    assert sum(shares.values()) == pytest.approx(1.5 * RATE, abs=2 * PACKET_BYTES)
    assert shares[b"lab>home"] == pytest.approx(0.75 * RATE, abs=QUANTA_BYTES)
    assert {site for _, site, _ in there} == {"home"}


def test_what_a_slow_pair_leaves_of_an_uplink_is_for_the_other() -> None:
    shaped = network(rate=2 * RATE, lab_up=RATE)
    shaped.reshape(
        0.0, ("lab", "home"), Link(source="lab", target="home", bandwidth_bytes_per_s=0.2 * RATE, latency_s=LATENCY_S)
    )
    pairs = {("lab", "office"): 1.2 * RATE, ("lab", "home"): 0.2 * RATE}
    shares = bytes_between(flood(shaped, pairs, 0.0, 2.0), 0.5, 2.0)
    assert shares[b"lab>home"] == pytest.approx(0.3 * RATE, abs=2 * PACKET_BYTES)
    assert shares[b"lab>office"] == pytest.approx(1.2 * RATE, abs=2 * PACKET_BYTES)


def test_a_packet_is_sent_on_each_in_turn() -> None:
    shaped = network(lab_up=RATE / 2, office_down=RATE / 4)
    assert shaped.push(1.0, "lab", Packet(b"x", b"x", PACKET_BYTES, 1, 2))
    ((at_s, site, data),) = run(shaped, 9.0)
    assert (site, data) == ("office", b"x")
    assert at_s == pytest.approx(1.0 + (2 + 1 + 4) * PACKET_BYTES / RATE + LATENCY_S)
    assert [line.counters.bytes_sent for line in shaped.lines.values()] == [PACKET_BYTES] * 2


@pytest.mark.parametrize("new_rate", [0.2 * RATE, 3 * RATE])
def test_a_line_changes_while_in_use(new_rate: float) -> None:
    shaped = network(rate=10 * RATE, lab_up=RATE)
    pairs = {("lab", "office"): 4 * RATE, ("lab", "home"): 4 * RATE}
    flood(shaped, pairs, 0.0, 1.0)
    shaped.reshape_line(1.0, ("lab", "up"), new_rate)
    after = bytes_between(flood(shaped, pairs, 1.0, 2.0), 1.1, 2.0)
    assert sum(after.values()) == pytest.approx(0.9 * new_rate, abs=5 * PACKET_BYTES)


def test_a_line_may_be_new_and_its_queue_follows_its_links() -> None:
    shaped = network()
    flood(shaped, {("lab", "office"): RATE}, 0.0, 1.0)
    shaped.reshape_line(1.0, ("lab", "up"), RATE / 2)
    (line,) = shaped.lines.values()
    for number in range(1000):
        assert shaped.push(1.0 + number * 1e-9, "lab", Packet(b"y", b"y", PACKET_BYTES, 1, 2))
    assert (
        line.waiting_bytes
        <= room_bytes(line.shape.bandwidth_bytes_per_s, LATENCY_S)
        < line.waiting_bytes + PACKET_BYTES
    )
    for pair in shaped.links:
        shaped.reshape(1.01, pair, Link(source="lab", target="home", bandwidth_bytes_per_s=RATE, latency_s=0.0))
    assert line.waiting_bytes <= room_bytes(line.shape.bandwidth_bytes_per_s, 0.0)


def test_what_cannot_go_is_refused() -> None:
    shaped = network(lab_up=RATE)
    for number in (1, 9):
        assert not shaped.push(0.0, "lab", Packet(b"x", b"x", PACKET_BYTES, 1, number))
    assert shaped.next_event_s is None


@given(
    gaps_s=st.lists(st.floats(1e-6, 0.01), min_size=1, max_size=50),
    rates=st.tuples(*[st.sampled_from([None, 2e5, 1e6, 1e7])] * 2),
    rests_s=st.lists(st.floats(0, 0.3), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_a_busy_machine_changes_no_time_but_that_of_handing_over(
    gaps_s: list[float], rates: tuple[float | None, float | None], rests_s: list[float]
) -> None:
    """The same pushes; one network looked after at once, one now and then: what has arrived by then is the same.

    No two pushes are at one moment: which of them is first is then open.
    """
    lines = {name: rate for name, rate in zip(("lab_up", "home_down"), rates, strict=True) if rate is not None}
    exact, late = network(**lines), network(**lines)
    now_s, arrived = 0.0, []
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        arrived += [data for _, _, data in run(exact, now_s)]
        for shaped in (exact, late):
            source, target = (("lab", 3), ("office", 3), ("lab", 2))[number % 3]
            shaped.push(now_s, source, Packet(str(number).encode(), bytes([number % 3]), 3000, 1, target))
    seen: list[bytes] = []
    for rest_s in rests_s:
        now_s += rest_s
        arrived += [data for _, _, data in run(exact, now_s)]
        seen += [packet.data for _, packet in late.take(now_s)]
        assert sorted(seen) == sorted(arrived)
    arrived += [data for _, _, data in run(exact, 1e9)]
    assert sorted(arrived) == sorted(str(number).encode() for number in range(len(gaps_s)))
