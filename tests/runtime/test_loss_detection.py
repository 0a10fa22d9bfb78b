"""Who is taken for lost, when, and on what evidence; who is only slow is not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.recovery.detection import LossDetector

BEAT_S = 0.3
TICK_S = 0.1
"""How often a coordinator asks."""
CALM = st.lists(st.floats(0.0, 0.03), min_size=20, max_size=60)
"""By how much each heartbeat is late."""


class World:
    """Devices that beat until they end, and a coordinator that asks; who is lost when, and why."""

    def __init__(self, limit_s: float | None = None, **beats: list[float]) -> None:
        self.detector = LossDetector(limit_s)
        self.beats = sorted((at, name) for name, times in beats.items() for at in times)
        self.lost: dict[str, tuple[float, str]] = {}
        self.now_s = 0.0

    def until(self, end_s: float) -> "World":
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + TICK_S)
            while self.beats and self.beats[0][0] <= self.now_s:
                at, name = self.beats.pop(0)
                self.detector.on_heartbeat(at, name, round_trip_s=0.002)
            for name, reason in self.detector.lost(self.now_s):
                self.lost.setdefault(name, (self.now_s, reason))
        return self


def beats(late: list[float], *, standstill: tuple[int, float] = (0, 0.0)) -> list[float]:
    """Return when a device is heard that stands still once, before its beat of this number."""
    number, still_s = standstill
    return [BEAT_S * n + one + (still_s if n >= number else 0.0) for n, one in enumerate(late)]


@given(CALM, CALM, st.integers(15, 60))
def test_one_that_stands_still_for_a_second_is_not_lost(one, other, number):
    times = beats(one, standstill=(number, 1.0))
    assert World(a=times, b=beats([0.0] * 80)).until(times[-1]).lost == {}
    assert World(a=times).until(times[-1]).lost == {}


@given(CALM)
def test_one_that_falls_silent_is_lost_within_two_seconds_if_another_is_heard(late):
    a = beats(late)
    lost = World(a=a, b=beats([0.0] * 100)).until(a[-1] + 2.2).lost
    assert set(lost) == {"a"}
    at, reason = lost["a"]
    assert 1.5 < at - a[-1] <= 2.0 + TICK_S + 0.001
    assert reason.startswith("no heartbeat for ")
    assert ", usual 0.3" in reason


@given(CALM, st.floats(0.0, 5.9))
def test_when_nobody_is_heard_only_the_longest_silence_counts(late, outage_s):
    both = beats(late)
    world = World(a=both, b=[at + 0.05 for at in both]).until(both[-1] + outage_s)
    assert world.lost == {}
    assert set(world.until(both[-1] + 6.3).lost) == {"a", "b"}


@given(st.lists(st.floats(0.3, 2.5), min_size=12, max_size=40))
def test_one_whose_heartbeats_are_slow_by_habit_is_given_time_by_that(gaps):
    """Such as on a crowded machine: what was usual until then is no loss now."""
    times = [sum(gaps[:n]) for n in range(len(gaps))]
    for number in range(1, len(times)):
        usual = sorted(gaps[:number])[: max(1, number - 2)]
        world = World(a=times[:number], b=[0.3 * n for n in range(400)]).until(times[number - 1] + max(usual))
        assert "a" not in world.lost


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("abc"))), st.floats(0, 200))
def test_a_limit_that_was_given_is_the_limit(given_beats, now_s):
    detector = LossDetector(5.0)
    for at, name in given_beats:
        detector.on_heartbeat(at, name)
    last = {name: max(at for at, who in given_beats if who == name) for _, name in given_beats}
    assert {name for name, _ in detector.lost(now_s)} == {name for name, at in last.items() if now_s - at > 5.0}


@given(CALM, st.floats(0.0, 0.25))
def test_one_whose_connection_closes_and_that_is_not_heard_is_lost_in_half_a_second(late, after_s):
    a = beats(late)
    world = World(a=a, b=beats([0.0] * 100)).until(a[-1])
    world.detector.on_open("a", 1)
    world.until(a[-1] + after_s)
    world.detector.on_close(world.now_s, "a", 1)
    closed_s = world.now_s
    at, reason = world.until(closed_s + 0.6).lost["a"]
    assert at - closed_s <= 0.5
    assert reason.startswith("its connection closed, and no heartbeat came for 0.")


@given(CALM, st.integers(12, 60), st.floats(0.0, 0.29))
def test_one_that_is_heard_on_another_connection_is_not_lost(late, number, after_s):
    a = beats(late)
    number = min(number, len(a) - 5)
    world = World(a=a, b=beats([0.0] * 100))
    world.detector.on_heartbeat(0.0, "a")
    world.detector.on_open("a", 1)
    world.until(a[number] + after_s)
    world.detector.on_close(world.now_s, "a", 1)
    assert world.until(a[-1]).lost == {}


def test_one_that_makes_a_new_connection_is_not_lost():
    world = World(a=beats([0.0] * 20)).until(5.7)
    world.detector.on_open("a", 1)
    world.detector.on_open("a", 2)
    world.detector.on_close(5.8, "a", 1)
    assert world.until(6.2).lost == {}
    world.detector.on_close(6.2, "a", 2)
    world.detector.on_close(6.2, "a", 2)
    world.detector.on_open("a", 3)
    assert world.until(7.4).lost == {}


def test_a_heartbeat_that_was_under_way_says_nothing_of_who_has_gone():
    for late_s in (0.01, 0.2):
        world = World(a=[*beats([0.0] * 20), 6.0 + late_s]).until(5.8)
        world.detector.on_open("a", 1)
        world.until(6.0)
        world.detector.on_close(6.0, "a", 1)
        assert set(world.until(6.5 + 2 * late_s).lost) == {"a"}


def test_a_connection_that_closes_behind_a_silence_says_no_more_than_the_silence():
    """So ends one that gRPC gives up, whose machine may be cut off; the limit that was given still holds."""
    world = World(60.0, a=beats([0.0] * 20)).until(5.7)
    world.detector.on_open("a", 1)
    world.until(26.0)
    world.detector.on_close(26.0, "a", 1)
    assert world.until(60.0).lost == {}
    assert world.until(66.0).lost["a"][1] == "no heartbeat for 60.1 s, limit 60.0 s"


def test_a_connection_of_one_that_has_left_says_nothing_of_who_came_after_it():
    detector = LossDetector()
    detector.on_heartbeat(0.0, "a")
    detector.on_open("a", 1)
    detector.forget("a")
    detector.forget("a")
    detector.on_heartbeat(1.0, "a")
    detector.on_close(1.1, "a", 1)
    detector.on_close(1.1, "nobody", 1)
    assert detector.lost(3.0) == ()


def test_whoever_was_not_running_cannot_have_heard_anybody():
    world = World(a=beats([0.0] * 20), b=beats([0.0] * 400)).until(5.7)
    detector = world.detector
    assert detector.lost(100.0) == (), "it has slept"
    detector.on_heartbeat(101.0, "a")
    assert detector.lost(100.9) == detector.lost(101.5) == detector.lost(101.9) == ()
    assert detector.silence_s(102.4, "a") == pytest.approx(1.4)
    assert [name for name, _ in detector.lost(102.1)] == ["b"]


def test_the_longest_silent_comes_first_until_forgotten():
    detector = LossDetector(2.0)
    detector.on_heartbeat(0.0, "edge-1")
    detector.on_heartbeat(1.0, "edge-2")
    assert detector.lost(10.0) == (
        ("edge-1", "no heartbeat for 10.0 s, limit 2.0 s"),
        ("edge-2", "no heartbeat for 9.0 s, limit 2.0 s"),
    )
    detector.forget("edge-1")
    assert [name for name, _ in detector.lost(10.5)] == ["edge-2"]


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_what_a_device_says_of_round_trips_buys_it_six_seconds_at_most(nonsense):
    detector = LossDetector()
    for beat in range(20):
        detector.on_heartbeat(0.3 * beat, "a", nonsense)
    detector.on_open("a", 1)
    detector.on_close(5.8, "a", 1)
    assert [name for name, _ in detector.lost(5.8 + 5.6)] == ["a"]
