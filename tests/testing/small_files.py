"""A user's file with `build()`, imported; and its model trained as people do in plain PyTorch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def imported(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write a file and import it, as long as the test runs."""
    path.write_text(text)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, path.stem, module)
    found.loader.exec_module(module)
    return module


def trained_plainly(mine: ModuleType, steps: int, *, training: bool) -> list[float]:
    """Train the unsplit model, in training or evaluation mode; return its losses."""
    model, (inputs, labels), loss = mine.build()
    optimizer = torch.optim.AdamW(model.train(training).parameters(), lr=0.05, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(inputs), labels)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses
