"""The unit graph: identical units, bytes, operations."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from spantrain.errors import ConfigError
from spantrain.models import graph as measuring
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from testing.models.zoo.trial import FOLDER


def test_graph_agrees_with_the_units(spec):
    graph, units = build_graph(spec), build_units(spec, seed=0)
    assert [unit.name for unit in graph.units] == [unit.name for unit in units]
    for described, unit in zip(graph.units, units, strict=True):
        assert described.parameter_bytes == sum(4 * p.numel() for p in unit.parameters())
        assert described.shared == tuple(unit.shared)
    distinct = {id(p): 4 * p.numel() for unit in units for p in unit.parameters()}
    assert graph.parameter_bytes == sum(distinct.values())
    assert graph.units[-1].outputs == ()
    assert all(tensor.requires_grad for unit in graph.units[:-1] for tensor in unit.outputs)


def test_graph_of_gpt2_has_one_class_of_blocks_with_known_costs(small_spec):
    tokens, hidden = 16, 32
    blocks = build_graph(small_spec("gpt2")).units[1:-1]
    assert len({block.unit_class for block in blocks}) == 1
    # 12 weights of hidden x hidden, and two products of tokens x tokens x hidden, two operations each.
    expected = 2 * tokens * 12 * hidden**2 + 2 * 2 * tokens**2 * hidden
    assert blocks[0].forward_flop_per_sample == expected
    assert blocks[0].cut_bytes_per_sample == blocks[0].gradient_bytes_per_sample == tokens * hidden * 4
    # Between the cut tensors alone and everything a block could hold, its 16 vectors a token and its attention.
    size = tokens * hidden * 4
    assert 10 * size < blocks[0].activation_bytes_per_sample < 30 * size


def test_graph_unit_classes_tell_unequal_units_apart(small_spec):
    classes = [unit.unit_class for unit in build_graph(small_spec("resnet")).units]
    assert len(set(classes)) == len(classes)  # two blocks a stage: the first one changes the shape
    other = build_graph(resolve_model("resnet-tiny")).units
    assert len({unit.unit_class for unit in other[1:-1]}) == 6


def test_graph_under_autocast_halves_what_convolutions_send(small_spec):
    full, half = (build_graph(small_spec("resnet"), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.units[0].outputs[0].dtype == "bfloat16"
    assert half.units[0].cut_bytes_per_sample * 2 == full.units[0].cut_bytes_per_sample
    assert half.units[1].activation_bytes_per_sample < full.units[1].activation_bytes_per_sample
    assert half.parameter_bytes == full.parameter_bytes


@pytest.mark.parametrize("family", ["gpt2", "bert", "resnet"])
def test_float16_holds_and_sends_what_bfloat16_does(small_spec, family, monkeypatch):
    spec = small_spec(family)
    found = build_graph(spec, dtype="float16")
    monkeypatch.setattr("spantrain.models.graph._in_float16", Mock(side_effect=ConfigError("it runs in float16 alone")))
    measured = build_graph(spec, dtype="float16")
    classes = [unit.unit_class for unit in measured.units]
    assert [replace(unit, unit_class=name) for unit, name in zip(found.units, classes, strict=True)] == [
        *measured.units
    ]


def test_graph_of_a_spec_that_was_in_a_file_is_the_same(small_spec):
    spec = small_spec("resnet")
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in spec.config.items()}
    assert build_graph(spec) == build_graph(type(spec)(**{**vars(spec), "config": listed}))


def test_graph_refuses_an_unknown_dtype(small_spec):
    with pytest.raises(ValueError, match="float32, bfloat16, float16 or bfloat16-weights, got 'float8'"):
        build_graph(small_spec("gpt2"), dtype="float8")


def test_a_model_that_does_not_run_in_16_bits_is_told_of():
    spec = resolve_model(f"{FOLDER / 'plain'}.py:mixture")
    with pytest.raises(
        ConfigError, match=r"does not run in bfloat16 \(give --dtype float32, float16, bfloat16-weights\): RuntimeError"
    ):
        build_graph(spec, dtype="bfloat16")


def test_graph_covers_every_unit(spec):
    assert len(build_graph(spec).units) == unit_count(spec)


def measured_without_numbers(spec, dtype, monkeypatch):
    """The graph of a model all of whose units are taken for large, and which of them were run without numbers."""
    without = []

    def see(unit, *given):
        found = seen(unit, *given)
        without.extend([] if found is None else [unit.name])
        return found

    seen = measuring._see_without_numbers
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "_LONG_FLOP", 0.0)
        patched.setattr(measuring, "_see_without_numbers", see)
        return build_graph(spec, dtype=dtype), without


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("decoders.llama", "float32"),
        ("decoders.mamba2", "float32"),
        ("decoders.mixtral", "float32"),
        ("decoders.mixtral", "bfloat16"),
        ("encoders.bert_masked", "float32"),
        ("convolutions.diffusion_unet", "float32"),
        ("pairs.whisper", "float32"),
        ("plain.dropout", "float32"),
    ],
)
def test_large_units_cost_the_same_without_numbers(name, dtype, monkeypatch):
    family, _, function = name.partition(".")
    spec = resolve_model(f"{FOLDER / family}.py:{function}")
    graph, without = measured_without_numbers(spec, dtype, monkeypatch)
    wanted = build_graph(spec, dtype=dtype)
    assert [one for one in wanted.units if one.forward_flop_per_sample] == [
        one for one in graph.units if one.forward_flop_per_sample
    ]
    products = {one.unit_class: one.name for one in reversed(wanted.units[:-1]) if one.forward_flop_per_sample}
    assert {*products.values()} <= {*without}


@pytest.mark.parametrize("name", ["plain.lstm", "plain.branches_on_data"])
def test_what_differs_without_numbers_or_needs_them_is_measured_with_them(name, monkeypatch):
    family, _, function = name.partition(".")
    spec = resolve_model(f"{FOLDER / family}.py:{function}")
    assert measured_without_numbers(spec, "float32", monkeypatch)[0] == build_graph(spec)
