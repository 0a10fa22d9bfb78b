"""Messages that need several links at once."""

from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import fair_parts
from spantrain.sim.network import Network
from spantrain.sim.transfers import TransferCost, VirtualClock

LINKS = ("port", "far", "near")


def send_all(*messages: tuple[float, str, TransferCost], **speeds: SpeedTrace):
    """Send at these times from `a` to these devices; return by device when each began, had left, and was there."""
    clock, found = VirtualClock(), {}
    network = Network(clock, speeds=speeds)

    def arrived(target):
        return lambda start_s, sent_s: found.setdefault(target, []).append((start_s, sent_s, clock.now_s))

    for time_s, target, transfer in messages:
        clock.at(time_s, network.send, "a", target, transfer, arrived(target))
    clock.run()
    return found


def message(
    size: int, seconds: float, *links: str, usage: tuple[float, ...] = (), latency_s: float = 0.0
) -> TransferCost:
    return TransferCost(size_bytes=size, latency_s=latency_s, occupancy_s=seconds, links=links, usage=usage)


@st.composite
def demands(draw: st.DrawFn):
    def one():
        links = draw(st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True))
        uses = tuple((link, draw(st.sampled_from([0.1, 0.5, 1.0]))) for link in links)
        return (draw(st.sampled_from([1.0, 3.0, 10.0])), uses)

    return [one() for _ in range(draw(st.integers(1, 6)))]


@settings(deadline=None, max_examples=150)
@given(demands=demands(), capacity=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3))
def test_shares_are_max_min_fair(demands, capacity):
    there = dict(zip(LINKS, capacity, strict=True))
    parts = fair_parts(demands, there)
    rates = [part * bandwidth for part, (bandwidth, _) in zip(parts, demands, strict=True)]
    load = dict.fromkeys(LINKS, 0.0)
    for part, (_, uses) in zip(parts, demands, strict=True):
        for link, used in uses:
            load[link] += part * used
    assert all(load[link] <= there[link] + 1e-9 for link in LINKS)
    for rate, part, (_, uses) in zip(rates, parts, demands, strict=True):
        alone = max(used for _, used in uses) * min(there[link] / used for link, used in uses)
        full = [link for link, _ in uses if load[link] >= there[link] - 1e-9]
        # It goes at full speed, or on some full link nobody is faster.
        assert part >= alone - 1e-9 or any(
            all(rate >= other - 1e-9 for other, (_, theirs) in zip(rates, demands, strict=True) if link in dict(theirs))
            for link in full
        )


def test_a_slow_line_leaves_its_port_to_others():
    # The port carries 100 bytes/s, the line behind it 20.
    found = send_all(
        (0.0, "b", message(100, 1.0, "port")), (0.0, "c", message(40, 2.0, "far", "port", usage=(1.0, 0.2)))
    )
    assert found == {"b": [(0.0, pytest.approx(1.25), pytest.approx(1.25))], "c": [(0.0, 2.0, 2.0)]}


def test_fast_neighbours_share_a_port_evenly():
    found = send_all((0.0, "b", message(100, 1.0, "port", "x")), (0.0, "c", message(100, 1.0, "port", "y")))
    assert [entry[0][1] for entry in found.values()] == [2.0, 2.0]


def test_links_that_are_faster_for_a_while_are_not_given_twice():
    twice = SpeedTrace(changes=((0.0, 2.0),))
    sent = ((0.0, "b", message(100, 1.0, "port", "x")), (0.0, "c", message(100, 1.0, "port", "y")))
    found = send_all(*sent, port=twice, x=twice, y=twice)
    assert [entry[0][1] for entry in found.values()] == [1.0, 1.0]


def test_a_message_under_way_goes_on_when_its_link_becomes_part_of_a_mesh():
    # b is alone for half a second, then shares its link with one that also needs a slow line.
    both = message(10, 1.0, "line", "port", usage=(1.0, 0.5))
    found = send_all((0.0, "b", message(20, 1.0, "port", latency_s=3.0)), (0.5, "c", both))
    assert found["b"] == [(0.0, pytest.approx(1.5), pytest.approx(4.5))]
    assert found["c"] == [(0.5, pytest.approx(1.5), pytest.approx(1.5))]


def test_messages_of_one_connection_follow_each_other_over_different_links():
    found = send_all(
        (0.0, "b", message(1, 1.0, "port")),
        (0.0, "b", message(1, 2.0, "port", "x")),
        (0.0, "b", message(1, 1.0, "port")),
    )
    assert found["b"] == [(0.0, 1.0, 1.0), (1.0, 3.0, 3.0), (3.0, 4.0, 4.0)]


