"""Shipped unit graphs are those that the models' code builds."""

from dataclasses import replace

import pytest

from spantrain.config.artefacts import shipped_graph
from spantrain.models.catalog.catalog import MODEL_NAMES, resolve_model, unit_names


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_has_one_with_its_units(name):
    graph = shipped_graph(resolve_model(name))
    assert graph is not None
    assert tuple(unit.name for unit in graph.units) == unit_names(resolve_model(name))


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_small_ones_are_what_is_built(name):
    from spantrain.models.graph import build_graph

    shipped, built = shipped_graph(resolve_model(name)), build_graph(resolve_model(name))
    for ours, theirs in zip(shipped.units, built.units, strict=True):
        assert (ours.parameter_bytes, ours.forward_flop_per_sample, ours.outputs) == (
            theirs.parameter_bytes,
            theirs.forward_flop_per_sample,
            theirs.outputs,
        )
        assert ours.tensor_sums == theirs.tensor_sums
        # What autograd keeps is the library's affair and may change a little between its versions.
        assert ours.activation_bytes_per_sample == pytest.approx(theirs.activation_bytes_per_sample, rel=0.1)


def test_another_size_has_none():
    spec = resolve_model("gpt2-tiny", sequence_length=32)
    assert shipped_graph(spec) is None
    assert shipped_graph(resolve_model("gpt2-tiny"), "bfloat16") is None
    assert shipped_graph(replace(resolve_model("gpt2-tiny"), dataset="text:/elsewhere")) is not None
