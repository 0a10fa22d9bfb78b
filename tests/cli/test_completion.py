"""Shells complete commands and options: what each of them asks, its script, and where that is installed."""

import os
import shutil
import subprocess
import sys

import pytest

from testing.machines import tool
from testing.patience import PATIENCE_S

ASKED = {
    "bash": {"COMP_WORDS": "spantrain tr", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "spantrain tr"},
    "fish": {"_TYPER_COMPLETE_ARGS": "spantrain tr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}
INSTALLED = {
    "bash": ".bash_completions/spantrain.sh",
    "zsh": ".zfunc/_spantrain",
    "fish": ".config/fish/completions/spantrain.fish",
}


@pytest.mark.parametrize("shell", ASKED)
def test_what_a_shell_asks_is_answered(spantrain, monkeypatch, shell):
    for name, value in {**ASKED[shell], "_SPANTRAIN_COMPLETE": f"complete_{shell}"}.items():
        monkeypatch.setenv(name, value)
    assert "train" in spantrain().out


@pytest.mark.parametrize("shell", INSTALLED)
def test_it_is_installed_where_the_shell_finds_it(tmp_path, shell):
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [sys.executable, "-m", "spantrain", "--install-completion", shell]
    subprocess.run(words, env={**os.environ, **home}, capture_output=True, check=True, timeout=PATIENCE_S)
    script = tmp_path / INSTALLED[shell]
    assert f"_SPANTRAIN_COMPLETE=complete_{shell}" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True, timeout=PATIENCE_S)


def test_bash_completes_with_it(tmp_path):
    tool(tmp_path, "spantrain", f'exec {sys.executable} -m spantrain "$@"')
    line = (
        'eval "$(_SPANTRAIN_COMPLETE=source_bash spantrain)"; '
        "COMP_WORDS=(spantrain why --js) COMP_CWORD=2; _spantrain_completion spantrain; echo ${COMPREPLY[@]}"
    )
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "-c", line]
    ended = subprocess.run(words, env=path, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert ended.stdout == "--json\n"
