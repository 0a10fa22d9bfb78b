"""Layers depend on names alone: not on order, wrappers, or who cut the model how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer.layers import ParameterSpec, block_of, group_layers, named_layers, plain_name
from spantrain.errors import UsageError

PARTS = st.sampled_from(["h", "0", "2", "10", "attn", "weight", "bias", "module", "wte"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SPECS = st.lists(
    st.builds(lambda name, size: ParameterSpec(name=name, shape=(size,)), NAMES, st.integers(1, 40)),
    min_size=1, max_size=12, unique_by=lambda one: one.name,
)  # fmt: skip


def spec(name: str, size: int = 4) -> ParameterSpec:
    return ParameterSpec(name=name, shape=(size,))


@given(SPECS, st.randoms(use_true_random=False), st.integers(16, 200))
def test_every_parameter_is_in_one_layer_whatever_the_order(specs, chance, layer_bytes):
    layers = group_layers(specs, layer_bytes=layer_bytes)
    shuffled = list(specs)
    chance.shuffle(shuffled)
    assert group_layers(shuffled, layer_bytes=layer_bytes) == layers
    assert sorted(one.name for layer in layers for one in layer.parameters) == sorted(one.name for one in specs)
    assert len({layer.name for layer in layers}) == len(layers)
    for layer in layers:
        assert len({block_of(one.name) for one in layer.parameters}) == 1, "a cut between blocks cuts no layer"
        assert layer.size_bytes <= layer_bytes or len(layer.parameters) == 1


@given(SPECS, st.data())
def test_a_part_of_the_model_has_the_layers_that_it_has_in_the_whole(specs, data):
    """A pipeline's stage holds whole blocks: it finds their layers by itself."""
    blocks = sorted({block_of(one.name) for one in specs})
    some = set(data.draw(st.lists(st.sampled_from(blocks), min_size=1)))
    layers = group_layers(specs, layer_bytes=64)
    mine = group_layers([one for one in specs if block_of(one.name) in some], layer_bytes=64)
    assert mine == tuple(layer for layer in layers if block_of(layer.parameters[0].name) in some)


def test_large_blocks_are_cut_between_parameters():
    layers = group_layers([spec("h.0.a", 10), spec("h.0.b", 10), spec("h.0.c", 50), spec("h.1.a")], layer_bytes=100)
    assert [(layer.name, len(layer.parameters)) for layer in layers] == [("h.0/0", 2), ("h.0/1", 1), ("h.1", 1)]


def test_wrappers_leave_no_trace():
    assert plain_name("module._orig_mod.h.3._checkpoint_wrapped_module.weight") == "h.3.weight"
    assert plain_name("module") == "module"


def test_layers_by_name_are_checked():
    specs = [spec("a"), spec("b")]
    assert [layer.name for layer in named_layers(specs, {"both": ["b", "a"]})] == ["both"]
    with pytest.raises(UsageError, match=r"b is in no layer; a is in 2 layers; there is no parameter c; layer y is em"):
        named_layers(specs, {"x": ["a", "a", "c"], "y": []})
