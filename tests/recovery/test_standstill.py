"""Who is asked and given up when a step does not end, though all devices are heard."""

from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from spantrain.recovery.standstill import Standstill

NAMES = ("a", "b", "c", "d")


def stood(
    cut: set[frozenset[str]], until_s: float, *, limit_s: float = 6.0, silent: str = "", steps: float = inf
) -> tuple[Standstill, list[str]]:
    """Three steps of a second, then none; all answer each question at once. Returns what was told, too.

    `silent`: reaches all whom it dials; it answers first.
    """
    watch, told = Standstill(NAMES, 0.0, limit_s), list[str]()
    for step in range(3):
        assert not watch.asks(step + 0.9)
        watch.on_step(step + 1.0)
    now_s = 3.0
    while now_s < until_s:
        now_s += 0.1
        told += filter(None, [watch.said(now_s, 3, ("a", "b"), steps)])
        if watch.asks(now_s):
            for name in sorted(NAMES, key=lambda name: name != silent):
                others = [other for other in NAMES if frozenset((name, other)) in cut and name != silent]
                watch.on_answer(now_s, name, watch.round, others)
        if watch.lost(now_s):
            break
    return watch, told


def test_a_long_step_is_told_once_with_who_is_awaited_and_nobody_is_given_up():
    watch, told = stood(set(), 60.0)
    assert len(told) == 1
    assert told[0].startswith("Step 4 has taken 6.")
    assert "usually 1.0 s: it waits for a, b; all devices reach each other" in told[0]
    assert watch.lost(1e6) == {}


def test_behind_the_last_step_no_further_one_is_told_of():
    _, told = stood(set(), 60.0, steps=3)
    assert told[0].startswith("All 3 steps are done, and the end has taken 6.")
    assert "s: it waits for a, b; all devices reach each other" in told[0]


def test_a_device_that_no_other_reaches_is_told_of_and_given_up_after_the_limit():
    cut = {frozenset(("d", other)) for other in "abc"}
    watch, told = stood(cut, 20.0, limit_s=4.0)
    assert len(told) == 1
    assert "d and a, b, c wait for each other: nothing passes between them" in told[0]
    assert "after 4 s the run goes on without d" in told[0]
    assert watch.lost(3.0 + 3.0 + 4.0) == {}
    (reason,) = watch.lost(10.5).values()
    assert reason.startswith("nothing passes between it and a, b, c for 4.")


def test_it_is_enough_that_those_who_dial_it_do_not_reach_it():
    """As behind another address than it had: what it dials itself it reaches."""
    watch, told = stood({frozenset(("d", other)) for other in "abc"}, 20.0, silent="d")
    assert "after 6 s the run goes on without d" in told[0]
    assert [*watch.lost(20.0)] == ["d"]


def test_what_heals_in_time_is_forgotten():
    cut = {frozenset(("a", "b"))}
    watch, _ = stood(cut, 8.0)
    assert watch.lost(8.0) == {}
    assert not watch.asks(8.1)
    assert watch.asks(9.5)
    watch.on_answer(9.6, "a", watch.round - 1, ["b"])  # late
    for name in NAMES:
        watch.on_answer(9.6, name, watch.round, [])
    assert watch.lost(1e6) == {}


@given(st.sets(st.sampled_from([frozenset(pair) for pair in combinations(NAMES, 2)])))
def test_those_that_are_left_reach_each_other(cut):
    watch, _ = stood(cut, 30.0)
    left = set(NAMES) - set(watch.lost(30.0))
    assert left
    assert not any(pair <= left for pair in cut)
