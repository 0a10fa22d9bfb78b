"""Units of models that nobody edited: any cuts and spans give the unsplit model's loss and gradients."""

import dataclasses
import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units, example_inputs, example_rows, unit_names
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.randomness.draws import seeded
from spantrain.models.tracing.batch import ModelBatch, OwnLoss, picked
from spantrain.models.tracing.model import TracedUnits, cut_model
from spantrain.models.tracing.source import load_model
from spantrain.models.units import LABELS, parameter_names
from testing.models import own_models
from testing.models.library_models import CONFIGURATIONS, PLAIN, TEXT, UNITS, library_spec
from testing.models.rows import rows_of

pytestmark = pytest.mark.models

SEED, DRAWS, STEP = 3, 7, 4
SAMPLES = 5
TOLERANCE = 1e-5
FLOOR = 1e-4
"""Gradients this much smaller than the largest are rounding."""
LIBRARY = tuple(CONFIGURATIONS)
OWN = tuple(f"own:{name}" for name in own_models.GOOD)
EXAMPLE = Path(__file__).parents[3] / "examples" / "my_model.py"
of_models = partial(pytest.mark.parametrize, scope="module")
"""All tests of a model one after the other: it is followed and cut once."""


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """What one process computes with the unedited model."""

    spec: ModelSpec
    batch: ModelBatch
    loss_sum: float
    gradients: dict[str, torch.Tensor]
    identity: dict[str, int]
    """Of the parameter behind each name."""


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory):
    found: dict[str, Unsplit] = {}

    def get(name: str) -> Unsplit:
        if name not in found:
            found[name] = computed(spec_of(name, tmp_path_factory.getbasetemp()))
        return found[name]

    return get


def spec_of(name: str, folder: Path) -> ModelSpec:
    if name == "unet":
        return resolve_model(f"{EXAMPLE}:build")
    if name.startswith("own:"):
        return resolve_model(f"{own_models.__file__}:{name.removeprefix('own:')}")
    return library_spec(name, folder)


def varied(spec: ModelSpec) -> ModelBatch:
    """A batch whose samples differ."""
    batch = cut_model(spec).whole.batch.resized(SAMPLES)
    if spec.family == "factory":
        return batch
    chance = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(tensor.shape, generator=chance)
        if tensor.is_floating_point()
        else torch.randint(0, 250, tensor.shape, generator=chance)
        for tensor in batch.inputs
    )
    labels = torch.randint(0, 10, example_rows(spec, SAMPLES)[LABELS].shape, generator=chance)
    return dataclasses.replace(batch, inputs=inputs, labels=labels)


def computed(spec: ModelSpec) -> Unsplit:
    loaded, batch = load_model(spec, seed=SEED), varied(spec)
    plain = [tensor for tensor, name in zip(batch.inputs, batch.names, strict=True) if name is None]
    named = {name: tensor for tensor, name in zip(batch.inputs, batch.names, strict=True) if name is not None}
    if isinstance(loaded.loss, OwnLoss):
        named["labels"] = batch.labels
    loaded.set_mode(trains=True)
    with seeded(loaded.module, seed=DRAWS, step=STEP):
        result = picked(loaded.loss, loaded.module(*plain, **named), spec.name)
    loss_sum = loaded.loss(result, batch.labels, SAMPLES)
    (loss_sum / SAMPLES).backward()
    parameters = dict(loaded.module.named_parameters(remove_duplicate=False))
    return Unsplit(
        spec=spec,
        batch=batch,
        loss_sum=float(loss_sum.detach()),
        gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
        identity={name: id(p) for name, p in parameters.items()},
    )


