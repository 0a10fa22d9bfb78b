"""Errors that nobody foresaw: one message, the traceback in a file, exit code 70; and Ctrl-C wherever it comes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from spantrain.cli.main import app
from spantrain.version import VERSION
from testing.patience import PATIENCE_S


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Give the program a command that raises something; return how it is told what."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = list(app.registered_commands)

    def raising(error: BaseException) -> None:
        @app.command("fail")
        def fail(out: Path = Path("none"), token: str = "", depth: int = 0) -> None:
            del out, token
            raise error if not depth else _deep()

    yield raising
    app.registered_commands[:] = before


def _deep() -> RecursionError:
    try:
        return _deep()
    except RecursionError as error:
        return error


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("spantrain-error-*.log"))


def test_one_message_and_the_traceback_in_a_file(failing, spantrain, tmp_path):
    failing(KeyError("units"))
    ended = spantrain("fail", "--token", "secret1", "--token=secret2")
    assert (ended.code, ended.out) == (70, "")
    (log,) = logs(tmp_path / "state" / "spantrain")
    assert ended.err.startswith(
        "Error: an error of SpanTrain itself while doing `spantrain fail --token ... --token=...`"
    )
    assert "KeyError: 'units'" in ended.err
    assert str(log) in ended.err
    assert "Traceback" not in ended.err
    assert "secret" not in ended.err + log.read_text()
    assert "Traceback (most recent call last)" in log.read_text()
    assert "spantrain 0." in log.read_text()


def test_the_runs_folder_is_where_it_goes_if_it_is_there(failing, spantrain, tmp_path):
    failing(AssertionError())
    assert spantrain("fail", "--out", tmp_path).code == 70
    assert len(logs(tmp_path)) == 1
    assert spantrain("fail", "--out", tmp_path / "new").code == 70
    assert not (tmp_path / "new").exists()


def test_the_terminal_gets_it_where_no_file_can_be_written_or_if_that_is_asked(
    failing, spantrain, monkeypatch, tmp_path
):
    failing(ValueError("two\nlines"))
    ended = spantrain("--traceback", "fail", "--out", tmp_path)
    assert (ended.code, ended.err.count("Traceback")) == (70, 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    away.rmdir()
    ended = spantrain("fail")
    assert (ended.code, ended.err.count("Traceback")) == (70, 1)


def test_calls_without_end_and_too_little_memory(failing, spantrain, tmp_path):
    failing(MemoryError())
    ended = spantrain("fail")
    assert (ended.code, ended.err) == (1, "Error: this machine's memory does not suffice for that\n")
    ended = spantrain("fail", "--depth", 1, "--out", tmp_path)
    assert ended.code == 70
    assert "RecursionError" in ended.err
    assert ended.err.count("\n") == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c_is_no_error(failing, spantrain, error):
    failing(error)
    ended = spantrain("fail")
    assert ended.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in ended.err


def test_ctrl_c_while_the_program_is_loaded():
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'spantrain.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from spantrain.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=os.environ
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_versions_for_a_report(spantrain):
    ended = spantrain("--version")
    first, python, torch, *_, libzmq = ended.out.splitlines()
    assert first == f"spantrain {VERSION}"
    assert python.startswith("Python 3.")
    assert re.fullmatch(r"torch 2\.\S+, made for (cuda|hip|xpu|processors) .+", torch)
    assert re.fullmatch(r"libzmq 4\.\S+, with CURVE", libzmq)
