"""Models as people bring them: each trains as plain PyTorch does in training mode, or is refused with the reason.

What it draws at random is the same in both; what differs from the model as it was given is told.
"""

import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.randomness.draws import seeded
from spantrain.models.sampler import derive_seed
from spantrain.models.tracing.batch import WholeMeans
from spantrain.models.tracing.factory import load_function
from spantrain.models.tracing.model import cut_model
from spantrain.models.units import (
    COUNTED,
    LABELS,
    UnitModule,
    counted_labels,
    keeps_statistics,
    loss_of,
    parameter_names,
    tie_parameters,
)
from testing.models import brought_models
from testing.models.rows import rows_of

pytestmark = pytest.mark.models

SOURCE = Path(brought_models.__file__)
STEPS, RATE = 3, 0.01

TRAIN = {
    "llama": (),
    "llama_of_a_folder": (),
    "llama_compiled": ("torch.compile is left out in 1 module",),
    "llama_with_checkpointing": ("gradient checkpointing is off in 3 modules",),
    "llama_with_its_head_alone": (),
    "gpt2": (),
    "gemma2": (),
    "opt": (),
    "mixtral": (),
    "bert_classifier": (),
    "bert_of_words": (),
    "distilbert": (),
    "t5": (),
    "t5_with_labels_alone": (),
    "bart_that_drops_layers": (),
    "whisper": (),
    "dropout": (),
    "dropout_always": (),
    "dropout_in_evaluation_mode": (),
    "compiled": ("torch.compile is left out in 2 modules",),
    "compiled_functions": (),
    "normalized": (),
    "normalized_and_frozen": (),
    "functional_dropout": (),
    "recurrent": (),
    "stochastic_depth": (),
    "looks_at_numbers": (),
    "counts_what_it_saw": ("writes into 0.mean, 1.mean is not kept",),
    "hooked": (),
    "packed": (),
    "an_object_is_passed_on": (),
    "spectral_norm": ("1 module (0.parametrizations.weight.0 (_SpectralNorm)) would do otherwise",),
}
"""What is told of each that trains."""

REFUSED = {
    "dropout_run_again": r"its own torch.utils.checkpoint does not run again what ran before.*--recompute-all",
    "dropout_run_again_by_a_backward_pass_inside": "own torch.utils.checkpoint does not run again what ran before",
    "statistics_of_the_batch": r"one by one there is none .*1 \(BatchNorm1d\) has no running statistics",
    "traced": "is of torch.jit, .*return the module that it was made of",
    "old_weight_norm": r"0 \(Linear\) keeps weight, a tensor made of parameters",
    "data_parallel": r"the module \(DataParallel\) divides the work itself.*return the module inside it",
    "lazy": r"0 \(LazyLinear\): weight has no shape before the first call",
    "gradient_hooked": r"0 \(Linear\): weight has hooks on its gradient.*do that in forward instead",
    "gradient_hooked_behind": r"0 \(Linear\): weight has hooks on its gradient",
    "on_meta": r"0.linear \(Linear\): weight is on the meta device",
}


def spec_of(name: str) -> ModelSpec:
    return resolve_model(f"{SOURCE}:{name}")


def plain_losses(name: str) -> list[float]:
    """Train in plain PyTorch, from the weights that units begin with, what keeps statistics in evaluation mode."""
    torch.manual_seed(derive_seed(0, "model"))
    model, batch, *loss = load_function(f"{SOURCE}:{name}")()
    model = getattr(model, "_orig_mod", model).train()
    for part in model.modules():
        part.training = not keeps_statistics(part)
    for child in model.children():
        child.forward = getattr(child, "_orig_mod", child).forward
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    with torch.compiler.set_stance("force_eager"):
        for step in range(STEPS):
            optimizer.zero_grad()
            with seeded(model, seed=0, step=step):
                result = model(**batch) if isinstance(batch, dict) else model(*batch[:-1])
            value = loss[0](result, batch[-1]) if loss else result.loss
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
    return losses