def run_cut(whole: Unsplit, edges: list[int], spans: list[Span], *, halves: bool, recomputed: bool = False) -> None:
    """Run stages one after the other, spans in order, and compare."""
    spec, batch = whole.spec, whole.batch
    stages = [
        StageExecutor(
            build_units(spec, range(first, end), seed=SEED),
            is_last=end == edges[-1],
            global_batch=SAMPLES,
            seed=DRAWS,
            recompute=[position for position in range(end - first) if recomputed and (first + position) % 2],
        )
        for first, end in pairwise(edges)
    ]
    loss_sum = 0.0
    for span in spans:
        tensors: tuple[torch.Tensor, ...] = ()
        for stage in stages:
            tensors = stage.forward(span, tensors, rows_of(batch.inputs, batch.labels, span), step=STEP)
        loss_sum += float(tensors[0])
    for span in reversed(spans):
        gradients: tuple[torch.Tensor, ...] = ()
        for stage in reversed(stages):
            gradients = stage.backward_input(span, gradients) if halves else stage.backward(span, gradients)
    for stage in stages if halves else ():
        for span in spans:
            stage.backward_weight(span)
    assert loss_sum == pytest.approx(whole.loss_sum, rel=TOLERANCE)
    check_gradients(whole, stages)


def check_gradients(whole: Unsplit, stages: list[StageExecutor]) -> None:
    found: dict[int, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters().items():
            if parameter.grad is not None:
                key = whole.identity[name]
                found[key] = found.get(key, torch.zeros(())) + parameter.grad
    largest = max(float(gradient.norm()) for gradient in whole.gradients.values())
    for name, wanted in whole.gradients.items():
        error = float((found[whole.identity[name]] - wanted).norm())
        assert error <= TOLERANCE * max(float(wanted.norm()), FLOOR * largest), name


@of_models("name", [*LIBRARY, *OWN, "unet"])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_cuts_and_spans_give_the_unsplit_gradients(name, data, unsplit):
    whole = unsplit(name)
    count = len(unit_names(whole.spec))
    cuts = data.draw(st.lists(st.integers(1, count - 1), max_size=3, unique=True))
    ends = data.draw(st.lists(st.integers(1, SAMPLES - 1), max_size=2, unique=True))
    spans = [Span(lo, hi) for lo, hi in pairwise(sorted({0, SAMPLES, *ends}))]
    run_cut(
        whole, sorted({0, count, *cuts}), spans, halves=data.draw(st.booleans()), recomputed=data.draw(st.booleans())
    )


@of_models("name", ["gpt2", "t5", "efficientnet", *OWN, "unet"])
def test_every_unit_alone_gives_the_unsplit_gradients(name, unsplit):
    whole = unsplit(name)
    count = len(unit_names(whole.spec))
    run_cut(whole, list(range(count + 1)), [Span(0, 1), Span(1, SAMPLES)], halves=True)


@of_models("name", LIBRARY)
def test_a_librarys_model_can_be_had_with_some_of_its_parameters_only(name, unsplit):
    """Those have the numbers that they have in the whole model, and the others take no memory."""
    spec = unsplit(name).spec
    whole, numbers = load_model(spec, seed=7).module.state_dict(), cut_model(spec).whole.numbers
    for kept in (min(numbers.values()), max(numbers.values())):
        some = load_model(spec, seed=7, only={kept}).module
        for key, parameter in some.named_parameters(remove_duplicate=False):
            assert parameter.is_meta == (numbers[key] != kept), key
            assert parameter.is_meta or torch.equal(parameter, whole[key]), key
        assert not any(buffer.is_meta for buffer in some.buffers())


def test_numbers_that_are_drawn_again_out_of_bounds_do_not_depend_on_which_others_are_empty(tmp_path):
    """ModernBERT's are truncated: torch draws those out of bounds again, elsewhere, of those that are not empty."""
    sizes = {**TEXT, **PLAIN, "max_position_embeddings": 16, "pad_token_id": 0, "initializer_cutoff_factor": 1.0}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], **sizes}))
    spec = resolve_model(f"hf:{tmp_path}", sequence_length=8)
    whole, numbers = load_model(spec, seed=7).module.state_dict(), cut_model(spec).whole.numbers
    kept = {number for number in numbers.values() if number % 2}
    some = load_model(spec, seed=7, only=kept).module
    there = {key: one for key, one in some.named_parameters(remove_duplicate=False) if not one.is_meta}
    assert len({numbers[key] for key in there}) == len(kept)
    assert all(torch.equal(one, whole[key]) for key, one in there.items())


@of_models("name", [*LIBRARY, *OWN])
def test_names_are_the_unsplit_models(name, unsplit):
    whole = unsplit(name)
    units = build_units(whole.spec, seed=SEED)
    found = {full: unit.get_parameter(local).shape for unit in units for local, full in parameter_names(unit).items()}
    model = load_model(whole.spec, seed=SEED).module
    state = model.state_dict()
    assert {full: state[full].shape for full in found} == found
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert {id(parameters[full]) for full in found} == {id(parameter) for parameter in parameters.values()}


