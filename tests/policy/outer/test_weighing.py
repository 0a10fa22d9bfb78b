"""What pushes weigh: tokens alike at any speeds, and less for old ones where that is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer_events import Ticket
from spantrain.policy.outer.exchanges import Push
from spantrain.policy.outer.settings import OuterSettings
from spantrain.policy.outer.weighing import weigh


def push(cluster: str, tokens: int, *, base: int = 0, parameters: bool = False) -> Push:
    return Push(
        ticket=Ticket(1, 1), cluster=cluster, base_version=base, tokens=tokens, progress=(), parameters=parameters
    )


TOKENS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**12), min_size=1)


@given(TOKENS)
def test_all_together_are_one_step_and_its_parts_add_up_to_it(tokens):
    pushes = [push(name, count) for name, count in tokens.items()]
    assert weigh(pushes, version=0, last_tokens=tokens, settings=OuterSettings()).part == 1.0
    parts = [weigh([one], version=0, last_tokens=tokens, settings=OuterSettings()).part for one in pushes]
    assert sum(parts) == pytest.approx(1.0)
    assert all(
        part == pytest.approx(one.tokens / sum(tokens.values())) for part, one in zip(parts, pushes, strict=True)
    )


@given(TOKENS, st.sets(st.sampled_from("abcdefgh")))
def test_clusters_that_never_pushed_are_as_the_others_on_the_average(tokens, new):
    last = dict.fromkeys(new, 0) | tokens
    pushes = [push(name, count) for name, count in tokens.items()]
    part = weigh(pushes, version=0, last_tokens=last, settings=OuterSettings()).part
    assert part == pytest.approx(len(tokens) / len(last))


def test_a_cluster_that_went_after_its_push_was_accepted_is_of_the_round():
    part = weigh([push("gone", 300)], version=0, last_tokens={"a": 100}, settings=OuterSettings()).part
    assert part == 0.75


def test_first_parameters_are_a_whole_step():
    settings = OuterSettings()
    assert (
        weigh([push("a", 0, parameters=True)], version=0, last_tokens={"a": 0, "b": 0}, settings=settings).part == 1.0
    )


def test_old_pushes_weigh_less_where_that_is_asked_for():
    pushes = [push("a", 100, base=9), push("b", 100, base=6)]
    last = {"a": 100, "b": 100}
    assert weigh(pushes, version=9, last_tokens=last, settings=OuterSettings()).weights == {"a": 100, "b": 100}
    asked = weigh(pushes, version=9, last_tokens=last, settings=OuterSettings(staleness_power=0.5))
    assert asked.weights == {"a": 100.0, "b": 50.0}
    assert asked.part == 0.75
    alone = weigh(pushes[1:], version=9, last_tokens=last, settings=OuterSettings(staleness_power=0.5))
    assert alone.part == 0.25


@pytest.mark.parametrize("power", [-0.1, 11.0, float("nan")])
def test_a_power_that_is_none(power):
    with pytest.raises(ValueError, match="staleness_power must be from 0 to 10"):
        OuterSettings(staleness_power=power)
