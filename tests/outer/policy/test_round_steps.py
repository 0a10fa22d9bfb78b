"""When a cluster pushes: its own steps, and rounds that others end."""

from hypothesis import given
from hypothesis import strategies as st

from spantrain.outer.policy.pushes import RoundSteps


def after(rounds: RoundSteps, steps: int) -> RoundSteps:
    for _ in range(steps):
        rounds.step()
    return rounds


def test_a_whole_round_ends_that_of_others_and_a_part_of_one_does_not():
    assert after(RoundSteps(32), 32).begin_push()
    assert not after(RoundSteps(32), 5).begin_push()
    called = after(RoundSteps(32), 5)
    assert called.end()
    assert not after(called, 40).begin_push(), "others were told already"


def test_a_push_that_came_to_nothing_is_made_again_and_ends_no_round():
    rounds = after(RoundSteps(32), 32)
    rounds.begin_push()
    rounds.come_to_nothing()
    assert rounds.is_over
    assert not rounds.begin_push()
    assert not rounds.is_over


def test_too_few_steps_are_kept_for_later():
    rounds = after(RoundSteps(64), 3)
    assert not rounds.end()
    assert not rounds.is_over
    assert after(rounds, 1).end()
    assert rounds.is_over


@given(st.integers(1, 40), st.lists(st.sampled_from(["step", "step", "step", "end", "nothing"]), max_size=200))
def test_no_round_is_longer_than_its_steps_and_none_that_others_end_much_shorter(inner_steps, turns):
    rounds, since, again = RoundSteps(inner_steps), 0, False
    for turn in turns:
        if turn == "step":
            rounds.step()
            since += 1
        elif turn == "end":
            assert rounds.end() == rounds.is_over or again or since >= inner_steps
        else:
            rounds.come_to_nothing()
            again = True
        assert rounds.is_over or since < inner_steps
        if rounds.is_over:
            assert again or since >= max(1, inner_steps // 16)
            whole = rounds.begin_push()
            assert not whole or since >= inner_steps
            since, again = 0, False