def losses_in_two_stages(spec: ModelSpec) -> list[float]:
    """Train in two stages and two spans a step, gradients of what both stages hold summed."""
    batch, count = cut_model(spec).whole.batch, unit_count(spec)
    units = build_units(spec, seed=0)
    edges = (0, max(1, count // 2), count)
    held = [copies(units[lo:hi]) for lo, hi in pairwise(edges)]
    stages = [StageExecutor(part, is_last=n == 1, global_batch=batch.samples) for n, part in enumerate(held)]
    shared = twins(held)
    optimizer = torch.optim.AdamW(
        [p for stage in stages for p in stage.named_parameters().values() if p.requires_grad], lr=RATE
    )
    losses = []
    for step in range(STEPS):
        losses.append(sum(run_span(stages, batch, span, step) for span in halves(batch.samples)) / batch.samples)
        for one, other in shared:
            one.grad = other.grad = sum(p.grad for p in (one, other) if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def copies(units: list[UnitModule]) -> list[UnitModule]:
    """What another device has: its own parameters, tied among its own units."""
    memo: dict[int, object] = {}
    made = [copy.deepcopy(unit, memo) for unit in units]
    tie_parameters(made)
    return made


def twins(stages: list[list[UnitModule]]) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    groups = [{g: unit.get_parameter(local) for unit in units for g, local in unit.shared.items()} for units in stages]
    return [(groups[0][name], groups[1][name]) for name in groups[0].keys() & groups[1].keys()]


def halves(samples: int) -> tuple[Span, Span]:
    return Span(0, samples // 3), Span(samples // 3, samples)


def run_span(stages: list[StageExecutor], batch, span: Span, step: int) -> float:
    tensors: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        tensors = stage.forward(span, tensors, rows_of(batch.inputs, batch.labels, span), step=step)
    gradients: tuple[torch.Tensor, ...] = ()
    for stage in reversed(stages):
        # The first span in one piece, the others in halves.
        gradients = stage.backward(span, gradients) if span.lo == 0 else stage.backward_input(span, gradients)
    for stage in stages if span.lo else ():
        stage.backward_weight(span)
    return float(tensors[0])


@pytest.mark.parametrize("name", TRAIN)
def test_it_trains_as_plain_pytorch_does_and_says_what_differs(name):
    spec = spec_of(name)
    said = build_graph(spec).left_out
    assert len(said) == (1 if TRAIN[name] else 0), said
    for text in TRAIN[name]:
        assert text in said[0]
    assert losses_in_two_stages(spec) == pytest.approx(plain_losses(name), abs=5e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as caught:
        build_graph(spec_of(name))
    assert re.search(REFUSED[name], str(caught.value)), caught.value
    assert "Traceback" not in str(caught.value)


def test_means_over_labels_are_those_over_the_whole_step():
    """Of unlike numbers in each sample; a mean that is not torch's own is refused, whenever such samples come."""
    for name in ("bert_of_words", "counts_by_hand"):
        *_, last = build_units(spec_of(name), seed=0)
        hidden, labels = torch.randn(3, 8, 16 if name == "bert_of_words" else 8), torch.arange(24).reshape(3, 8) % 3
        labels[0, 6:] = labels[1, 2:] = -100
        rows = {LABELS: labels, COUNTED: counted_labels(labels, 3)}
        if name == "bert_of_words":
            whole = last.run([hidden], rows)
            for cut in (1, 2):
                spans = (slice(0, cut), slice(cut, 3))
                parts = [last.run([hidden[span]], {n: row[span] for n, row in rows.items()}) for span in spans]
                assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()))
        else:
            last.run([hidden[:1]], {n: row[:1] for n, row in rows.items()})
            with pytest.raises(ConfigError, match=r"samples count 6 and 2 labels .*torch's cross_entropy"):
                last.run([hidden[1:]], {n: row[1:] for n, row in rows.items()})


def test_first_labels_that_only_some_micro_batches_count_are_counted_as_the_model_does():
    labels = torch.zeros(2, 4, dtype=torch.int64)
    labels[1, 0] = -100
    counted = counted_labels(labels, 1)
    assert counted.tolist() == [[3.5, 3.0]]
    logits = torch.randn(2, 4, 5)
    for rows, losses in ((logits[:1], 4), (logits[:1, :-1], 3)):
        means = WholeMeans(labels[:1], counted)
        with means:
            loss = functional.cross_entropy(rows.transpose(1, 2), labels[:1, 4 - losses :])
        wanted = functional.cross_entropy(rows.transpose(1, 2), labels[:1, 4 - losses :], reduction="sum")
        assert means.made
        assert torch.equal(loss, wanted / (3.5 if losses == 4 else 3.0))
    for target, wanted in ((labels[1:], 3.5), (labels[1:, 1:], 3.0)):
        rows = logits[1:, -target.shape[1] :].transpose(1, 2)
        with WholeMeans(labels[1:], counted):
            loss = functional.cross_entropy(rows, target)
        assert torch.equal(loss, functional.cross_entropy(rows, target, reduction="sum") / wanted)
    with WholeMeans(labels[1:], counted), pytest.raises(ConfigError, match="whether the model does too cannot be told"):
        functional.cross_entropy(logits[1:].transpose(1, 2), labels[1:].roll(2, 1))


def test_which_labels_a_mean_is_over_is_looked_at_once(monkeypatch):
    labels = torch.tensor([[1, 2, 3, 0]])
    counted, logits, known = counted_labels(labels, 1), torch.randn(1, 5, 3), {}

    def losses() -> list[torch.Tensor]:
        with WholeMeans(labels, counted, known):
            return [functional.cross_entropy(logits, labels[:, 1:]), functional.cross_entropy(logits, labels[:, 1:])]

    wanted = losses()
    assert known == {0: 1, 1: 1}
    monkeypatch.setattr(torch, "equal", None)
    assert losses() == wanted
    alike, unknown = torch.ones(1, 4, dtype=torch.int64), {}
    with pytest.raises(TypeError), WholeMeans(alike, counted_labels(alike, 1), unknown):
        functional.cross_entropy(torch.randn(1, 5, 4), alike)


def test_labels_that_could_be_either_are_looked_at_again():
    """Of one label alone it cannot be told whether the model is given all or those behind the first."""
    alike, known = torch.full((1, 4), -100), {}
    with WholeMeans(alike, counted_labels(alike, 1), known):
        functional.cross_entropy(torch.randn(1, 5, 4), alike)
    assert known == {}


def test_what_code_reads_of_samples_must_be_the_same_of_all():
    units, hidden = build_units(spec_of("looks_at_numbers"), seed=0), torch.ones(2, 8)
    rows = {0: hidden, LABELS: torch.zeros(2, dtype=torch.int64)}
    assert loss_of(units, rows) > 0
    with pytest.raises(
        ConfigError, match=r"reads False of the samples .* True of others, by `__bool__` at .*models.py:"
    ):
        loss_of(units, {**rows, 0: 10 * hidden})


def test_a_compiled_models_parameters_have_their_plain_names():
    names = {full for unit in build_units(spec_of("compiled"), seed=0) for full in parameter_names(unit).values()}
    assert names == {f"{n}.{m}{k}" for n, m in ((0, "linear."), (1, "linear."), (2, "")) for k in ("weight", "bias")}


def test_weights_of_the_function_are_kept():
    """Of a function that loads them, whatever the seed."""
    torch.manual_seed(1)
    wanted = brought_models.llama_of_a_folder()[0].state_dict()
    for unit in build_units(spec_of("llama_of_a_folder"), seed=5):
        for local, full in parameter_names(unit).items():
            assert torch.equal(unit.get_parameter(local), wanted[full]), full
