"""Adapters over two places, with real workers, beside the library's own trainer."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


def test_each_loss_is_that_of_transformers_trainer_with_peft(tmp_path, monkeypatch, capsys):
    found = importlib.util.spec_from_file_location("finetune_lora", EXAMPLE)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "finetune_lora", module)
    found.loader.exec_module(module)
    assert module.main(steps=4) < 1e-4
    assert not module.BASE.exists()
    shown = capsys.readouterr().out
    assert "on lab, home, beside" in shown
    assert sum(line.strip()[:1].isdigit() for line in shown.splitlines()) == 4
