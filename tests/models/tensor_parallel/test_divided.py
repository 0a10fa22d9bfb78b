"""Divided units give what whole ones give: outputs, gradients of inputs and of every parameter, in any ratio."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units, unit_count
from spantrain.models.tensor_parallel.shard import notices, partial_parameters, shard_units, sums_of
from spantrain.models.units import ModuleUnit, UnitModule, shared_parameters
from testing.models.divided_units import Work, assert_like_whole, assert_near, run_divided, whole_gradients
from testing.models.library_blocks import BLOCKS, TOKENS, WIDTH, make_block
from testing.models.thread_group import ThreadGroup, run_members

pytestmark = pytest.mark.tensor_parallel

SHARES = st.lists(st.integers(1, 5), min_size=2, max_size=4)
ORDERS = st.sampled_from(["FB", "FIW"])
FAMILIES = ("gpt2", "bert", "resnet", "efficientnet")


def samples_of(spec: ModelSpec, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a model; some labels are not counted."""
    generator = torch.Generator().manual_seed(count)
    if spec.sequence_length is None:
        return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    tokens, labels = torch.randint(0, 256, (2, count, spec.sequence_length), generator=generator)
    return tokens, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)


def whole_model(spec: ModelSpec, order: str = "FB", spans: Sequence[Span] = (Span(0, 3), Span(3, 5))) -> Work:
    inputs, labels = samples_of(spec, spans[-1].hi)
    return Work(inputs=(inputs,), labels=labels, spans=tuple(spans), order=order, is_first=True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(shares=SHARES, order=ORDERS, size=st.integers(1, 4), first=st.integers(0, 2), data=st.data())
def test_any_run_of_a_models_units_in_any_ratio(family, small_spec, shares, order, size, first, data) -> None:
    spec = small_spec(family)
    end = unit_count(spec)
    work = whole_model(spec, order, equal_spans(5, size))
    if first:
        with torch.no_grad():
            for unit in build_units(spec, range(first), seed=3):
                work = replace(work, inputs=unit(*work.inputs), is_first=False)
    if recomputed := data.draw(st.sets(st.integers(0, end - first - 1), max_size=2), "recomputed"):
        work = replace(work, recompute=tuple(sorted(recomputed)))
    assert_like_whole(lambda: build_units(spec, range(first, end), seed=3), work, shares)


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=4)
@given(shares=SHARES, order=ORDERS, size=st.integers(1, 4))
def test_blocks_of_the_library_in_any_ratio(name, shares, order, size) -> None:
    hidden, gradient = torch.randn(2, 4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(size))
    spans = tuple(equal_spans(4, size))
    work = Work(inputs=(hidden,), labels=None, output_gradients=(gradient,), spans=spans, order=order)
    assert_like_whole(lambda: [make_block(name)], work, shares, sums_in_weights=name.startswith("t5"))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_evaluate_as_they_train(name: str) -> None:
    hidden = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    (wanted,) = make_block(name)(hidden)
    waiting = [make_block(name) for _ in range(2)]

    def member(group: ThreadGroup) -> torch.Tensor:
        unit = waiting[group.rank]
        shard_units([unit], (2, 1), group.rank, group)
        with torch.no_grad():
            return unit(hidden)[0]

    for found in run_members(2, member):
        assert_near(found, wanted, name)


@pytest.mark.parametrize(
    ("name", "sums"), [("gpt-neo", 2), ("gpt-neox", 2), ("llama", 2), ("qwen3", 2), ("vit", 2), ("sequential", 1)]
)
def test_sums_are_those_that_the_cost_model_counts(name: str, sums: int) -> None:
    hidden = torch.randn(2, TOKENS, WIDTH)
    work = Work(inputs=(hidden,), labels=None, output_gradients=(torch.ones_like(hidden),), spans=(Span(0, 2),))
    operations = run_divided(lambda: [make_block(name)], work, (2, 1))[0].operations
    assert sums_of(make_block(name)) == sums
    assert operations == 2 * sums * [f"all_reduce{list(hidden.shape)}"] + ["W"]


@pytest.mark.parametrize(
    ("family", "first", "block", "last"),
    [("gpt2", 1, 2, 1), ("bert", 1, 2, 1), ("resnet", 0, 1, 1), ("efficientnet", 0, 1, 1)],
)
def test_sums_of_the_catalogues_units(family: str, first: int, block: int, last: int, small_spec) -> None:
    found = [sums_of(unit) for unit in build_units(small_spec(family), seed=0)]
    assert found == [first, *(len(found) - 2) * [block], last]


def test_heads_and_columns_go_by_the_shares(small_spec) -> None:
    spec = small_spec("gpt2")
    members = run_divided(lambda: build_units(spec, seed=3), whole_model(spec), (3, 1))
    shapes = [{name: part.shape for name, part in member.parts.items()} for member in members]
    assert [shape["transformer.h.0.attn.c_attn.weight"] for shape in shapes] == [(32, 72), (32, 24)]
    assert [shape["transformer.h.0.attn.c_proj.weight"] for shape in shapes] == [(24, 32), (8, 32)]
    assert [shape["transformer.h.0.mlp.c_fc.bias"] for shape in shapes] == [(96,), (32,)]
    assert [shape["transformer.wte.weight"] for shape in shapes] == [(192, 32), (64, 32)]
    assert [shape["transformer.h.0.ln_1.weight"] for shape in shapes] == [(32,), (32,)]
    assert members[1].parts["transformer.h.0.attn.c_attn.weight"].ranges == (Span(24, 32), Span(56, 64), Span(88, 96))


