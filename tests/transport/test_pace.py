"""What may be on its way: enough to fill a link of any rate, and not much more than that."""

from collections import deque

import pytest

from spantrain.transport.mailbox.outbox import Pace


class Link:
    """Sends one message after the other at a rate; word of each comes after a round trip. Times are made up."""

    def __init__(self, rate, round_trip_s):
        self.rate, self.round_trip_s = rate, round_trip_s
        self.free_s = 0.0

    def answered_s(self, now_s, size):
        self.free_s = max(self.free_s, now_s) + size / self.rate
        return self.free_s + self.round_trip_s


def run(pace, link, size, seconds, begin_s=0.0):
    """Send as much as there is room for; return bytes per second of the second half, and the most that waited."""
    now_s, away, done, longest_s = begin_s, deque(), [], 0.0
    while now_s < begin_s + seconds:
        while len(away) < 2 or len(away) * size < pace.room_bytes:
            mark = pace.left(now_s, others=len(away))
            away.append((now_s, link.answered_s(now_s, size), mark))
            longest_s = max(longest_s, away[-1][1] - now_s)
        left_s, now_s, mark = away.popleft()
        pace.came(now_s, size, left_s=left_s, mark=mark)
        done.append(now_s)
    late = [at_s for at_s in done if at_s > begin_s + seconds / 2]
    return size * (len(late) - 1) / (late[-1] - late[0]), longest_s


@pytest.mark.parametrize("round_trip_s", [0.001, 0.02, 0.2])
@pytest.mark.parametrize("size", [4_000, 100_000, 1_000_000])
@pytest.mark.parametrize("rate", [80e3, 1e6, 12.5e6, 125e6])
def test_a_link_is_filled_and_what_waits_for_it_is_bounded(rate, size, round_trip_s):
    pace = Pace()
    reached, longest_s = run(pace, Link(rate, round_trip_s), size, seconds=max(10.0, 40 * size / rate))
    assert reached >= 0.95 * rate
    assert longest_s <= max(2 * (round_trip_s + size / rate) + 0.2, 65536 / rate + round_trip_s) + size / rate


def test_a_link_that_becomes_slow_is_noticed_within_seconds():
    pace, link = Pace(), Link(12.5e6, 0.02)
    run(pace, link, 100_000, 5.0)
    slow = Link(1e6, 0.02)
    slow.free_s = link.free_s
    run(pace, slow, 100_000, 8.0, begin_s=link.free_s)
    assert pace.room_bytes <= 1e6 * 0.5


def test_a_message_alone_after_a_pause_is_no_sign_of_a_slow_link():
    pace = Pace()
    run(pace, Link(12.5e6, 0.02), 100_000, 2.0)
    before = pace.room_bytes
    mark = pace.left(4.0, others=0)
    pace.came(4.03, 100_000, left_s=4.0, mark=mark)
    assert pace.room_bytes == before


@pytest.mark.parametrize("longer_s", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("rate", [1e6, 12.5e6])
def test_a_way_that_becomes_longer_is_filled_again(rate, longer_s):
    pace, link = Pace(), Link(rate, 0.02)
    run(pace, link, 100_000, 5.0)
    longer = Link(rate, 0.02 + longer_s)
    longer.free_s = link.free_s
    reached, _ = run(pace, longer, 100_000, 120.0, begin_s=link.free_s)
    assert reached >= 0.9 * rate


@pytest.mark.parametrize("size", [4_000, 100_000])
def test_what_waits_does_not_grow_on_a_link_that_is_never_idle(size):
    pace, link = Pace(), Link(1e6, 0.02)
    reached, longest_s = run(pace, link, size, 300.0)
    assert reached >= 0.97e6
    assert longest_s <= 2 * (0.02 + size / 1e6) + 0.2 + size / 1e6
