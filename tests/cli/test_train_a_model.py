"""`spantrain train --model`: a user's model and data in a file, measured, planned and trained in one command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILE = """\
import torch
from torch import nn
from torch.nn import functional


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row, row[:4].argmax()


def build():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 4)), (torch.zeros(2, 8), torch.zeros(2).long()), functional.cross_entropy


def samples():
    return Samples()
"""
CLUSTER = Path(__file__).parents[2] / "examples" / "one-machine.yaml"


def test_a_users_model_on_a_users_data(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    words = (
        "train", "--model", "mine.py:build", "--data", "mine.py:samples", "--cluster", CLUSTER, "--steps", 4,
        "--global-batch", 16, "--learning-rate", 0.05, "--warmup-steps", 0, "--evaluate-every", 4, "--json",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "spantrain", *map(str, words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    assert len(outcome["losses"]) == 4
    assert [entry["steps_done"] for entry in outcome["heldout_losses"]] == [0, 4]
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"The run's folder: runs/{folder.name}" in ended.stderr
    assert {"profile.json", "plan.json", "trace.json", "checkpoint", "logs"} <= {path.name for path in folder.iterdir()}
