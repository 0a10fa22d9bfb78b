"""Layers that are compiled: what one device computes without; which are, and what happens where one cannot be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units
from spantrain.models.data.choice import without_dropout
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.segment import CODE, ONLY_CUT, compile_layers, is_compiled
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.units import UnitModule
from testing.models.rows import rows_of
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import train_in_threads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPANS = [Span(0, 2), Span(2, 5), Span(5, 6)]
HALVES = [Span(0, 3), Span(3, 6)]
"""Of one size: what is made for another takes as long again."""
JOB = TrainJob(steps=3, seed=5, learning_rate=0.01, adapter="off")


@pytest.fixture(autouse=True)
def _no_code(monkeypatch) -> None:
    """Code is made in one test; elsewhere it is cut only, as it is then."""
    monkeypatch.setattr("spantrain.models.build.CODE", ONLY_CUT)
    torch.compiler.reset()


def gradients(
    spec: ModelSpec,
    *,
    dtype: str = "float32",
    recompute: Sequence[int] = (),
    halves: bool = False,
    spans: Sequence[Span] = SPANS,
) -> dict[str, torch.Tensor]:
    executor = StageExecutor(build_units(spec, seed=0), is_last=True, global_batch=6, dtype=dtype, recompute=recompute)
    executor.low_weights.refresh()
    data = open_dataset(spec)
    for span in spans:
        executor.forward(span, (), rows_of(data.inputs(range(span.lo, span.hi)), data.labels(range(span.lo, span.hi))))
        if halves:
            executor.backward_input(span, ())
            executor.backward_weight(span)
        else:
            executor.backward(span, ())
    return {name: own.grad for name, own in executor.named_parameters().items()}


def as_compiled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, compiled=True)


@pytest.mark.parametrize(
    ("dtype", "recompute", "halves", "spans"),
    [
        ("float32", (), False, SPANS),
        ("float32", (1,), False, HALVES),
        ("bfloat16", (), True, HALVES),
        ("bfloat16-weights", (), False, HALVES),
    ],
)
def test_gradients_are_those_of_layers_as_they_are_written(dtype, recompute, halves, spans, spec_of) -> None:
    spec = spec_of("gpt2")
    wanted = gradients(spec, dtype=dtype)
    found = gradients(as_compiled(spec), dtype=dtype, recompute=recompute, halves=halves, spans=spans)
    off = 1e-5 if dtype == "float32" else 2e-2
    for name, own in wanted.items():
        assert (found[name] - own).norm() <= off * own.norm(), name


def test_code_is_made_of_a_layer(spec_of, monkeypatch) -> None:
    monkeypatch.setattr("spantrain.models.build.CODE", CODE)
    spec = spec_of("gpt2")
    wanted = gradients(spec, spans=HALVES)
    torch._dynamo.utils.counters.clear()
    found = gradients(as_compiled(spec), spans=HALVES)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all(torch.allclose(found[name], own, rtol=1e-4, atol=1e-6) for name, own in wanted.items())


def compiled_layers(units: Sequence[UnitModule]) -> list[str]:
    compile_layers(units)
    return [type(layer).__name__ for unit in units for layer in unit.modules() if is_compiled(layer)]


def test_which_layers_are_compiled(spec_of) -> None:
    assert compiled_layers(build_units(spec_of("gpt2"), seed=0)) == []
    assert compiled_layers(build_units(as_compiled(spec_of("gpt2")), seed=0)) == ["GPT2Block"] * 3
    # Those whose normalizations take statistics.
    assert compiled_layers(build_units(as_compiled(spec_of("efficientnet")), seed=0)) == []


def test_those_of_a_model_that_draws_are_not(tmp_path, caplog) -> None:
    drops = library_spec(tmp_path, attn_pdrop=0.1)
    assert compiled_layers(build_units(as_compiled(drops), seed=0)) == []
    build_graph(as_compiled(drops))
    assert "its layers are not compiled: it draws at random while it trains (--dropout off: no)" in caplog.text
    assert compiled_layers(build_units(as_compiled(without_dropout(drops)), seed=0)) == ["GPT2Block"] * 2


def library_spec(folder, **more: float) -> ModelSpec:
    from transformers import GPT2Config

    from spantrain.models.catalog.catalog import resolve_model

    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=256, architectures=["GPT2LMHeadModel"],
        bos_token_id=0, eos_token_id=0, **(none | more),
    )  # fmt: skip
    config.save_pretrained(folder)
    return resolve_model(f"hf:{folder}", sequence_length=8)


def test_what_cannot_be_compiled_runs_as_it_is_written(spec_of, monkeypatch, caplog) -> None:
    from torch._dynamo.exc import TorchDynamoException  # not before: it takes seconds, and changes what others do

    def refuses(*_: object) -> None:
        raise TorchDynamoException("no such operation\nand more")

    spec = spec_of("gpt2")
    wanted = gradients(spec)
    monkeypatch.setattr("spantrain.models.build.CODE", refuses)
    found = gradients(as_compiled(spec))
    assert all(torch.equal(found[name], own) for name, own in wanted.items())
    (told,) = [one.getMessage() for one in caplog.records if one.name == compile_layers.__module__]
    assert told.startswith("GPT2Block is not compiled, and runs as it is written: ")
    assert "no such operation" in told


def test_costs_are_others(spec_of) -> None:
    spec = spec_of("gpt2")
    written, made = build_graph(spec), build_graph(as_compiled(spec))
    block, other = written.units[1], made.units[1]
    assert block.unit_class != other.unit_class
    assert block.outputs == other.outputs
    assert block.deferred_bytes_per_sample > other.deferred_bytes_per_sample == 0


def test_a_pipeline_trains_as_one_device(make_plan, spec_of) -> None:
    spec = spec_of("gpt2")
    plan = make_plan(as_compiled(spec), [0, 2, 5], [[1], [1, 2]], [[Span(0, 2), Span(2, 4), Span(4, 6)]] * 2, "zb-h1")
    found = train_in_threads(plan, JOB)
    assert found.losses == pytest.approx(OneProcess(spec, JOB, 6).train(0, JOB.steps), abs=1e-4)
