"""What pushes weigh: tokens alike at any speeds, and less for old ones where that is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer.events import Ticket
from spantrain.outer.policy.pushes import Push
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.policy.update import TokenRates, Weighing, weigh


def push(cluster: str, tokens: int, *, base: int = 0, parameters: bool = False) -> Push:
    return Push(
        ticket=Ticket(1, 1), cluster=cluster, base_version=base, tokens=tokens, progress=(), parameters=parameters
    )


TOKENS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**12), min_size=1)


def weighed(pushes: list[Push], last: dict[str, int], *, version: int = 0, **options) -> Weighing:
    tokens = {one.cluster: float(one.tokens) for one in pushes}
    return weigh(pushes, version=version, tokens=tokens, last_tokens=last, settings=OuterSettings(**options))


def part(pushes: list[Push], last: dict[str, int], **more) -> float:
    return weighed(pushes, last, **more).part([one.cluster for one in pushes])


@given(TOKENS)
def test_all_together_are_one_step_and_its_parts_add_up_to_it(tokens):
    pushes = [push(name, count) for name, count in tokens.items()]
    assert part(pushes, tokens) == 1.0
    parts = [part([one], tokens) for one in pushes]
    assert sum(parts) == pytest.approx(1.0)
    assert parts == pytest.approx([one.tokens / sum(tokens.values()) for one in pushes])


@given(TOKENS, st.sets(st.sampled_from("abcdefgh")))
def test_clusters_that_never_pushed_are_as_the_others_on_the_average(tokens, new):
    last = dict.fromkeys(new, 0) | tokens
    assert part([push(name, count) for name, count in tokens.items()], last) == pytest.approx(len(tokens) / len(last))


def test_a_cluster_that_went_after_its_push_was_accepted_is_of_the_round():
    assert part([push("gone", 300)], {"a": 100}) == 0.75


def test_first_parameters_are_a_whole_step():
    assert part([push("a", 0, parameters=True)], {"a": 0, "b": 0}) == 1.0


def test_old_pushes_weigh_less_where_that_is_asked_for():
    pushes = [push("a", 100, base=9), push("b", 100, base=6)]
    last = {"a": 100, "b": 100}
    assert weighed(pushes, last, version=9).weights == {"a": 100, "b": 100}
    assert weighed(pushes, last, version=9, staleness_power=0.5).weights == {"a": 100.0, "b": 50.0}
    assert part(pushes, last, version=9, staleness_power=0.5) == 0.75
    assert part(pushes[1:], last, version=9, staleness_power=0.5) == 0.25


def test_a_window_is_the_part_that_it_would_be_without_those_that_were_left_out():
    pushes = [push("a", 100), push("b", 10**9)]
    assert weighed(pushes, {"a": 100, "b": 100, "c": 300}).part(["a"]) == 0.25


@given(
    told=st.dictionaries(st.sampled_from("abc"), st.integers(100, 1000), min_size=2),
    rounds=st.lists(st.tuples(st.integers(1, 2**48), st.floats(1e-3, 1e3)), min_size=1, max_size=12),
)
def test_whatever_one_says_and_however_often_it_pushes_it_counts_for_ten_of_the_next_at_most(told, rounds):
    """Others push in 10 s each; the liar pushes alone, as often as it likes, and then with all."""
    rates, counted, took_s = TokenRates(), 0.0, 0.0
    rates.counted(told, dict.fromkeys(told, 10.0), {})
    last = {name: float(count) for name, count in told.items()} | {"liar": 0.0}
    for tokens, span_s in rounds:
        found, others = rates.counted({"liar": tokens}, {"liar": span_s}, last)
        counted, took_s = counted + found["liar"], took_s + span_s
        assert {name: others[name] for name in told} == told, "nobody else counts for less"
        last["liar"] = float(tokens)
    most = 10 * max(told.values()) / 10.0
    assert counted <= most * took_s * (1 + 1e-9)
    _, others = rates.counted(told, dict.fromkeys(told, 10.0), last)
    assert others["liar"] <= last["liar"]


def test_what_was_said_before_anybody_else_was_there_keeps_nobody_small():
    """A push of 10^14 tokens, by the only cluster; then another comes."""
    rates = TokenRates()
    assert rates.counted({"liar": 10**14}, {"liar": 10.0}, {})[0] == {"liar": 1e14}
    tokens, others = rates.counted({"a": 100}, {"a": 10.0}, {"liar": 1e14, "a": 0.0})
    assert (tokens["a"], others["liar"]) == (100.0, pytest.approx(1000.0))


@pytest.mark.parametrize("power", [-0.1, 11.0, float("nan")])
def test_a_power_that_is_none(power):
    with pytest.raises(ValueError, match="staleness_power must be from 0 to 10"):
        OuterSettings(staleness_power=power)
