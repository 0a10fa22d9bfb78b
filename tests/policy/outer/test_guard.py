"""Whose norms are left out: never what is not finite, never for ever, the same in any order."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.config.artefacts import from_json
from spantrain.config.json_codec import to_json
from spantrain.policy.outer.guard import GuardSettings, GuardState, Verdict, judge

NORMS = st.floats(0, 1e30) | st.sampled_from([math.nan, math.inf])
WINDOWS = st.lists(st.dictionaries(st.sampled_from("abcd"), NORMS, min_size=1), max_size=15)


def judged(windows, state: GuardState | None = None) -> tuple[GuardState, list[Verdict]]:
    state, verdicts = state or GuardState(), []
    for norms in windows:
        state, more = judge(state, norms)
        verdicts += more
    return state, verdicts


def calm(count: int, *, mean: float = 1.0, spread: float = 0.1, seed: int = 0) -> list[dict[str, float]]:
    chance = random.Random(seed)
    return [{"a": mean * (1 + spread * chance.uniform(-1, 1))} for _ in range(count)]


@given(WINDOWS)
def test_what_is_not_finite_is_left_out_and_the_state_stays_finite(windows):
    state, verdicts = judged(windows)
    assert all(math.isfinite(verdict.norm) for verdict in verdicts if verdict.accepted)
    assert all(verdict.reason for verdict in verdicts)
    assert from_json(GuardState, to_json(state), "a guard") == state


@given(WINDOWS)
def test_the_order_in_a_window_does_not_matter(windows):
    turned = [dict(reversed(norms.items())) for norms in windows]
    assert judged(windows)[0] == judged(turned)[0]


@given(WINDOWS, st.integers(0, 15))
def test_a_saved_state_goes_on_as_if_nothing_had_been(windows, at):
    first, _ = judged(windows[:at])
    again = from_json(GuardState, to_json(first), "a guard")
    assert judged(windows[at:], again)[0] == judged(windows)[0]


def test_after_the_warm_up_a_wild_norm_is_left_out_and_what_is_known_stays():
    state, _ = judged(calm(50))
    after, (verdict,) = judge(state, {"b": 50.0})
    assert not verdict.accepted
    assert "over" in verdict.reason
    assert (after.mean, after.deviation, after.largest_score) == (state.mean, state.deviation, state.largest_score)
    assert judge(after, {"a": 1.05})[1][0].accepted


def test_the_papers_recurrences_hold_after_the_warm_up():
    state, _ = judged(calm(8))
    after, _ = judge(state, {"a": 1.07})
    mean = 0.02 * 1.07 + 0.98 * state.mean
    assert after.mean == pytest.approx(mean)
    assert after.deviation == pytest.approx(math.sqrt(0.98 * state.deviation**2 + 0.02 * (1.07 - mean) ** 2))


def test_a_limit_is_three_times_the_largest_accepted_score():
    state = GuardState(mean=1.0, deviation=0.1, largest_score=2.0)
    assert judge(state, {"a": 1.59})[1][0].accepted
    assert not judge(state, {"a": 1.61})[1][0].accepted


def test_no_deviation_at_all_leaves_nothing_out_for_a_small_step():
    state, _ = judged([{"a": 1.0}] * 20)
    assert state.deviation < 1e-12
    assert judge(state, {"a": 1.02})[1][0].accepted
    assert not judge(state, {"a": 2.0})[1][0].accepted


def test_norms_of_nothing_but_zeros_can_be_followed_by_anything():
    state, _ = judged([{"a": 0.0}] * 20)
    assert judge(state, {"a": 1.0})[1][0].accepted


def test_one_wild_norm_in_the_warm_up_does_not_spoil_it():
    state, verdicts = judged([{"a": 1000.0}, *calm(20)])
    assert verdicts[0].accepted
    assert state.mean == pytest.approx(1.0, rel=0.1)
    assert not judge(state, {"b": 100.0})[1][0].accepted


def test_a_level_that_moved_for_everybody_is_accepted_again():
    state, _ = judged(calm(50))
    _, verdicts = judged(calm(30, mean=100.0), state)
    accepted = [verdict.accepted for verdict in verdicts]
    assert accepted == [False] * 8 + [True] * 22


def test_one_bad_cluster_among_others_stays_out():
    windows = [norms | {"b": 100.0} for norms in calm(200)]
    _, verdicts = judged(windows[8:], judged(calm(8))[0])
    assert not any(verdict.accepted for verdict in verdicts if verdict.cluster == "b")
    assert all(verdict.accepted for verdict in verdicts if verdict.cluster == "a")


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="smoothing must be between 0 and 1, got 1"):
        GuardSettings(smoothing=1.0)
    with pytest.raises(ValueError, match="warm_up must be at least 2"):
        GuardSettings(warm_up=1)
