"""A small model in a file, as users bring them."""

from pathlib import Path

import pytest

FILE = '''\
"""A model, a loss and data, as a user might write them."""

import torch
from torch import nn
from torch.nn import functional


class Samples:
    def __init__(self, count, held_out=False):
        self.count, self.shift = count, 1000 * held_out

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = torch.randn(8, generator=torch.Generator().manual_seed(index + self.shift))
        return row, row[:4].argmax()


class Named(Samples):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return {"labels": label, "extra": 1.0, "shift": row[:4], "values": row}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, values, shift):
        return self.second(torch.tanh(self.first(values)) + shift)


def build():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 4)), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64))


def build_named():
    batch = {"values": torch.zeros(2, 8), "shift": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    return TwoInputs(), batch, loss


def loss(scores, labels):
    return functional.cross_entropy(scores, labels, reduction="none")


def samples(held_out=False):
    return Samples(8 if held_out else 48, held_out)


def few_samples():
    return Named(32)


def broken():
    raise RuntimeError("no data today")


def nothing():
    return 3


def leaving():
    raise SystemExit(4)


class Torn(Samples):
    def __getitem__(self, index):
        if index == 1:
            raise KeyError(index)
        return super().__getitem__(index)


def torn():
    return Torn(20)


hidden = lambda: None
'''


@pytest.fixture
def user_file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path
