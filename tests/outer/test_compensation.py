"""Pushes that are corrected for what parameters did since they began: by whom that is known, and how far."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.outer import commands as do
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.numerics import Tensors, compensate
from spantrain.outer.shard.shard import OuterShard
from spantrain_studies.outer.plain import MemorySnapshots, pseudo_gradient
from testing.outer.rounds import MadeUpRounds, random_tensors, without_clip

EXACT = Nesterov(learning_rate=1.0, momentum=0.0)


def made_up(strength: float, *, shards: int = 2) -> MadeUpRounds:
    chosen = replace(without_clip(), compensation=strength, part_steps=False)
    return MadeUpRounds(random_tensors(0), "ab", shards=shards, rule=EXACT, settings=chosen)


def push(made: MadeUpRounds, cluster: str, seed: int) -> None:
    made.push(cluster, random_tensors(seed, scale=0.1), tokens=10)
    made.end_window()


def one_is_late(strength: float, *, shards: int = 2) -> MadeUpRounds:
    """Cluster b pushes what began from version 1, after two others of a."""
    made = made_up(strength, shards=shards)
    for cluster, seed in (("a", 1), ("a", 2), ("b", 3)):
        push(made, cluster, seed)
    return made


def by_hand(strength: float) -> dict[str, torch.Tensor]:
    first, late = random_tensors(0), random_tensors(3, scale=0.1)
    now = {name: one - 0.1 * sum(random_tensors(seed)[name] for seed in (1, 2)) for name, one in first.items()}
    for name, gradient in late.items():
        correction = gradient * gradient * (now[name] - first[name])
        late[name] = gradient + strength * gradient.norm() / correction.norm() * correction
    return {name: one - late[name] for name, one in now.items()}


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_a_late_push_is_corrected_and_no_other(strength):
    made = one_is_late(strength)
    for name, one in by_hand(strength).items():
        torch.testing.assert_close(made.parameters[name], one, rtol=1e-5, atol=1e-6)


def test_shards_change_no_bit():
    one, other = one_is_late(0.3, shards=1), one_is_late(0.3, shards=3)
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)


def test_bases_are_held_as_long_as_somebody_may_push_from_them():
    made, seen = made_up(0.3), []
    inner = made._do

    def note(command):
        if isinstance(command, do.Commit) and command.shard == "s0":
            seen.append(command.bases)
        return inner(command)

    made._do = note
    for cluster, seed in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
        push(made, cluster, seed)
    assert seen == [(1,), (1, 2), (1, 3), (3, 4)]
    for shard in made.shards.values():
        assert shard._bases.keys() == {3, 4}
        assert shard.serving.version == 5
        assert shard.restorable == (5,), "nothing is restored from parameters alone"


def test_without_it_nothing_is_held():
    assert not any(shard._bases for shard in one_is_late(0.0).shards.values())


def test_a_shard_that_does_not_know_the_base_takes_the_push_as_it_is():
    stores = {f"s{k}": MemorySnapshots() for k in range(2)}
    chosen = replace(without_clip(), compensation=0.3, part_steps=False)
    made = MadeUpRounds(random_tensors(0), "ab", shards=2, rule=EXACT, settings=chosen, snapshots=stores)
    push(made, "a", 1)
    for name, shard in made.shards.items():
        stores[name].save(shard.serving)
    made.shards["s1"] = OuterShard("s1", made.layout, snapshots=stores["s1"], rule=EXACT)
    made.tell(made.shards["s1"].registered())
    before = made.parameters
    push(made, "b", 3)
    stepped = pseudo_gradient(before, made.parameters)
    for name, one in random_tensors(3, scale=0.1).items():
        layer = next(k for k, layer in enumerate(made.layout.layers) if name in [p.name for p in layer.parameters])
        known = made.layout.shard_of(layer) == "s0"
        assert torch.allclose(stepped[name], one, atol=1e-6) is not known


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(0, 99), st.floats(0.01, 1.0), st.floats(1e-4, 1e2))
def test_a_correction_is_as_large_as_it_was_asked_to_be(count, seed, strength, scale):
    chance = torch.Generator().manual_seed(seed)
    gradient, now, then = (scale * torch.randn(count, generator=chance) for _ in range(3))
    before = gradient.clone()
    compensate(gradient, now, then, strength=strength)
    torch.testing.assert_close((gradient - before).norm(), strength * before.norm(), rtol=1e-3, atol=1e-6 * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_left_as_it_is(bad):
    tensors: list[Tensors] = [{"w": torch.ones(3)} for _ in range(3)]
    gradient, now, then = (one["w"] for one in tensors)
    compensate(gradient, now, then, strength=0.5)
    assert gradient.tolist() == [1, 1, 1], "nothing came since"
    now[1] = bad
    compensate(gradient, now, then, strength=0.5)
    assert gradient.tolist() == [1, 1, 1]
