"""Layers are compiled, by the trainer and on the command line: the losses are those of layers as they are written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import spantrain
from spantrain.errors import PlanError
from testing.patience import PATIENCE_S
from testing.small_files import imported, trained_plainly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 3
FILE = '''\
"""A model of layers that are alike, on eight samples."""

import torch
from torch import nn
from torch.nn import functional


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 4)), (torch.randn(8, 8), torch.arange(8) % 4), functional.cross_entropy
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's file, imported."""
    return imported(tmp_path / "alike.py", FILE, monkeypatch)


def trainer(mine, out: Path, **given) -> spantrain.Trainer:
    plan = {"plan": given.pop("plan")} if "plan" in given else {}
    arguments = spantrain.TrainingArguments(
        output_dir=out, max_steps=STEPS, train_batch_size=8, learning_rate=0.05, weight_decay=0.01,
        parameter_groups="all", lr_scheduler_type="constant", logging_steps=0, **given,
    )  # fmt: skip
    return spantrain.Trainer(mine.build, args=arguments, measure=False, **plan)


def test_the_trainer_and_a_plan_that_was_made_for_it(mine, tmp_path):
    found = trainer(mine, tmp_path / "compiled", torch_compile=True).train()
    assert found.losses == pytest.approx(trained_plainly(mine, STEPS, training=True), rel=1e-4)
    assert json.loads((tmp_path / "compiled" / "plan.json").read_text())["model"]["compiled"] is True
    with pytest.raises(PlanError, match="torch_compile False: the plan was made for True; say that, or plan again"):
        trainer(mine, tmp_path / "other", plan=tmp_path / "compiled" / "plan.json").train()


def test_the_command_line(mine, tmp_path):
    words = (
        "train", "--model", f"{mine.__file__}:build", "--cluster",
        Path(__file__).parents[2] / "examples" / "one-machine.yaml", "--steps", STEPS, "--global-batch", 8,
        "--learning-rate", 0.05, "--warmup-steps", 0, "--compile", "--json", "--out", tmp_path / "run",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "spantrain", *map(str, words)],
        capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["losses"] == pytest.approx(trained_plainly(mine, STEPS, training=True), rel=1e-4)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["model"]["compiled"] is True
