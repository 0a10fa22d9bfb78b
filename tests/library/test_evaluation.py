"""What a trainer does besides training: evaluate, predict, save, collate, call back; with real workers and models."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, DataCollatorWithPadding, TrainerCallback

import spantrain
from spantrain.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FILE = '''\
"""A classifier of texts that are not all of one length."""

import torch
from transformers import BertConfig, BertForSequenceClassification

CONFIG = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, num_labels=3,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)


def build():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**CONFIG))
    ids, labels = torch.ones(2, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
'''


class Texts:
    """Rows as a tokenizer leaves them, with a text that no model takes."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.rows = [random.integers(5, 40, size=random.integers(3, 9)).tolist() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        ids = self.rows[index]
        return {"text": "...", "input_ids": ids, "attention_mask": [1] * len(ids), "label": sum(ids) % 3}


def accuracy(found: spantrain.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *(f"w{n}" for n in range(38))])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The user's file, imported."""
    path = tmp_path_factory.mktemp("user") / "texts.py"
    path.write_text(FILE)
    found = importlib.util.spec_from_file_location("texts", path)
    module = sys.modules["texts"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules["texts"]


def arguments(out: Path, **given) -> spantrain.TrainingArguments:
    common = {
        "max_steps": 6, "train_batch_size": 8, "lr_scheduler_type": "constant", "learning_rate": 5e-3,
        "logging_steps": 3, "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    return spantrain.TrainingArguments(output_dir=out, **{**common, **given})


class Heard(spantrain.Callback):
    """Writes down what it hears; wants a checkpoint after the second step."""

    def __init__(self) -> None:
        self.logs, self.evaluations, self.saved = [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(metrics)

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(Path(state.checkpoint).name)


@pytest.fixture(scope="module")
def trained(built, tokenizer, tmp_path_factory):
    heard = Heard()
    trainer = spantrain.Trainer(
        built.build,
        data=Texts(40, seed=1),
        args=arguments(tmp_path_factory.mktemp("runs") / "run", eval_steps=3),
        measure=False,
        callbacks=[heard],
        eval_dataset=Texts(13, seed=2),
        data_collator=DataCollatorWithPadding(tokenizer, padding="max_length", max_length=8),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    return trainer, heard, trainer.train()


def plain(built, trainer, texts: Texts, tokenizer):
    """Return loss and logits of the unsplit model, a sample at a time."""
    model = built.build()[0].eval()
    model.load_state_dict(trainer.state_dict())
    rows = [
        DataCollatorWithPadding(tokenizer)([{k: v for k, v in texts[n].items() if k != "text"}])
        for n in range(len(texts))
    ]
    with torch.no_grad():
        outputs = [model(**row) for row in rows]
    return float(torch.stack([out.loss for out in outputs]).mean()), torch.cat([out.logits for out in outputs]).numpy()


def test_evaluation_is_that_of_the_unsplit_model(built, trained, tokenizer):
    trainer, _, _ = trained
    loss, logits = plain(built, trainer, Texts(13, seed=2), tokenizer)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    labels = np.array([Texts(13, seed=2)[n]["label"] for n in range(13)])
    assert metrics["eval_accuracy"] == pytest.approx((logits.argmax(-1) == labels).mean())
    other = trainer.predict(test_dataset=Texts(9, seed=5))
    loss, logits = plain(built, trainer, Texts(9, seed=5), tokenizer)
    np.testing.assert_allclose(other.predictions, logits, rtol=1e-4, atol=1e-5)
    assert other.label_ids.tolist() == [Texts(9, seed=5)[n]["label"] for n in range(9)]
    assert other.metrics["test_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("made", [{"f1": [0.5, 0.25]}, {"f1": "good"}, {"f1": None}, None, 0.5])
def test_metrics_that_are_no_numbers_are_refused(trained, made):
    data, whole = trained[0]._held_out(Texts(3, seed=2)), trained[0]._whole_model()
    with pytest.raises(ConfigError, match=r"compute_metrics: returned .*; wanted a dict of numbers"):
        whole.run(data, {"compute_metrics": lambda _: made}, prefix="eval", gather=False)
    for one in (0.5, np.float32(0.5), torch.tensor(0.5), np.array([0.5])):
        found = whole.run(data, {"compute_metrics": lambda _, one=one: {"eval_f1": one}}, prefix="eval", gather=False)
        assert found.metrics["eval_f1"] == 0.5


def test_what_is_evaluated_while_training_is_told_and_written(trained):
    trainer, heard, outcome = trained
    assert [entry["eval_loss"] for entry in heard.evaluations] == [entry.loss for entry in outcome.heldout_losses]
    assert [entry.steps_done for entry in outcome.heldout_losses] == [3, 6]
    assert heard.evaluations[-1]["eval_accuracy"] == trainer.evaluate()["eval_accuracy"]
    lines = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["event"] == "evaluation"]
    assert [(line["step"], line["eval_loss"]) for line in evaluated] == [
        (entry.steps_done, entry.loss) for entry in outcome.heldout_losses
    ]
    assert all(line["tokens_per_s"] > 0 for line in lines if line["event"] == "step")
    assert {"step-2", "step-3", "step-6"} <= set(heard.saved)
    trained_logs = [logs for _, logs in heard.logs if "loss" in logs]
    assert [logs["loss"] for logs in trained_logs] == pytest.approx(
        [np.mean(outcome.losses[:3]), np.mean(outcome.losses[3:])]
    )
    assert heard.logs[-1][1]["train_loss"] == outcome.training_loss


def test_the_saved_model_is_what_transformers_loads_with_its_tokenizer(trained, tmp_path):
    trainer, _, _ = trained
    folder = trainer.save_model(tmp_path / "model")
    model = BertForSequenceClassification.from_pretrained(folder)
    for name, tensor in trainer.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="not empty"):
        trainer.save_model(folder)


class NoBetter(TrainerCallback):
    """Ends a run whose evaluations get no better."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        control.should_training_stop = state.best_metric is not None and metrics["eval_loss"] > state.best_metric - 1e-6


def test_callbacks_for_transformers_are_called(built, tmp_path):
    stopping = NoBetter()
    trainer = spantrain.Trainer(
        built.build,
        args=arguments(tmp_path / "run", max_steps=30, eval_steps=2, learning_rate=1e-12, train_batch_size=2),
        measure=False,
        callbacks=[stopping],
    )
    assert trainer.fit().steps < 30


def test_parts_that_do_not_fit_are_refused(built, tokenizer, tmp_path):
    def refused(match: str, **parts) -> None:
        with pytest.raises(ConfigError, match=match):
            spantrain.Trainer(built.build, args=arguments(tmp_path / "run", eval_steps=1), **parts)

    trainer = spantrain.Trainer(
        built.build, data=Texts(8, 0), args=arguments(tmp_path / "run"), measure=False,
        data_collator=DataCollatorWithPadding(tokenizer, padding="max_length", max_length=12),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"input_ids has \[12\] numbers a sample, but the example .* \[8\]: pad"):
        trainer.train()
    trainer = spantrain.Trainer(
        built.build, data=Texts(32, 0), args=arguments(tmp_path / "run"), measure=False,
        data_collator=lambda rows: DataCollatorWithPadding(tokenizer, padding="max_length", max_length=8)(rows[:3]),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"data_collator: made 3 samples of \d+; make one of each"):
        trainer.train()
    refused("there is no compute_metric; it is compute_metrics", compute_metric=accuracy)
    refused("there is no train_dataset; it is data", train_dataset=Texts(3, 0))
    refused("data_collator: a int is no function", data=Texts(3, 0), data_collator=3)
    refused("data_collator: goes with a data set in this process", data_collator=dict)
    refused("has no save_pretrained", processing_class=3)
    refused("tokenizer: a Tokenizer.* is no file or folder; give it as processing_class", tokenizer=tokenizer)
    refused("no held-out part; give eval_dataset", data=Texts(3, 0))


class Named(Texts):
    """With a label for each token."""

    def __getitem__(self, index: int) -> dict:
        row = super().__getitem__(index)
        del row["label"]
        return row | {"labels": row["input_ids"]}


def test_a_tokenizer_pads_what_nobody_collates(built, tokenizer, tmp_path):
    """As transformers does, to the length of the example batch: the same losses as with a collator that says so."""

    def losses(name: str, **parts) -> tuple[float, ...]:
        trainer = spantrain.Trainer(
            built.build, data=Texts(16, seed=1), args=arguments(tmp_path / name, max_steps=2, logging_steps=0),
            measure=False, **parts,
        )  # fmt: skip
        return trainer.train().losses

    collator = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=8)
    assert losses("a", processing_class=tokenizer) == losses("b", data_collator=collator)


def test_samples_of_unlike_lengths_are_refused_by_field(built, tokenizer, tmp_path):
    def refused(match: str, data, **parts) -> None:
        trainer = spantrain.Trainer(built.build, data=data, args=arguments(tmp_path / "run"), measure=False, **parts)
        with pytest.raises(ConfigError, match=match):
            trainer.train()
        assert not (tmp_path / "run").exists()

    refused(r"data: input_ids of samples have shapes .*processing_class=tokenizer", Texts(16, seed=1))
    refused(r"processing_class: raised ValueError.*labels are of unlike lengths.*DataCollatorForSeq2Seq",
            Named(16, seed=1), processing_class=tokenizer)  # fmt: skip
    long = [{"input_ids": [7] * size, "attention_mask": [1] * size, "label": 0} for size in (4, 12)]
    refused(r"input_ids, attention_mask are of unlike lengths.*truncate in the data set to 8, the length",
            long, processing_class=tokenizer)  # fmt: skip
    refused(r"input_ids has \[12\] numbers a sample.*pad or truncate", long[1:] * 8, processing_class=tokenizer)
    bare = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer)
    refused(r"processing_class: raised ValueError: .*pad", Texts(16, seed=1), processing_class=bare)
