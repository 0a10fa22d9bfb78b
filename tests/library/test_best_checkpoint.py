"""The best checkpoint, beside the transformers library's own trainer: the same metric, step and weights."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback

import spantrain
from spantrain.app.training.metrics import BestCheckpoint, EvaluationMetrics
from spantrain.app.watching.view import read_view
from spantrain.app.weights import export_run
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import latest_checkpoint

BATCH, STEPS = 8, 14
FILE = '''\
"""A classifier that learns eight samples by heart."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification


class Samples:
    def __init__(self, count, seed):
        random = np.random.default_rng(seed)
        self.rows = [(random.integers(5, 40, size=8).tolist(), int(random.integers(3))) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids, label = self.rows[index]
        return {"input_ids": ids, "attention_mask": [1] * 8, "labels": label}


def build():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    ids, labels = torch.ones(2, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return BertForSequenceClassification(config), batch


def samples(held_out=False):
    return Samples(8, seed=2 if held_out else 1)
'''
COMMON = {
    "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "seed": 3,
    "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The user's file, imported."""
    path = tmp_path_factory.mktemp("user") / "by_heart.py"
    path.write_text(FILE)
    found = importlib.util.spec_from_file_location("by_heart", path)
    module = sys.modules["by_heart"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules["by_heart"]


def scored(found) -> dict[str, float]:
    """A smooth score, so that no two evaluations are alike."""
    chances = torch.as_tensor(found.predictions).softmax(-1).numpy()
    return {"chance": float(np.take_along_axis(chances, found.label_ids[:, None], 1).mean())}


def theirs(mine, out: Path, callbacks=(), **given) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=out, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, use_cpu=True,
        report_to="none", disable_tqdm=True, **{**COMMON, **given},
    )  # fmt: skip
    trainer = transformers.Trainer(
        mine.build()[0], arguments, train_dataset=mine.samples(), eval_dataset=mine.samples(held_out=True),
        compute_metrics=scored, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def ours(mine, out: Path, data, callbacks=(), parts=None, **given) -> spantrain.Trainer:
    arguments = spantrain.TrainingArguments(
        output_dir=out, train_batch_size=BATCH, logging_steps=0, **{**COMMON, **given}
    )
    return spantrain.Trainer(
        mine.build, data=data, args=arguments, measure=False, callbacks=list(callbacks), **(parts or {})
    )


def check_alike(trainer: spantrain.Trainer, wanted: transformers.Trainer) -> None:
    assert trainer.state.best_metric == pytest.approx(wanted.state.best_metric, rel=1e-4)
    assert trainer.state.best_global_step == wanted.state.best_global_step
    best = Path(trainer.state.best_model_checkpoint).name
    assert best == Path(wanted.state.best_model_checkpoint).name.replace("checkpoint", "step")
    found = trainer.state_dict()
    for name, tensor in wanted.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "given",
    [
        {"metric_for_best_model": "chance"},
        {"save_steps": 4, "save_total_limit": 2},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": STEPS},
    ],
)
def test_the_best_is_that_of_transformers(given, mine, tmp_path):
    wanted = theirs(mine, tmp_path / "theirs", [EarlyStoppingCallback(2)], **given)
    trainer = ours(
        mine, tmp_path / "ours", mine.samples(), [EarlyStoppingCallback(2)],
        {"eval_dataset": mine.samples(held_out=True), "compute_metrics": scored}, **given,
    )  # fmt: skip
    outcome = trainer.train()
    assert 2 < wanted.state.best_global_step < outcome.steps == wanted.state.global_step < STEPS
    if "save_steps" not in given:  # here an evaluation writes a checkpoint in any case
        check_alike(trainer, wanted)
    kept = {path.name for path in (tmp_path / "ours" / "checkpoint").glob("step-*")}
    assert kept == {f"step-{trainer.state.best_global_step}", f"step-{outcome.steps}"}
    losses = {entry.steps_done: entry.loss for entry in outcome.heldout_losses}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[trainer.state.best_global_step], rel=1e-5)
    exported = export_run(trainer.output_dir, tmp_path / "hf", functions=(f"{mine.__file__}:build",))
    assert exported.steps == trainer.state.best_global_step
    assert Path(outcome.checkpoint) == latest_checkpoint(trainer.output_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_devices_that_evaluate_keep_the_best_which_a_run_that_goes_on_knows(mine, tmp_path):
    wanted = theirs(mine, tmp_path / "theirs", max_steps=10)
    first = ours(mine, tmp_path / "ours", mine.samples, max_steps=8)
    first.train()
    trainer = ours(mine, tmp_path / "ours", mine.samples, max_steps=10, resume_from_checkpoint=True)
    trainer.train()
    check_alike(trainer, wanted)
    assert wanted.state.best_global_step < 8
    evaluated = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in evaluated if line["event"] == "evaluation"]
    assert steps == [0, 2, 4, 6, 8, 10]
    assert [step for step, _ in read_view(tmp_path / "ours").evaluations] == steps
    torch.testing.assert_close(dict(trainer.model.state_dict()), trainer.state_dict())
    ours(mine, tmp_path / "ours", mine.samples, max_steps=12, resume_from_checkpoint=True,
         load_best_model_at_end=False).train()  # fmt: skip
    assert not (tmp_path / "ours" / "checkpoint" / "best").exists()
    functions = tuple(f"{mine.__file__}:{name}" for name in ("build", "samples"))
    assert export_run(tmp_path / "ours", tmp_path / "hf", functions=functions).steps == 12


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_devices_that_evaluate_stop_early_with_the_same_best(mine, tmp_path):
    """By when an evaluation is known some of the next steps have run, which take a moment each."""
    wanted = theirs(mine, tmp_path / "theirs", [EarlyStoppingCallback(2)], max_steps=500)
    trainer = ours(mine, tmp_path / "ours", mine.samples, [EarlyStoppingCallback(2)], max_steps=500)
    outcome = trainer.train()
    check_alike(trainer, wanted)
    assert wanted.state.global_step < outcome.steps < 500
    assert trainer.evaluate(mine.samples(held_out=True))["eval_loss"] == pytest.approx(
        wanted.state.best_metric, rel=1e-4
    )


def test_metrics_that_nobody_measures_are_refused(mine, tmp_path):
    def refused(match: str, data, parts=None, **given) -> None:
        with pytest.raises(ConfigError, match=match):
            ours(mine, tmp_path / "run", data, parts=parts, **given)

    own = {"eval_dataset": mine.samples(held_out=True)}
    refused("metric_for_best_model f1: .* compute_metrics", mine.samples(), own, metric_for_best_model="f1")
    refused("devices evaluate the loss alone", mine.samples, metric_for_best_model="eval_f1")
    best = BestCheckpoint(metric="eval_f1")
    with pytest.raises(ConfigError, match="metric_for_best_model eval_f1: the evaluation has eval_loss, eval_chance"):
        best.evaluated(EvaluationMetrics(step=2, eval_loss=1.0, more={"eval_chance": 0.5}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"eval_strategy": "no", "eval_steps": 0}, "to be the same, steps or epoch; got no and steps"),
        ({"save_strategy": "epoch", "max_steps": -1}, "got steps and epoch"),
        ({"save_steps": 3}, "save_steps to be a multiple of eval_steps; got 3 and 2"),
        ({"metric_for_best_model": 3}, "metric_for_best_model must be the name of a metric, got 3"),
    ],
)
def test_strategies_that_leave_the_best_unknown_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        spantrain.TrainingArguments(**{**COMMON, **given})


def test_what_is_greater_is_better_of_all_but_losses():
    asked = spantrain.TrainingArguments
    assert asked().greater_is_better is asked(metric_for_best_model="eval_my_loss").greater_is_better is False
    assert asked(metric_for_best_model="f1").greater_is_better is True
    assert asked(metric_for_best_model="f1", greater_is_better=False).greater_is_better is False