def test_a_pair_slower_than_its_link_leaves_some_of_it():
    slow = message(1, 1.0, "far", usage=(0.5,))
    assert send_all((0.0, "b", slow), (0.0, "c", slow)) == {"b": [(0.0, 1.0, 1.0)], "c": [(0.0, 1.0, 1.0)]}


def test_a_trace_changes_what_a_mesh_carries():
    paused = SpeedTrace(changes=((1.0, 0.0), (3.0, 0.5)))
    found = send_all(
        (0.0, "b", message(20, 2.0, "far", "port", usage=(1.0, 0.1))), (0.0, "c", message(200, 2.0, "port")), far=paused
    )
    # b does a second's work, stands still, and goes on at half the speed; c has nine tenths of the port, then all.
    assert found["b"] == [(0.0, pytest.approx(5.0), pytest.approx(5.0))]
    assert found["c"][0][1] == pytest.approx(1.0 + (2.0 - 0.9))


@settings(deadline=None, max_examples=40)
@given(times=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("bcd"), st.integers(0, 4)), min_size=1, max_size=8))
def test_a_second_link_that_never_binds_changes_nothing(times):
    def run(*more: str):
        wide = (1.0,) + (0.01,) * len(more)
        return send_all(*((t / 2, to, message(10 * n, n, "far", *more, usage=wide)) for t, to, n in times))

    plain, meshed = run(), run("port")
    assert meshed.keys() == plain.keys()
    for target, entries in plain.items():
        for mine, theirs in zip(meshed[target], entries, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9)


USES = (
    (("port", 1.0),),
    (("far", 1.0), ("port", 0.2)),
    (("near", 1.0), ("port", 0.5), ("far", 0.1)),
    (("near", 0.5), ("port", 0.25)),
)


def all_at_once(messages: list[tuple[int, int, int]]) -> list[float]:
    """When each message ends, with the shares of all that is under way found anew at every start and end."""
    left = {number: float(work) for number, (_, _, work) in enumerate(messages)}
    ends, now_s = [0.0] * len(messages), 0.0
    while left:
        active = [n for n in left if messages[n][0] <= now_s]
        parts = fair_parts([(5.0, USES[messages[n][1]]) for n in active], dict.fromkeys(LINKS, 1.0))
        until = [left[n] / part for n, part in zip(active, parts, strict=True)]
        step_s = min([*until, *(messages[n][0] - now_s for n in left if n not in active)])
        for n, part in zip(active, parts, strict=True):
            left[n] -= part * step_s
        now_s += step_s
        for n in [n for n in active if left[n] < 1e-9]:
            ends[n] = now_s
            del left[n]
    return ends


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, len(USES) - 1), st.integers(1, 4)), min_size=1, max_size=9))
def test_looking_at_crowded_links_only_gives_the_same_as_looking_at_all(messages):
    """Messages that are alike are one transfer, as those of a plan are, so that the same ones meet again."""
    alike = {
        (kind, work): message(
            5 * work, work, *map(itemgetter(0), USES[kind]), usage=tuple(map(itemgetter(1), USES[kind]))
        )
        for _, kind, work in messages
    }
    sent = [(float(time_s), f"d{number}", alike[kind, work]) for number, (time_s, kind, work) in enumerate(messages)]
    found = send_all(*sent)
    ends = [found[f"d{number}"][0][1] for number in range(len(messages))]
    assert ends == pytest.approx(all_at_once(messages), abs=1e-6)


def test_the_same_messages_meet_again_in_another_order():
    """The port carries 100 bytes/s, the line 20: each time b gets what the line leaves of the port."""
    near, far = message(100, 1.0, "port"), message(40, 2.0, "far", "port", usage=(1.0, 0.2))
    found = send_all((0.0, "b", near), (0.0, "c", far), (9.0, "c", far), (9.0, "b", near))
    for first_s, entry in zip((0.0, 9.0), found["b"], strict=True):
        assert entry[:2] == (first_s, pytest.approx(first_s + 1.25))
    for first_s, entry in zip((0.0, 9.0), found["c"], strict=True):
        assert entry[:2] == (first_s, pytest.approx(first_s + 2.0))


@pytest.mark.parametrize(("links", "usage"), [((), ()), (("a",), (0.0,)), (("a",), (1.5,)), (("a", "b"), (1.0,))])
def test_a_transfer_names_its_links(links, usage):
    with pytest.raises(ValueError, match="link"):
        message(1, 1.0, *links, usage=usage)
