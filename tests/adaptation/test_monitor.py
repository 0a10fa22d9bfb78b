"""What a sender makes of its messages: slow link, slow peer, nothing to send; noise; a state that can be kept."""

import random
from collections.abc import Iterator

import pytest

from spantrain.adaptation.monitor import LinkExpectation, LinkMonitor
from spantrain.core.speed import LinkReport, LinkVerdict, SentMessage

RATE, ROUND_TRIP_S, SIZE = 1e6, 0.05, 100_000
EXPECTED = {"b": LinkExpectation(bytes_per_s=RATE, round_trip_s=ROUND_TRIP_S)}


def sends(
    count: int, *, every_s: float, rate: float = RATE, start_s: float = 0.0, sizes=(SIZE,)
) -> Iterator[SentMessage]:
    """Messages over a link that carries one after the other: made at even times, answered a round trip later."""
    free_s = start_s
    for k in range(count):
        made_s, size = start_s + k * every_s, sizes[k % len(sizes)]
        free_s = max(free_s, made_s) + size / rate
        yield SentMessage(
            peer="b", size_bytes=size, queued_s=made_s, started_s=made_s, acknowledged_s=free_s + ROUND_TRIP_S
        )


def report_of(messages, monitor: LinkMonitor | None = None) -> LinkReport:
    monitor = monitor or LinkMonitor(EXPECTED)
    for message in messages:
        monitor.sent(message)
    (report,) = monitor.reports()
    return report


@pytest.mark.parametrize("every_s", [0.0, 0.1, 0.11, 0.5])
@pytest.mark.parametrize("rate", [RATE, RATE / 2, RATE / 5])
def test_the_rate_is_the_links_whether_messages_wait_for_each_other_or_not(every_s, rate):
    report = report_of(sends(20, every_s=every_s, rate=rate))
    assert report.bytes_per_s == pytest.approx(rate, rel=1e-6)
    assert report.verdict is (LinkVerdict.CALM if rate == RATE else LinkVerdict.SLOW_LINK)
    assert report.confidence == 1.0


def test_the_newest_quarter_of_the_messages_says_what_the_link_does_now():
    monitor = LinkMonitor(EXPECTED)
    report_of(sends(9, every_s=0.5, rate=RATE / 2), monitor)
    report = report_of(sends(3, every_s=0.5, start_s=100.0), monitor)
    assert report.bytes_per_s == pytest.approx(RATE / 2, rel=1e-6)
    assert report.newest_bytes_per_s == pytest.approx(RATE, rel=1e-6)
    assert report_of(sends(3, every_s=0.5)).newest_bytes_per_s is None, "too few"


def test_a_round_trip_longer_than_described_is_found_from_messages_of_unlike_sizes():
    described = LinkMonitor({"b": LinkExpectation(bytes_per_s=RATE)})
    report = report_of(sends(20, every_s=0.5, sizes=(SIZE, SIZE // 4)), described)
    assert report.bytes_per_s == pytest.approx(RATE, rel=0.02)


def test_a_pause_of_the_link_is_one_message_among_many():
    messages = list(sends(20, every_s=0.2))
    late = messages[15]
    messages[15] = SentMessage(
        peer="b",
        size_bytes=SIZE,
        queued_s=late.queued_s,
        started_s=late.started_s,
        acknowledged_s=late.acknowledged_s + 30,
    )
    after = [
        SentMessage(
            peer="b",
            size_bytes=SIZE,
            queued_s=message.queued_s + 31,
            started_s=message.started_s + 31,
            acknowledged_s=message.acknowledged_s + 31,
        )
        for message in messages[16:]
    ]
    report = report_of([*messages[:16], *after])
    assert report.bytes_per_s == pytest.approx(RATE, rel=1e-6)


def test_noise_of_a_tenth_does_not_leave_the_band():
    for seed in range(20):
        chance = random.Random(seed)
        monitor = LinkMonitor(EXPECTED)
        start_s = 0.0
        verdicts = set()
        for _ in range(40):
            noisy = RATE * chance.uniform(0.9, 1.1)
            verdicts.add(report_of(sends(1, every_s=1.0, rate=noisy, start_s=start_s), monitor).verdict)
            start_s += 1.0
        assert verdicts == {LinkVerdict.CALM}


def test_a_peer_that_leaves_no_room_is_not_a_slow_link():
    """Messages wait for seconds with nothing on the wire; once they go, they go fast."""
    messages = (
        SentMessage(
            peer="b",
            size_bytes=SIZE,
            queued_s=5.0 * k,
            started_s=5.0 * k + 4.0,
            acknowledged_s=5.0 * k + 4.0 + SIZE / RATE + ROUND_TRIP_S,
        )
        for k in range(8)
    )
    report = report_of(messages)
    assert report.verdict is LinkVerdict.SLOW_PEER
    assert report.queued_s == 4.0
    assert report.bytes_per_s == pytest.approx(RATE)


def test_a_link_that_was_sent_nothing_since_is_idle():
    monitor = LinkMonitor(EXPECTED)
    report_of(sends(5, every_s=0.5), monitor)
    (report,) = monitor.reports(since_s=100.0)
    assert (report.verdict, report.bytes_per_s, report.messages) == (LinkVerdict.IDLE, None, 0)


def test_small_messages_tell_of_latency_not_of_the_rate():
    messages = list(sends(8, every_s=1.0))
    small = SentMessage(peer="b", size_bytes=100, queued_s=20.0, started_s=20.0, acknowledged_s=20.0 + ROUND_TRIP_S)
    report = report_of([*messages, small])
    assert report.latency_s == pytest.approx(ROUND_TRIP_S)
    assert report.bytes_per_s == pytest.approx(RATE)


def test_a_monitor_that_takes_over_goes_on_as_if_nothing_had_been():
    messages = list(sends(30, every_s=0.05, rate=RATE / 3))
    whole, first = LinkMonitor(EXPECTED), LinkMonitor(EXPECTED)
    for message in messages:
        whole.sent(message)
    for message in messages[:13]:
        first.sent(message)
    first.reports()
    again = LinkMonitor(EXPECTED)
    again.take_up(first, same_messages=True)
    for message in messages[13:]:
        again.sent(message)
    assert again.reports() == whole.reports()


def test_a_link_that_carried_nothing_of_late_says_nothing_of_its_rate():
    monitor = LinkMonitor(EXPECTED)
    for message in sends(20, every_s=0.2):
        monitor.sent(message)
    ping = SentMessage(peer="b", size_bytes=8, queued_s=50.0, started_s=50.0, acknowledged_s=50.1)
    monitor.sent(ping)
    (report,) = monitor.reports(since_s=40.0)
    assert (report.bytes_per_s, report.busy_s, report.messages) == (None, 0.0, 0)


def test_one_huge_message_hides_no_others_for_long():
    monitor = LinkMonitor(EXPECTED)
    for message in sends(1, every_s=1.0, sizes=(100 * SIZE,)):
        monitor.sent(message)
    report = report_of(sends(48, every_s=0.2, rate=RATE / 2, start_s=20.0), monitor)
    assert report.bytes_per_s == pytest.approx(RATE / 2, rel=0.1)
