"""The shaper, with a virtual clock."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.cluster import Link
from spantrain.testbed.shaper import FairQueue, Packet, ShapedLink, room_bytes

QUANTUM_BYTES = 16384


def packet(flow: str, number: int, wire_bytes: int = 1000) -> Packet:
    return Packet(f"{flow}{number}".encode(), flow.encode(), wire_bytes)


def link(**fields: float) -> ShapedLink:
    return ShapedLink(
        Link(source="lab", target="home", **{"bandwidth_bytes_per_s": 1e6, "latency_s": 0.01, **fields}), Random(1)
    )


def collected(shaped: ShapedLink, now_s: float) -> list[bytes]:
    return [packet.data for _, packet in shaped.take(now_s)]


def drain(shaped: ShapedLink, until_s: float = 1e9) -> list[tuple[float, bytes]]:
    arrivals = []
    while (event_s := shaped.next_event_s) is not None and event_s <= until_s:
        arrivals += [(event_s, data) for data in collected(shaped, event_s)]
    return arrivals


def test_packets_arrive_at_the_rate_after_the_delay() -> None:
    shaped = link()
    for number in range(100):
        shaped.push(5.0, packet("a", number))
    times = [at_s for at_s, _ in drain(shaped)]
    assert times == pytest.approx([5.0 + 0.001 * (number + 1) + 0.01 for number in range(100)])
    assert shaped.counters.bytes_sent == 100_000
    assert shaped.next_event_s is None


def test_a_caller_that_wakes_late_loses_no_rate() -> None:
    shaped = link()
    for number in range(100):
        shaped.push(0.0, packet("a", number))
    assert collected(shaped, 0.005) == []
    assert len(collected(shaped, 0.0605)) == 50
    assert len(collected(shaped, 0.1105)) == 50


def test_a_small_flow_does_not_wait_behind_a_bulk_flow() -> None:
    shaped = link()
    for number in range(60):
        shaped.push(0.0, packet("bulk", number))
    drain(shaped, 0.0305)
    shaped.push(0.0305, packet("ping", 0, 100))
    at_s = next(at_s for at_s, data in drain(shaped) if data == b"ping0")
    assert at_s - 0.0305 < 0.001 + 0.0001 + 0.01 + 1e-6


@pytest.mark.parametrize("rate", [1.25e6, 12.5e6, 125e6])
@pytest.mark.parametrize("bulk_bytes", [1500, 9000, 60000])
def test_a_ping_beside_bulk_waits_for_one_packet_whenever_it_comes(rate: float, bulk_bytes: int) -> None:
    """Once the bulk flow has had its own first turn, which is a quantum."""
    for moment in range(25):
        shaped = link(bandwidth_bytes_per_s=rate)
        for number in range(room_bytes(shaped.shape.bandwidth_bytes_per_s, shaped.shape.latency_s) // bulk_bytes):
            shaped.push(0.0, packet("bulk", number, bulk_bytes))
        served_bytes = QUANTUM_BYTES + bulk_bytes
        at_s = (served_bytes + moment / 25 * 0.9 * max(0, shaped.waiting_bytes - served_bytes)) / rate
        early = drain(shaped, at_s)
        shaped.push(at_s, packet("ping", 0, 60))
        took_s = next(arrived_s for arrived_s, data in drain(shaped) if data == b"ping0") - at_s
        assert 0.01 + 60 / rate <= took_s <= 0.01 + (bulk_bytes + 60) / rate + 1e-9
        assert all(data.startswith(b"bulk") for _, data in early)


def flood(shaped: ShapedLink, begin_s: float, end_s: float, bytes_per_s: float) -> list[tuple[float, bytes]]:
    """Push packets of 1000 bytes at a rate; return what arrived until the end."""
    arrivals, number = [], 0
    while (at_s := begin_s + number * 1000 / bytes_per_s) < end_s:
        arrivals += drain(shaped, at_s)
        shaped.push(at_s, packet("flood", number))
        number += 1
    return arrivals + drain(shaped, end_s)


def bytes_between(arrivals: list[tuple[float, bytes]], begin_s: float, end_s: float) -> int:
    return 1000 * sum(begin_s < at_s <= end_s for at_s, _ in arrivals)


@pytest.mark.parametrize("new_rate", [0.2e6, 0.5e6, 0.999e6, 2e6, 50e6])
def test_a_new_rate_holds_from_the_instant_of_the_change(new_rate: float) -> None:
    """What was on the way arrives as it would have; all that leaves from then on leaves at the new rate."""
    shaped = link()
    before = flood(shaped, 0.0, 1.0, 1.1e6)
    shaped.reshape(1.0, Link(source="lab", target="home", bandwidth_bytes_per_s=new_rate, latency_s=0.01))
    after = before + flood(shaped, 1.0, 2.0, 1.1 * new_rate)
    for begin_s in (0.02, 0.3, 0.77):
        assert bytes_between(after, begin_s, 1.01) == pytest.approx(1e6 * (1.01 - begin_s), abs=1001)
        for end_s in (1.02, 1.1, 1.5, 2.0):
            assert bytes_between(after, 1.01, end_s) == pytest.approx(new_rate * (end_s - 1.01), abs=2001)


@given(
    gaps_s=st.lists(st.floats(0, 0.02), min_size=1, max_size=60),
    size=st.integers(40, 60000),
    rate=st.sampled_from([1e5, 1e6, 1e8]),
    jitter_s=st.sampled_from([0.0, 0.004]),
    rests_s=st.lists(st.floats(0, 0.5), min_size=1, max_size=30),
)
@settings(max_examples=60)
def test_a_busy_machine_changes_no_time_but_that_of_handing_over(
    gaps_s: list[float], size: int, rate: float, jitter_s: float, rests_s: list[float]
) -> None:
    """The same pushes; one link looked after at once, one only now and then: what has arrived by then is the same."""
    exact, late = (link(bandwidth_bytes_per_s=rate, jitter_s=jitter_s) for _ in range(2))
    pushed_s, now_s, arrived = [], 0.0, []
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        pushed_s.append(now_s)
        arrived += drain(exact, now_s)
        for shaped in (exact, late):
            shaped.push(now_s, packet("a", number, size))
    seen: list[bytes] = []
    for rest_s in rests_s:
        now_s += rest_s
        arrived += drain(exact, now_s)
        seen += collected(late, now_s)
        assert seen == [data for _, data in arrived]
    arrived += drain(exact)
    least_s = size / rate + 0.01 - jitter_s - 1e-9
    for at_s, data in arrived:
        assert at_s - pushed_s[int(data[1:])] >= least_s, "no packet is early"
    for first in range(len(arrived)):
        for last in range(first + 1, len(arrived)):
            window_s = arrived[last][0] - arrived[first][0] + 2 * jitter_s
            assert (last - first) * size <= rate * window_s * (1 + 1e-9) + 1e-6, "no faster than the rate"


@given(sizes=st.lists(st.sampled_from([100, 1500, 9000, 60000]), min_size=2, max_size=4))
@settings(max_examples=10)
def test_flows_share_bytes_evenly_whatever_their_packets(sizes: list[int]) -> None:
    queue = FairQueue()
    for flow, size in enumerate(sizes):
        for number in range(2_000_000 // size):
            queue.push(packet(str(flow), number, size))
    served: Counter[bytes] = Counter()
    while sum(served.values()) < len(sizes) * 1_000_000 and (taken := queue.pop()):
        served[taken.flow] += taken.wire_bytes
    assert max(served.values()) - min(served[str(flow).encode()] for flow in range(len(sizes))) <= 2 * 65536


@given(
    pushes=st.lists(st.tuples(st.floats(0, 0.2), st.sampled_from("abc"), st.integers(40, 9000)), max_size=60),
    jitter_s=st.sampled_from([0.0, 0.004, 0.05]),
    new_rate=st.sampled_from([1e5, 1e7]),
)
@settings(max_examples=60)
def test_order_in_a_flow_and_every_packet_once(
    pushes: list[tuple[float, str, int]], jitter_s: float, new_rate: float
) -> None:
    shaped = link(jitter_s=jitter_s)
    arrivals: list[tuple[float, bytes]] = []
    for number, (at_s, flow, size) in enumerate(sorted(pushes)):
        arrivals += drain(shaped, at_s)
        if number == len(pushes) // 2:
            shaped.reshape(
                at_s,
                Link(source="lab", target="home", bandwidth_bytes_per_s=new_rate, latency_s=0.002, jitter_s=jitter_s),
            )
        shaped.push(at_s, packet(flow, number, size))
    arrivals += drain(shaped)
    counters = shaped.counters
    assert len(arrivals) == counters.packets_sent == len(pushes) - counters.packets_dropped
    assert [at_s for at_s, _ in arrivals] == sorted(at_s for at_s, _ in arrivals)
    for flow in "abc":
        numbers = [int(data[1:]) for _, data in arrivals if data[:1] == flow.encode()]
        assert numbers == sorted(numbers)


def test_jitter_spreads_delays_within_its_bounds() -> None:
    shaped = link(bandwidth_bytes_per_s=1e9, jitter_s=0.004)
    delays = []
    for number in range(500):
        shaped.push(float(number), packet("a", number))
        delays += [at_s - number for at_s, _ in drain(shaped)]
    assert 0.006 <= min(delays) < 0.0065
    assert 0.0135 < max(delays) <= 0.014 + 1e-5


def test_loss_takes_its_share_and_is_counted() -> None:
    shaped = link(bandwidth_bytes_per_s=1e9, loss_ratio=0.1)
    for number in range(5000):
        shaped.push(number * 1e-3, packet("a", number))
        collected(shaped, number * 1e-3)
    drain(shaped)
    assert shaped.counters.packets_lost == pytest.approx(500, rel=0.15)
    assert shaped.counters.packets_lost + shaped.counters.packets_sent == 5000


def test_a_full_queue_drops_from_the_flow_that_fills_it() -> None:
    shaped = link()
    for number in range(1000):
        shaped.push(0.0, packet("bulk", number))
        if number % 100 == 0:
            shaped.push(0.0, packet("small", number))
    assert shaped.waiting_bytes <= room_bytes(shaped.shape.bandwidth_bytes_per_s, shaped.shape.latency_s)
    assert shaped.counters.packets_dropped > 0
    arrived = [data for _, data in drain(shaped)]
    assert sum(data.startswith(b"small") for data in arrived) == 10
    assert len(arrived) + shaped.counters.packets_dropped == 1010


def test_reshape_changes_the_packet_that_is_being_sent() -> None:
    shaped = link(bandwidth_bytes_per_s=1000.0, latency_s=0.0)
    shaped.push(0.0, packet("a", 0))
    shaped.reshape(0.5, Link(source="lab", target="home", bandwidth_bytes_per_s=500_000.0, latency_s=0.0))
    assert drain(shaped) == [(pytest.approx(0.501), b"a0")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": float("inf")},
        {"bandwidth_bytes_per_s": float("nan")},
        {"latency_s": -1.0},
        {"loss_ratio": 1.0},
    ],
)
def test_a_shape_that_no_link_can_have_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"loss_ratio|latency|bandwidth"):
        Link(source="lab", target="home", **{"bandwidth_bytes_per_s": 1.0, "latency_s": 0.0, **wrong})
