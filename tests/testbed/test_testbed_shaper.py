"""The shaper, with a virtual clock."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.testbed.shaper import FairQueue, Packet, Shape, ShapedLink


def packet(flow: str, number: int, wire_bytes: int = 1000) -> Packet:
    return Packet(f"{flow}{number}".encode(), flow.encode(), wire_bytes)


def link(**fields: float) -> ShapedLink:
    return ShapedLink(Shape(**{"bandwidth_bytes_per_s": 1e6, "latency_s": 0.01, **fields}), Random(1))


def drain(shaped: ShapedLink, until_s: float = 1e9) -> list[tuple[float, bytes]]:
    arrivals = []
    while (event_s := shaped.next_event_s) is not None and event_s <= until_s:
        arrivals += [(event_s, data) for data in shaped.collect(event_s)]
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
    assert shaped.collect(0.005) == []
    assert len(shaped.collect(0.0605)) == 50
    assert len(shaped.collect(0.1105)) == 50


def test_a_small_flow_does_not_wait_behind_a_bulk_flow() -> None:
    shaped = link()
    for number in range(60):
        shaped.push(0.0, packet("bulk", number))
    drain(shaped, 0.0305)
    shaped.push(0.0305, packet("ping", 0, 100))
    at_s = next(at_s for at_s, data in drain(shaped) if data == b"ping0")
    assert at_s - 0.0305 < 0.001 + 0.0001 + 0.01 + 1e-6


@given(sizes=st.lists(st.sampled_from([100, 1500, 9000, 60000]), min_size=2, max_size=4))
@settings(deadline=None, max_examples=30)
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
@settings(deadline=None, max_examples=60)
def test_order_in_a_flow_and_every_packet_once(
    pushes: list[tuple[float, str, int]], jitter_s: float, new_rate: float
) -> None:
    shaped = link(jitter_s=jitter_s)
    arrivals: list[tuple[float, bytes]] = []
    for number, (at_s, flow, size) in enumerate(sorted(pushes)):
        arrivals += drain(shaped, at_s)
        if number == len(pushes) // 2:
            shaped.reshape(at_s, Shape(bandwidth_bytes_per_s=new_rate, latency_s=0.002, jitter_s=jitter_s))
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
        shaped.collect(number * 1e-3)
    drain(shaped)
    assert shaped.counters.packets_lost == pytest.approx(500, rel=0.15)
    assert shaped.counters.packets_lost + shaped.counters.packets_sent == 5000


def test_a_full_queue_drops_from_the_flow_that_fills_it() -> None:
    shaped = link()
    for number in range(1000):
        shaped.push(0.0, packet("bulk", number))
        if number % 100 == 0:
            shaped.push(0.0, packet("small", number))
    assert shaped.waiting_bytes <= shaped.shape.queue_bytes
    assert shaped.counters.packets_dropped > 0
    arrived = [data for _, data in drain(shaped)]
    assert sum(data.startswith(b"small") for data in arrived) == 10
    assert len(arrived) + shaped.counters.packets_dropped == 1010


def test_reshape_changes_the_packet_that_is_being_sent() -> None:
    shaped = link(bandwidth_bytes_per_s=1000.0, latency_s=0.0)
    shaped.push(0.0, packet("a", 0))
    shaped.reshape(0.5, Shape(bandwidth_bytes_per_s=500_000.0, latency_s=0.0))
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
    with pytest.raises(ValueError, match=r"loss_ratio|latency_s|bandwidth_bytes_per_s"):
        Shape(**{"bandwidth_bytes_per_s": 1.0, "latency_s": 0.0, **wrong})
