"""Slices of the sequence between divided layers: the same outputs and gradients, with less held by each member."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units, unit_count
from spantrain.models.tensor_parallel.shard import notices, partial_parameters
from testing.models.divided_units import Work, assert_like_whole, assert_near, run_divided, whole_gradients
from testing.models.library_blocks import BLOCKS, TOKENS, WIDTH, make_block

pytestmark = pytest.mark.tensor_parallel

SLICED = ("gpt-neo", "gpt-neox", "llama", "opt", "qwen2", "qwen3", "t5", "t5 decoder", "vit")
"""Blocks of which all layers are known."""
LEFT_WHOLE = "its sequence is held whole by every member: not all of its blocks' layers are known"
SHARES = st.lists(st.integers(1, 9), min_size=2, max_size=3)
"""Of five tokens, some members may have none."""


def block_work(samples: int = 3, spans: Sequence[Span] = (Span(0, 2), Span(2, 3)), order: str = "FIW") -> Work:
    hidden, gradient = torch.randn(2, samples, TOKENS, WIDTH, generator=torch.Generator().manual_seed(samples))
    return Work(inputs=(hidden,), labels=None, output_gradients=(gradient,), spans=tuple(spans), order=order)


def text_work(spec: ModelSpec, order: str) -> Work:
    shape = (2, 4, spec.sequence_length or 0)
    tokens, labels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    return Work(inputs=(tokens,), labels=labels, spans=tuple(equal_spans(4, 3)), order=order, is_first=True)


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=4)
@given(shares=SHARES, order=st.sampled_from(["FB", "FIW"]), size=st.integers(1, 3))
def test_blocks_of_the_library_in_any_ratio(name: str, shares: list[int], order: str, size: int) -> None:
    work = block_work(spans=equal_spans(3, size), order=order)
    is_t5 = name.startswith("t5")
    members = assert_like_whole(lambda: [make_block(name)], work, shares, sums_in_weights=is_t5, sequence_parallel=True)
    scatters = any(operation.startswith("reduce_scatter") for operation in members[0].operations)
    assert scatters == (name in SLICED)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(shares=SHARES, order=st.sampled_from(["FB", "FIW"]), data=st.data())
def test_a_models_units_in_any_ratio(family: str, small_spec, shares, order, data) -> None:
    """Slices go from block to block, run again or not; what leaves the stage is whole."""
    spec = small_spec(family)
    recomputed = data.draw(st.sets(st.integers(0, unit_count(spec) - 1), max_size=3), "recomputed")
    work = replace(text_work(spec, order), recompute=tuple(sorted(recomputed)))
    assert_like_whole(lambda: build_units(spec, seed=3), work, shares, sequence_parallel=True)


def test_a_stage_of_blocks_gathers_once_at_its_end_and_once_at_its_beginning(small_spec) -> None:
    """Between two blocks, recomputed or not, nothing is gathered that a block does not read."""
    spec = small_spec("gpt2")
    hidden, gradient = torch.randn(2, 2, spec.sequence_length, 32, generator=torch.Generator().manual_seed(0))
    work = Work(inputs=(hidden,), labels=None, output_gradients=(gradient,), spans=(Span(0, 2),), order="FIW")
    blocks = range(1, unit_count(spec) - 1)
    for again, runs in ((), 2 * len(blocks)), ((1,), 2 * len(blocks) + 2):
        again_work = replace(work, recompute=again)
        build = lambda: build_units(spec, blocks, seed=3)  # noqa: E731
        (member, *_) = assert_like_whole(build, again_work, (3, 1), sequence_parallel=True)
        kinds = [operation.partition("[")[0] for operation in member.operations]
        # Forward a gathering and a sum for each divided part, backward each is the other; besides, the stage's ends.
        assert kinds.count("all_reduce") == 0
        assert kinds.count("reduce_scatter") == runs + 2 * len(blocks)
        assert kinds.count("all_gather") == runs + 2 * len(blocks) + 2


def test_a_member_without_tokens_has_its_part_of_the_layers() -> None:
    members = assert_like_whole(lambda: [make_block("llama")], block_work(), (50, 1), sequence_parallel=True)
    assert members[1].parts["model.layers.0.mlp.up_proj.weight"].shape == (1, WIDTH)


def test_what_works_on_slices_is_named_for_a_sum_at_the_end_of_a_step(small_spec) -> None:
    spec = small_spec("gpt2")
    members = run_divided(lambda: build_units(spec, seed=3), text_work(spec, "FB"), (2, 1), sequence_parallel=True)
    block = [f"transformer.h.0.{name}" for name in ("attn.c_proj", "mlp.c_proj", "ln_1", "ln_2")]
    found = partial_parameters(members[0].units)
    assert {name for name in found if ".h.0." in name} == {
        *(f"{name}.bias" for name in block),
        *(f"{name}.weight" for name in block[2:]),
    }
    assert not any("ln_f" in name or "wpe" in name for name in found)


def test_a_block_with_a_layer_of_which_nothing_is_known_keeps_the_sequence_whole_and_says_so() -> None:
    (member, *_) = run_divided(lambda: [make_block("mixtral")], block_work(), (2, 1), sequence_parallel=True)
    assert any(LEFT_WHOLE in text for text in notices(member.units))


def test_bfloat16_is_as_near_to_float32_as_one_process_in_bfloat16(small_spec) -> None:
    spec = small_spec("gpt2")
    work = text_work(spec, "FIW")
    exact = work.run(build_units(spec, seed=3))
    rounded = replace(work, dtype="bfloat16")
    alone = rounded.run(build_units(spec, seed=3))
    members = run_divided(lambda: build_units(spec, seed=3), rounded, (2, 1), sequence_parallel=True)
    together = whole_gradients(members)
    for name, gradient in exact.gradients.items():
        if float(gradient.norm()) >= 1e-6:
            off = float((alone.gradients[name] - gradient).norm() / gradient.norm())
            assert_near(together[name], gradient, name, tolerance=2 * off + 2**-8)
