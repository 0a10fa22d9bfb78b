"""Losses that are means over all counted labels of a step: the same for any cut, as plain PyTorch and as a Trainer."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ChatForm, ModelSpec, UnitGraph
from spantrain.library.evaluation import WholeModel
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import model_on_data
from spantrain.models.data.dataset import open_dataset
from spantrain.models.graph import build_graph
from spantrain.models.tracing.batch import ModelBatch, shifts_labels
from spantrain.models.tracing.source import load_model
from spantrain.models.units import COUNTED, LABELS, counted_labels, loss_of, parameter_names, rows_read
from spantrain.runtime.step.work import SampledFeed
from testing.models import padded_models
from testing.models.zoo.trial import largest_error

FILE = Path(padded_models.__file__)
MODELS = ("llama", "gpt2", "bert", "t5")
STEPS, RATE, BATCH = 3, 0.1, 8


def spec_of(name: str) -> ModelSpec:
    return resolve_model(f"{FILE}:{name}")


@functools.cache
def _graph(name: str) -> UnitGraph:
    return build_graph(spec_of(name))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None)
@given(choices=st.data())
def test_padded_batches_give_plain_pytorchs_losses_and_gradients(name: str, choices: st.DataObject) -> None:
    spec = spec_of(name)
    units, samples = unit_count(spec), padded_models.SAMPLES
    cuts = sorted(choices.draw(st.sets(st.integers(1, units - 1), max_size=3)))
    parts = sorted(choices.draw(st.sets(st.integers(1, samples - 1), max_size=4)))
    stages = [
        SimpleNamespace(
            first_unit=lo,
            end_unit=hi,
            units=range(lo, hi),
            micro_batches=[Span(a, b) for a, b in zip((0, *parts), (*parts, samples), strict=True)],
        )
        for lo, hi in zip((0, *cuts), (*cuts, units), strict=True)
    ]
    plan = SimpleNamespace(stages=stages, global_batch=samples)
    assert largest_error(spec, _graph(name), plan, load_model(spec, seed=0)) < 1e-5  # type: ignore[arg-type]


def test_models_that_shift_labels_are_known() -> None:
    found = {name: shifts_labels(load_model(spec_of(name), seed=0).module) for name in MODELS}
    assert found == {"llama": True, "gpt2": True, "bert": False, "t5": False}


@pytest.fixture
def chat_path(tmp_path: Path) -> Path:
    rows = ({"prompt": f"say {number}", "completion": "so " * (number % 6 + 1)} for number in range(40))
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["gpt2-tiny", "hf:examples/llama-tiny"])
def test_conversations_lose_the_mean_over_all_answers(name: str, chat_path: Path) -> None:
    spec = model_on_data(name, data=f"chat:{chat_path}", sequence_length=32, chat=ChatForm(template="plain"))
    units, feed = build_units(spec, seed=0), SampledFeed(open_dataset(spec), global_batch=BATCH, seed=0)
    with torch.no_grad():
        spans = (Span(0, 3), Span(3, 4), Span(4, 8))
        found = sum(float(loss_of(units, feed.rows(1, span, rows_read(units)))) for span in spans) / BATCH
        total, counted = 0.0, 0
        for span in equal_spans(BATCH, 1):
            rows = dict(feed.rows(1, span, (0, LABELS)))
            alone = loss_of(units, {**rows, COUNTED: counted_labels(rows[LABELS], 1)})
            count = int((rows[LABELS] != -100).sum())
            total, counted = total + float(alone) * count, counted + count
    assert found == pytest.approx(total / counted, rel=1e-6)


FACTORY = """
import torch
from transformers import LlamaForCausalLM
def build():
    model = LlamaForCausalLM.from_pretrained({folder!r})
    tokens = torch.ones(2, 32, dtype=torch.int64)
    return model, dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
"""


class InOrder(Trainer):
    """Takes samples as they come."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_a_trainer_that_accumulates_gradients_gives_the_same(chat_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2
    )
    LlamaForCausalLM(small).save_pretrained(str(tmp_path / "model"))
    (tmp_path / "factory.py").write_text(FACTORY.format(folder=str(tmp_path / "model")))
    spec = model_on_data(f"{tmp_path / 'factory.py'}:build", data=f"chat:{chat_path}", chat=ChatForm(template="plain"))
    units, data = build_units(spec, seed=0), open_dataset(spec)
    feed = SampledFeed(data, global_batch=BATCH, seed=0)
    optimizer = torch.optim.SGD({id(p): p for unit in units for p in unit.parameters()}.values(), lr=RATE)
    losses, taken = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for span in equal_spans(BATCH, 3):
            loss = loss_of(units, feed.rows(step, span, rows_read(units))) / BATCH
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
        rows = feed.rows(step, Span(0, BATCH), (0, 1, LABELS))
        names = {"input_ids": 0, "attention_mask": 1, "labels": LABELS}
        taken += [{name: rows[number][row] for name, number in names.items()} for row in range(BATCH)]

    trained = LlamaForCausalLM.from_pretrained(str(tmp_path / "model"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(model=trained, args=arguments, train_dataset=taken)
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(losses, abs=1e-4)
    for unit in units:
        for local, full in parameter_names(unit).items():
            ours, theirs = unit.get_parameter(local).detach(), trained.get_parameter(full).detach()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Padded:
    """The padded batch twice, the second time with all but two labels of each sample left out."""

    def __init__(self, batch: ModelBatch) -> None:
        assert batch.labels is not None
        fewer = torch.where((batch.labels != -100).cumsum(dim=1) <= 2, batch.labels, -100)
        self._inputs = tuple(torch.cat([tensor, tensor]) for tensor in batch.inputs)
        self._labels = torch.cat([batch.labels, fewer])

    def __len__(self) -> int:
        return len(self._labels)

    def inputs(self, indices: range) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[list(indices)] for tensor in self._inputs)

    def labels(self, indices: range) -> torch.Tensor:
        return self._labels[list(indices)]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_evaluation_by_batches_is_the_mean_over_all_labels(name: str) -> None:
    loaded = load_model(spec_of(name), seed=0)
    data = Padded(loaded.batch)
    everything = range(len(data))
    with torch.no_grad():
        named = dict(zip(loaded.batch.names, data.inputs(everything), strict=True))
        wanted = float(loaded.module(**named, labels=data.labels(everything)).loss)
    whole = WholeModel(loaded=loaded, device=torch.device("cpu"))
    found = whole.run(data, {}, prefix="eval", gather=False)  # type: ignore[arg-type]
    assert found.metrics["eval_loss"] == pytest.approx(wanted, rel=1e-6)