def test_groups_of_queries_follow_their_key_and_value_head() -> None:
    hidden = torch.randn(2, TOKENS, WIDTH)
    work = Work(inputs=(hidden,), labels=None, output_gradients=(torch.ones_like(hidden),), spans=(Span(0, 2),))
    members = run_divided(lambda: [make_block("llama")], work, (1, 2))
    rows = [member.parts["model.layers.0.self_attn.q_proj.weight"].ranges for member in members]
    assert rows == [(Span(0, 16),), (Span(16, 48),)]
    rows = [member.parts["model.layers.0.self_attn.k_proj.weight"].ranges for member in members]
    assert rows == [(Span(0, 8),), (Span(8, 24),)]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_tied_parameters_stay_one_in_every_member(family: str, small_spec) -> None:
    spec = small_spec(family)
    members = run_divided(lambda: build_units(spec, seed=3), whole_model(spec), (2, 1))
    for member in members:
        for places in shared_parameters(member.units).values():
            assert len({id(member.units[position].get_parameter(local)) for position, local in places}) == 1


def test_what_has_no_rule_is_said_and_computed_whole() -> None:
    hidden = torch.randn(2, TOKENS, WIDTH)
    work = Work(inputs=(hidden,), labels=None, output_gradients=(torch.ones_like(hidden),), spans=(Span(0, 2),))
    (member, *_) = run_divided(lambda: [make_block("phi3")], work, (2, 1))
    assert notices(member.units) == (
        "model.layers.0: computed whole by every member, for want of a rule: self_attn.o_proj, self_attn.qkv_proj",
    )
    assert member.parts["model.layers.0.self_attn.qkv_proj.weight"].is_whole


def test_more_members_than_heads_leave_attention_whole() -> None:
    hidden = torch.randn(2, TOKENS, WIDTH)
    work = Work(inputs=(hidden,), labels=None, output_gradients=(torch.ones_like(hidden),), spans=(Span(0, 2),))
    members = assert_like_whole(lambda: [make_block("llama")], work, (1, 1, 1, 1))
    assert "self_attn has 3 pieces, fewer than the 4 members" in notices(members[0].units)[0]


def test_an_embedding_tied_to_a_layer_without_a_rule_stays_whole() -> None:
    hidden = torch.randint(0, 12, (2, TOKENS))
    work = Work(
        inputs=(hidden,), labels=None, output_gradients=(torch.ones(2, TOKENS, 12),), spans=(Span(0, 2),), is_first=True
    )
    members = assert_like_whole(_tied_to_a_product, work, (1, 1))
    assert members[0].parts["model.wte.weight"].is_whole
    assert "wte shares a parameter with something that is not divided alike" in notices(members[0].units)[0]


def _tied_to_a_product() -> list[UnitModule]:
    class Product(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ self.weight.t()

    class Unit(UnitModule):
        def __init__(self) -> None:
            super().__init__("model", prefixes={"wte": "model.wte", "product": "model.product"})
            self.wte = torch.nn.Embedding(12, 4)
            torch.nn.init.normal_(self.wte.weight, generator=torch.Generator().manual_seed(0))
            self.product = Product(self.wte.weight)
            self.reads = (0,)
            self.eval()

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.product(self.wte(tokens)),)

    return [Unit()]


def _reading(unit: UnitModule) -> UnitModule:
    unit.reads = (0,)
    return unit


def test_an_embedding_whose_weight_a_module_takes_into_its_own_hands_stays_whole() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(12, 4)
            torch.nn.init.normal_(self.wte.weight, generator=torch.Generator().manual_seed(0))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.wte(tokens) @ self.wte.weight.t()

    tokens = torch.randint(0, 12, (2, TOKENS))
    gradient = torch.ones(2, TOKENS, 12)
    work = Work(inputs=(tokens,), labels=None, output_gradients=(gradient,), spans=(Span(0, 2),), is_first=True)
    members = assert_like_whole(lambda: [_reading(ModuleUnit("model", Model()))], work, (1, 1))
    assert members[0].parts["model.wte.weight"].is_whole


def test_parameters_on_own_heads_are_named_for_a_sum_at_the_end_of_a_step() -> None:
    hidden = torch.randn(2, TOKENS, WIDTH)
    work = Work(inputs=(hidden,), labels=None, output_gradients=(torch.ones_like(hidden),), spans=(Span(0, 2),))
    (member, *_) = run_divided(lambda: [make_block("qwen3")], work, (2, 1))
    assert partial_parameters(member.units) == (
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
    )


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_bfloat16_is_as_near_to_float32_as_one_process_in_bfloat16(family: str, small_spec) -> None:
    spec = small_spec(family)
    work = whole_model(spec, "FIW")
    exact = work.run(build_units(spec, seed=3))
    rounded = replace(work, dtype="bfloat16")
    alone = rounded.run(build_units(spec, seed=3))
    members = run_divided(lambda: build_units(spec, seed=3), rounded, (2, 1))
    together = whole_gradients(members)
    for name, gradient in exact.gradients.items():
        if float(gradient.norm()) < 1e-6:
            continue
        off = float((alone.gradients[name] - gradient).norm() / gradient.norm())
        assert_near(together[name], gradient, name, tolerance=2 * off + 2**-8)
    assert members[0].seen.outputs[0].dtype == torch.float32