@of_models("kind", UNITS)
def test_units_are_the_models_blocks(kind, unsplit):
    assert unit_names(unsplit(kind).spec) == UNITS[kind]
    assert cut_model(unsplit(kind).spec).notices == ()


def test_a_vision_transformers_blocks_are_units(unsplit):
    assert len(unit_names(unsplit("vit").spec)) == 5


@of_models("name", ["llama", "own:mixture"])
def test_weights_do_not_depend_on_which_units_are_built(name, unsplit):
    spec = unsplit(name).spec
    everything = build_units(spec, seed=7)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for index in (2, 0, len(everything) - 1):
        (unit,) = build_units(spec, [index], seed=7)
        assert unit.name == everything[index].name
        for key, value in unit.state_dict().items():
            assert torch.equal(value, everything[index].state_dict()[key]), key
    assert torch.equal(torch.get_rng_state(), before)


@of_models("name", ["gpt2", "own:unusual", "own:own_loss"])
def test_shared_parameters_are_one_group(name, unsplit):
    spec = unsplit(name).spec
    units = build_units(spec, seed=0)
    holders: dict[str, list[int]] = {}
    for unit in units:
        for group, local in unit.shared.items():
            holders.setdefault(group, []).append(id(unit.get_parameter(local)))
    assert holders
    assert all(len(ids) > 1 and len(set(ids)) == 1 for ids in holders.values())
    assert set(holders) == set(build_graph(spec).shared_bytes)


@of_models("name", ["llama", "t5", "own:unusual", "unet"])
def test_the_graph_says_what_crosses_each_cut(name, unsplit):
    whole = unsplit(name)
    graph = build_graph(whole.spec)
    tensors: tuple[torch.Tensor, ...] = ()
    for unit, described in zip(build_units(whole.spec, seed=0)[:-1], graph.units, strict=False):
        tensors = unit.run(tensors, whole.batch.rows)
        assert [tuple(t.shape[1:]) for t in tensors] == [out.shape_per_sample for out in described.outputs]
        assert {t.shape[0] for t in tensors} == {SAMPLES}
    assert example_inputs(whole.spec, 4)[0].shape[0] == 4


def test_equal_blocks_are_one_class(unsplit):
    blocks = build_graph(unsplit("llama").spec).units[1:-1]
    assert len({unit.unit_class for unit in blocks}) == 1
    assert all(unit.unit_class.startswith("LlamaDecoderLayer[8x16]") for unit in blocks)
    assert all(unit.tensor_sums == 2 for unit in blocks)


def test_one_unit_of_each_class_is_made_to_measure_it_and_never_all(monkeypatch, unsplit):
    """Whoever plans for a model may have no room for it."""
    spec, made = unsplit("gpt2").spec, []
    build = TracedUnits.build
    monkeypatch.setattr(
        TracedUnits, "build", lambda self, units, seed: made.append([*units]) or build(self, made[-1], seed=seed)
    )
    graph = build_graph(spec)
    assert len(graph.units) > len(made) == len({unit.unit_class for unit in graph.units})
    assert all(len(units) == 1 for units in made)


def test_rotary_angles_and_positions_are_made_again_not_sent(unsplit):
    graph = build_graph(unsplit("llama").spec)
    assert all(len(unit.outputs) == 1 for unit in graph.units[:-1])


def test_long_skips_are_carried_each_by_itself(unsplit):
    graph = build_graph(unsplit("unet").spec)
    assert [len(unit.outputs) for unit in graph.units] == [1, 2, 3, 4, 3, 2, 1, 0]


def test_unusual_tensors_cross_with_their_samples_first(unsplit):
    shapes = [[out.shape_per_sample for out in unit.outputs] for unit in build_graph(unsplit("own:unusual").spec).units]
    width, tokens = own_models.WIDTH, own_models.TOKENS
    assert any((tokens, width) in shape for shape in shapes)
    assert all((tokens, width) in shape for shape in shapes[1:4])  # the bias, or the hidden state
