"""The page of results says what benchmarks have left, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "scripts" / "results_page.py"


def ran(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What two benchmarks have left: one with a picture, one that nobody has heard of."""
    folder = tmp_path / "results"
    folder.mkdir()
    head = "2026-01-02 03:04 UTC, 2 cores, commit abc"
    (folder / "convergence.txt").write_text(f"{head}\n\nmodel  steps\nsmall     50   \n\nholds\n")
    (folder / "convergence.json").write_text(json.dumps({"emulated": "devices' time"}))
    (folder / "convergence.svg").write_text("<svg/>")
    (folder / "novelty.txt").write_text(f"{head}\n\n42\n")
    (folder / "novelty.json").write_text(json.dumps({"emulated": "\nthe moon\nand more"}))
    return folder


def test_the_page_agrees_with_the_folder():
    found = ran("--check")
    assert found.returncode == 0, found.stderr


def test_a_result_stands_there_with_its_table_its_picture_and_where_it_is_from(left: Path, tmp_path: Path):
    page = tmp_path / "results.md"
    assert ran("--folder", left, "--page", page).returncode == 0
    text = page.read_text()
    assert "```text\nmodel  steps\nsmall     50\n\nholds\n```" in text
    assert "`convergence`: 2026-01-02 03:04 UTC, 2 cores, commit abc; [json](results/convergence.json), [svg]" in text
    assert "![convergence](results/convergence.svg)" in text
    assert "![novelty]" not in text
    assert "Emulated: the moon." in text
    assert text.index("## Steps to a target loss") < text.index("## novelty")


def test_another_result_is_noticed(left: Path, tmp_path: Path):
    page = tmp_path / "results.md"
    missing = ran("--check", "--folder", left, "--page", page)
    assert missing.returncode == 1
    assert not page.exists()
    ran("--folder", left, "--page", page)
    assert ran("--check", "--folder", left, "--page", page).returncode == 0
    (left / "novelty.txt").write_text("2026-01-02 03:04 UTC\n\n43\n")
    stale = ran("--check", "--folder", left, "--page", page)
    assert stale.returncode == 1
    assert "run: python scripts/results_page.py" in stale.stderr
