"""`dropout off`, by the trainer and on the command line, is the model in evaluation mode; `on` is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import spantrain
from spantrain.errors import ConfigError, PlanError
from testing.patience import PATIENCE_S
from testing.small_files import imported, trained_plainly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 3
FILE = '''\
"""A model that drops a half, on eight samples."""

import torch
from torch import nn
from torch.nn import functional


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, 4))
    return model, (torch.randn(8, 8), torch.arange(8) % 4), functional.cross_entropy
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's file, imported."""
    return imported(tmp_path / "half.py", FILE, monkeypatch)


def trainer(mine, out: Path, **given) -> spantrain.Trainer:
    plan = {"plan": given.pop("plan")} if "plan" in given else {}
    arguments = spantrain.TrainingArguments(
        output_dir=out, max_steps=STEPS, train_batch_size=8, learning_rate=0.05, weight_decay=0.01,
        parameter_groups="all", lr_scheduler_type="constant", logging_steps=0, batch_norm="frozen", **given,
    )  # fmt: skip
    return spantrain.Trainer(mine.build, args=arguments, measure=False, **plan)


def test_the_trainer_and_a_plan_that_was_made_for_it(mine, tmp_path):
    losses = trained_plainly(mine, STEPS, training=False)
    off = trainer(mine, tmp_path / "off", dropout="off").train()
    assert off.losses == pytest.approx(losses, rel=1e-5)
    assert any("dropout" in line for line in off.left_out)
    on = trainer(mine, tmp_path / "on").train()
    assert abs(on.losses[0] - losses[0]) > 1e-2
    assert not any("dropout" in line for line in on.left_out)
    with pytest.raises(PlanError, match="dropout on: the plan was made for off; say that, or plan again"):
        trainer(mine, tmp_path / "other", plan=tmp_path / "off" / "plan.json").train()
    with pytest.raises(ConfigError, match="dropout must be on or off, got True"):
        spantrain.TrainingArguments(dropout=True)


def test_the_command_line(mine, tmp_path):
    words = (
        "train", "--model", f"{mine.__file__}:build", "--cluster",
        Path(__file__).parents[2] / "examples" / "one-machine.yaml", "--steps", STEPS, "--global-batch", 8,
        "--learning-rate", 0.05, "--warmup-steps", 0, "--dropout", "off", "--batch-norm", "frozen", "--json",
        "--out", tmp_path / "run",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "spantrain", *map(str, words)],
        capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    assert outcome["losses"] == pytest.approx(trained_plainly(mine, STEPS, training=False), rel=1e-5)
    assert any("dropout" in line for line in outcome["left_out"])
