"""What the outer optimizer computes, against plain torch in one process; shards and arrival change no bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.numerics import sum_of_squares, weighted_mean
from spantrain_studies.outer.plain import nesterov, pseudo_gradient
from testing.outer.rounds import MadeUpRounds, Tensors, random_tensors, without_clip

TOKENS = {"a": 300, "b": 100, "c": 200}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(rounds: int, *, shards: int, order: str = "abc", scale: float = 0.1, **more) -> MadeUpRounds:
    """Rounds in which each cluster pushes what does not depend on the order."""
    made = MadeUpRounds(random_tensors(0), "abc", shards=shards, **more)
    for k in range(rounds):
        for cluster in order:
            made.push(cluster, random_tensors(100 * k + ord(cluster), scale=scale), tokens=TOKENS[cluster])
    return made


def plain(rounds: int, *, scale: float = 0.1, clip_norm: float | None = 1.0) -> Tensors:
    """The same in one process: torch's SGD on the mean by tokens, clipped by torch."""
    parameters = {name: torch.nn.Parameter(one) for name, one in random_tensors(0).items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.8, nesterov=True)
    for k in range(rounds):
        pushed = {cluster: random_tensors(100 * k + ord(cluster), scale=scale) for cluster in "abc"}
        for name, parameter in parameters.items():
            parameter.grad = sum(TOKENS[cluster] / 600 * pushed[cluster][name] for cluster in "abc")
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
        optimizer.step()
    return {name: one.detach() for name, one in parameters.items()}


@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("shards", [1, 3])
def test_rounds_of_all_clusters_are_synchronous_diloco(shards, scale):
    made = trained(4, shards=shards, scale=scale)
    wanted = plain(4, scale=scale)
    assert made.master.state.updates == 5
    for name, one in made.parameters.items():
        torch.testing.assert_close(one, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_change_no_bit(shards):
    assert same(trained(3, shards=shards).parameters, trained(3, shards=1).parameters)


@pytest.mark.parametrize("order", ["acb", "bca", "cba"])
def test_the_order_of_arrival_changes_no_bit(order):
    assert same(trained(3, shards=2, order=order).parameters, trained(3, shards=2).parameters)


def test_one_cluster_with_rate_1_and_no_momentum_trains_as_if_alone():
    made = MadeUpRounds(
        random_tensors(0), "a", shards=2, rule=Nesterov(learning_rate=1.0, momentum=0.0), settings=without_clip()
    )
    alone = random_tensors(0)
    for k in range(5):
        step = random_tensors(k + 1, scale=0.05)
        alone = {name: one - step[name] for name, one in alone.items()}
        here = {name: one - step[name] for name, one in made.start["a"].items()}
        made.push("a", pseudo_gradient(made.start["a"], here), tokens=10)
        for name, one in made.start["a"].items():
            torch.testing.assert_close(one, alone[name], rtol=1e-6, atol=1e-6)


def test_every_cluster_gets_the_version_that_it_took_part_in():
    made = trained(1, shards=2)
    assert set(made.base.values()) == {2}
    for start in made.start.values():
        assert same(start, made.parameters)


def test_who_does_not_push_keeps_what_it_has_and_is_not_waited_for():
    made = MadeUpRounds(random_tensors(0), "ab", shards=2)
    before = dict(made.start["b"])
    made.push("a", random_tensors(1, scale=0.1), tokens=10)
    assert made.base == {"a": 1, "b": 1}
    made.end_window()
    assert made.base == {"a": 2, "b": 1}
    assert same(made.start["b"], before)
    made.push("b", random_tensors(2, scale=0.1), tokens=10)
    made.end_window()
    assert made.base == {"a": 2, "b": 3}
    assert made.master.updates.last.staleness == {"b": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_left_out_on_every_shard(bad):
    """One number, on one shard; the others of the window make the same version as without it."""
    spoiled = random_tensors(7)
    spoiled["3.weight"][1, 1] = bad
    made, without = (MadeUpRounds(random_tensors(0), clusters, shards=3) for clusters in ("abc", "ab"))
    for cluster in "ab":
        for one in (made, without):
            one.push(cluster, random_tensors(ord(cluster), scale=0.1), tokens=TOKENS[cluster])
    made.push("c", spoiled, tokens=200)
    assert same(made.parameters, without.parameters)
    assert made.master.state.left_out == 1
    assert same(made.start["c"], made.parameters), "it begins again from what the others made"


def test_a_huge_push_is_left_out_after_the_warm_up():
    made = trained(4, shards=2)
    before = made.master.state.left_out
    made.push("a", random_tensors(1, scale=1e4), tokens=300)
    made.end_window()
    assert made.master.state.left_out == before + 1
    assert "over" in made.master.updates.last.verdicts[0].reason


def test_the_mean_never_steps_further_than_the_clip():
    made = MadeUpRounds(random_tensors(0), "a", shards=2, settings=OuterSettings(clip_norm=0.5))
    made.push("a", random_tensors(1, scale=100.0), tokens=1)
    step = pseudo_gradient(random_tensors(0), made.parameters)
    assert math.sqrt(sum_of_squares(list(step.values()))) == pytest.approx(0.7 * 1.8 * 0.5, rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.01, 2.0), st.sampled_from([0.0, 0.5, 0.9]))
def test_a_step_is_torchs(seed, rate, momentum):
    rule = Nesterov(learning_rate=rate, momentum=momentum)
    chance = torch.Generator().manual_seed(seed)
    parameter, velocity = torch.randn(7, generator=chance), torch.zeros(7)
    mine = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.SGD([mine], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for _ in range(4):
        mine.grad = torch.randn(7, generator=chance)
        parameter, velocity = nesterov(parameter, mine.grad, velocity, rule)
        optimizer.step()
        torch.testing.assert_close(parameter, mine.detach(), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5), st.sampled_from([0.0, 0.5, 0.8]))
def test_parts_of_a_step_come_to_the_whole(sizes, momentum):
    """Nothing more comes after it: the parameters end where one step, and the rest of its velocity, would take them."""
    rule = Nesterov(learning_rate=0.7, momentum=momentum)
    parts = [size / sum(sizes) for size in sizes]
    gradient, nothing = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    parameter, velocity = nothing, nothing
    for part in parts:
        parameter, velocity = nesterov(parameter, gradient, velocity, rule, part=part)
    for _ in range(120):
        parameter, velocity = nesterov(parameter, nothing, velocity, rule)
    torch.testing.assert_close(parameter, -0.7 * gradient / (1 - momentum))
    whole, decayed = nesterov(nothing, nothing, gradient, rule)[1], gradient
    for part in parts:
        decayed = nesterov(nothing, nothing, decayed, rule, part=part)[1]
    torch.testing.assert_close(decayed, whole)


def test_means_of_half_precision_are_made_in_single():
    tensors = [torch.full((2,), 1.0, dtype=torch.bfloat16), torch.full((2,), 1.0078125, dtype=torch.bfloat16)]
    mean = weighted_mean([(0.5, tensor) for tensor in tensors])
    assert mean.dtype == torch.float32
    assert mean.tolist() == [1.00390625] * 2


def test_rounds_of_unlike_models_are_refused_by_name():
    with pytest.raises(ValueError, match=r"differ in 0\.bias, x"):
        pseudo_gradient({"0.bias": torch.zeros(2)}, {"0.bias": torch.zeros(3), "x": torch.zeros(1)})
