"""What a pipeline's leader orders at the boundaries of steps."""

from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer.events import Ticket
from spantrain.core.outer.stages import StageOrder, StageReport
from spantrain.outer.policy.pushes import StageRounds

PULL = Ticket(1, 4)
NOTHING = StageOrder()


def after(rounds: StageRounds, steps: int, tokens: int = 10) -> StageRounds:
    for _ in range(steps):
        rounds.pushes.step(tokens)
    return rounds


def taken(number: int) -> dict[str, StageReport]:
    return {"d1": StageReport(taken=number), "d2": StageReport(taken=number)}


def test_a_round_ends_after_its_steps():
    rounds = StageRounds(["d1", "d2"], inner_steps=3)
    assert [after(rounds, 1).order(NOTHING, can_push=True).push for _ in range(3)] == [0, 0, 1]


def test_who_brings_the_first_parameters_waits_for_no_step():
    assert StageRounds(["d1"], inner_steps=3).order(NOTHING, can_push=True, wants_first=True).push == 1


def test_the_master_is_asked_when_all_have_copied():
    rounds = after(StageRounds(["d1", "d2"], inner_steps=1), 1)
    assert rounds.order(NOTHING, can_push=True).push == 1
    assert rounds.to_ask({"d1": StageReport(taken=1), "d2": StageReport(taken=0)}) is None
    assert rounds.to_ask(taken(1)) == 10
    assert rounds.to_ask(taken(1)) is None


def test_no_push_begins_before_the_last_was_asked_for():
    rounds = after(StageRounds(["d1"], inner_steps=1), 1)
    assert rounds.order(NOTHING, can_push=True).push == 1
    assert after(rounds, 1).order(NOTHING, can_push=True).push == 0
    assert rounds.to_ask({"d1": StageReport(taken=1)}) == 10
    assert after(rounds, 1).order(NOTHING, can_push=True).push == 2


def test_a_round_that_others_end_waits_for_a_push_that_all_are_copying_for():
    rounds = after(StageRounds(["d1"], inner_steps=64), 64)
    assert rounds.order(NOTHING, can_push=True).push == 1
    assert rounds.end_round(), "there are no steps since, but that push is still to be asked for"
    assert rounds.to_ask({"d1": StageReport(taken=1)}) == 640
    assert not rounds.end_round()


def test_without_others_it_is_asked_at_once():
    rounds = after(StageRounds([], inner_steps=1), 1)
    rounds.order(NOTHING, can_push=True)
    assert rounds.to_ask({}) == 10


def test_a_push_that_came_to_nothing_goes_into_the_next():
    rounds = after(StageRounds([], inner_steps=2), 2)
    rounds.order(NOTHING, can_push=True)
    assert rounds.to_ask({}) == 20
    assert rounds.some_left
    assert after(rounds, 1).order(StageOrder(skipped=True), can_push=True).push == 2
    assert rounds.to_ask({}) == 30


def test_a_version_that_counts_the_push_ends_the_round():
    rounds = after(StageRounds([], inner_steps=2), 2)
    rounds.order(NOTHING, can_push=True)
    rounds.to_ask({})
    order = rounds.order(StageOrder(pull=PULL, version=3, counted=True, floor=PULL), can_push=False)
    assert (order.pull, order.version, order.counted, order.floor) == (PULL, 3, True, PULL)
    assert not rounds.some_left


def test_nothing_begins_when_waiting_is_over():
    rounds = after(StageRounds([], inner_steps=1), 5)
    order = rounds.order(StageOrder(over=True), can_push=True, everything=True)
    assert (order.push, order.over) == (0, True)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=60))
def test_tokens_are_asked_for_once(turns):
    """Each token is in a push that counted, in one under way, or waits for the next."""
    rounds, trained, counted, under_way = StageRounds([], inner_steps=2), 0, 0, None
    for tokens, ends, comes_to_nothing in turns:
        rounds.pushes.step(tokens)
        trained += tokens
        skipped = ends and under_way is not None and comes_to_nothing
        settled = ends and under_way is not None and not comes_to_nothing
        counted += under_way if settled and under_way else 0
        if skipped or settled:
            under_way = None
        rounds.order(StageOrder(skipped=skipped, counted=settled), can_push=under_way is None)
        asked = rounds.to_ask({})
        under_way = asked if asked is not None else under_way
    rest = 0
    if under_way is not None:
        counted += under_way
        rounds.order(StageOrder(counted=True), can_push=False)
    if rounds.some_left:
        rounds.order(NOTHING, can_push=True, everything=True)
        rest = rounds.to_ask({}) or 0
    assert counted + rest == trained
