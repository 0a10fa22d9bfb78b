"""When a cluster pushes: its own steps, and rounds that others end."""

from hypothesis import given
from hypothesis import strategies as st

from spantrain.outer.policy.pushes import PushRounds


def after(rounds: PushRounds, steps: int) -> PushRounds:
    for _ in range(steps):
        rounds.step(1)
    return rounds


def ends_round(rounds: PushRounds) -> bool:
    rounds.begin_push()
    return rounds.ends_round


def test_a_whole_round_ends_that_of_others_and_a_part_of_one_does_not():
    assert ends_round(after(PushRounds(32), 32))
    assert not ends_round(after(PushRounds(32), 5))
    called = after(PushRounds(32), 5)
    assert called.end()
    assert not ends_round(after(called, 40)), "others were told already"


def test_a_push_that_came_to_nothing_is_made_again_and_ends_no_round():
    rounds = after(PushRounds(32), 32)
    rounds.begin_push()
    rounds.note(skipped=True)
    assert rounds.is_due()
    assert not ends_round(rounds)
    assert not rounds.is_due()


def test_too_few_steps_are_kept_for_later():
    rounds = after(PushRounds(64), 3)
    assert not rounds.end()
    assert not rounds.is_due()
    assert after(rounds, 1).end()
    assert rounds.is_due()


@given(st.integers(1, 40), st.lists(st.sampled_from(["step", "step", "step", "end", "nothing"]), max_size=200))
def test_no_round_is_longer_than_its_steps_and_none_that_others_end_much_shorter(inner_steps, turns):
    rounds, since, again = PushRounds(inner_steps), 0, False
    for turn in turns:
        if turn == "step":
            rounds.step(1)
            since += 1
        elif turn == "end":
            assert rounds.end() == rounds.is_due() or again or since >= inner_steps
        else:
            rounds.note(skipped=True)
            again = True
        assert rounds.is_due() or since < inner_steps
        if rounds.is_due():
            assert again or since >= max(1, inner_steps // 16)
            whole = ends_round(rounds)
            assert not whole or since >= inner_steps
            since, again = 0, False
