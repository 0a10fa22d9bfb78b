"""Output that nobody reads to its end, or that is narrow: no failure, no traceback, lines as wide as asked."""

import os
import subprocess
import sys

import pytest

from testing.patience import PATIENCE_S

PLAN = ("plan", "--preset", "laptop", "--model", "gpt2-tiny", "--global-batch", "8", "--strategy", "single-device")
WORDS = {
    "rich tables": PLAN,
    "lines": ("testbed", "traces"),
    "JSON": ("testbed", "traces", "--json"),
    "help": ("train", "--help"),
    "version": ("--version",),
}


def program(words: tuple[str, ...], out: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spantrain", *words]
    return subprocess.run(
        command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_reader_that_has_gone_is_no_failure(name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = program(WORDS[name], writing)
    finally:
        os.close(writing)
    assert ended.returncode == 0, ended.stderr
    assert not any(word in ended.stderr for word in ("Traceback", "Broken", "Exception", "Error")), ended.stderr


@pytest.mark.parametrize("columns", [80, 100])
def test_a_pipe_is_as_wide_as_columns_says(columns, tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as stream:
        assert program(PLAN, stream.fileno(), COLUMNS=str(columns)).returncode == 0
    widths = [len(line) for line in out.read_text().splitlines()]
    assert max(widths) <= columns
    assert max(widths) > columns - 20


@pytest.mark.parametrize("columns", ["0", "9999999999", "wide", ""])
def test_columns_that_are_none_are_not_followed(columns, tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as stream:
        assert program(("testbed", "traces"), stream.fileno(), COLUMNS=columns).returncode == 0
    assert "drop-NN" in out.read_text()


@pytest.mark.parametrize("name", WORDS)
def test_output_on_a_full_disk_is_one_message(name):
    with open("/dev/full", "wb") as full:
        ended = program(WORDS[name], full.fileno())
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.endswith(
        "Error: what it prints cannot be written: No space left on device; make room, and do it again\n"
    )
    assert "traceback" not in ended.stderr.lower()


def test_a_log_on_a_full_disk_changes_nothing():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "spantrain", "explain", "no-such-plan.json"]
        assert subprocess.run(command, stderr=full, timeout=PATIENCE_S, check=False).returncode == 2


def test_outputs_that_were_closed_from_the_beginning_are_no_failure():
    words = f"exec {sys.executable} -m spantrain --version >&- 2>&-"
    assert subprocess.run(["sh", "-c", words], timeout=PATIENCE_S, check=False).returncode == 0
