"""Units that run the model's own forward, with stubs for the blocks of others: equal to plain PyTorch for any cuts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_names
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.randomness.draws import seeded
from spantrain.models.tracing.batch import picked
from spantrain.models.tracing.check import called_on
from spantrain.models.tracing.model import OWN_FORWARD, WAY, cut_model
from spantrain.models.tracing.source import load_model
from spantrain.models.tracing.stubs.shell import StubbedUnit
from testing.models import handed_on
from testing.models.rows import rows_of

pytestmark = pytest.mark.models

SEED, STEP, SAMPLES, TOLERANCE = 3, 2, 5, 1e-5
FLOOR = 1e-4
"""Gradients this much smaller than the largest are rounding."""
ZOO = Path(handed_on.__file__).parent / "zoo"
LIBRARY = (
    "convolutions.unet", "decoders.gpt2", "decoders.llama", "decoders.mamba", "decoders.mixtral", "encoders.albert",
    "encoders.bert_classifier", "encoders.longformer", "pairs.bart", "pairs.t5", "pairs.whisper", "pictures.llava",
    "pictures.resnet", "pictures.vit", "plain.tied_autoencoder",
)  # fmt: skip
HANDED_ON = (
    "a_cache_is_passed_to_each_block", "a_state_is_changed_along_the_way", "drops_along_the_way",
    "gradients_are_turned_along_the_way", "hooks_keep_and_change", "its_own_checkpointing",
    "keywords_are_changed_along_the_way",
    "own_weights_and_writes_in_place",
)  # fmt: skip


def own_model(name: str) -> ModelSpec:
    return resolve_model(f"{handed_on.__file__}:{name}")


def zoo_model(name: str) -> ModelSpec:
    """A model that the tape can cut too, to be cut the other way."""
    family, _, function = name.partition(".")
    spec = resolve_model(f"{ZOO / family}.py:{function}")
    return replace(spec, config={**spec.config, WAY: OWN_FORWARD})


def check_exact(spec: ModelSpec, edges: list[int], spans: list[Span], recomputed: set[int]) -> None:
    """Compare loss and gradients of stages, the odd parameters' in halves, with the whole model's, as they train."""
    whole = load_model(spec, seed=SEED)
    whole.set_mode(trains=True)
    batch = whole.batch.resized(SAMPLES)
    with seeded(whole.module, seed=SEED, step=STEP, shapes=cut_model(spec).draws):
        loss = whole.loss(picked(whole.loss, called_on(whole, batch), spec.name), batch.labels, SAMPLES)
    (loss / SAMPLES).backward()
    stages = [
        StageExecutor(
            build_units(spec, range(lo, hi), seed=SEED),
            is_last=hi == edges[-1],
            global_batch=SAMPLES,
            seed=SEED,
            recompute=[unit - lo for unit in range(lo, hi) if unit in recomputed],
        )
        for lo, hi in pairwise(edges)
    ]
    total = 0.0
    for span in spans:
        tensors: tuple[torch.Tensor, ...] = ()
        for stage in stages:
            tensors = stage.forward(span, tensors, rows_of(batch.inputs, batch.labels, span), step=STEP)
        total += float(tensors[0])
    for span in reversed(spans):
        gradients: tuple[torch.Tensor, ...] = ()
        for stage in reversed(stages):
            gradients = stage.backward_input(span, gradients)
    for stage in stages:
        for span in spans:
            stage.backward_weight(span)
    assert total == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    found: dict[int, torch.Tensor] = {}
    named = dict(whole.module.named_parameters(remove_duplicate=False))
    for name, parameter in (pair for stage in stages for pair in stage.named_parameters().items()):
        if parameter.grad is not None:
            found[id(named[name])] = found.get(id(named[name]), torch.zeros(())) + parameter.grad
    largest = max(float(p.grad.norm()) for p in named.values() if p.grad is not None)
    for name, parameter in named.items():
        if parameter.grad is not None:
            error = float((found[id(parameter)] - parameter.grad).norm())
            assert error <= TOLERANCE * max(float(parameter.grad.norm()), FLOOR * largest), name


def check_random_cuts(spec: ModelSpec, data: st.DataObject) -> None:
    count = len(unit_names(spec))
    assert count > 2
    cuts = data.draw(st.lists(st.integers(1, count - 1), max_size=3, unique=True))
    ends = data.draw(st.lists(st.integers(1, SAMPLES - 1), max_size=2, unique=True))
    spans = [Span(lo, hi) for lo, hi in pairwise(sorted({0, SAMPLES, *ends}))]
    check_exact(spec, sorted({0, count, *cuts}), spans, data.draw(st.sets(st.integers(0, count - 1))))


@pytest.mark.parametrize("name", LIBRARY)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_classes_of_libraries_are_cut_exactly(name, data):
    check_random_cuts(zoo_model(name), data)


@pytest.mark.parametrize("name", HANDED_ON)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_blocks_hand_on_is_cut_exactly(name, data):
    check_random_cuts(own_model(name), data)


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_models_own_forward_runs_where_the_tape_cannot_be_cut(name):
    spec = own_model(name)
    graph = build_graph(spec)
    (unit, *_) = build_units(spec, [1], seed=0)
    if name != "its_own_checkpointing":  # which the tape can cut, too
        assert isinstance(unit, StubbedUnit)
        assert cut_model(spec).notices[0].startswith("each unit runs the model's own forward instead: ")
    twice = name == "drops_along_the_way"
    assert len(graph.units) == handed_on.DEPTH + 2 + twice
    check_exact(spec, list(range(len(graph.units) + 1)), [Span(0, 1), Span(1, SAMPLES)], {1, 3})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("decides_by_a_mean", r"control flow depends on data: `bool` .*handed_on.py:\d+"),
        (
            "blocks_keep_what_is_used_later",
            "a Two with tensors in it is passed on.*; nor can .*: what blocks.0 keeps is used outside of it",
        ),
        ("drops_whole_layers", r"cannot be cut: control flow depends on a random number"),
    ],
)
def test_what_neither_way_cuts_exactly_is_refused(name, wanted):
    with pytest.raises(ConfigError, match=wanted):
        build_graph(own_model(name))


def test_a_unit_holds_its_own_weights_only_and_reads_what_it_needs():
    spec = zoo_model("pairs.t5")
    units = build_units(spec, seed=0)
    count = sum(p.numel() for p in load_model(spec, seed=0).module.parameters())
    assert max(sum(p.numel() for p in unit.parameters()) for unit in units) < count / 2
    assert [len(unit.reads) for unit in units[2:4]] == [1, 1]  # the mask


def test_like_blocks_are_one_class():
    classes = [unit.unit_class for unit in build_graph(zoo_model("decoders.llama")).units[1:-1]]
    assert len(set(classes)) == 1
