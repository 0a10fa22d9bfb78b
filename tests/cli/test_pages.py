"""What the pages tell users to type is there, and the README's commands do what it says."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from spantrain.cli.main import add_commands, app
from testing.pages import PAGES, ROOT, commands_in

NOT_RUN = {
    "init": "asks other machines",
    "doctor": "asks other machines",
    "launch": "asks other machines",
    "profile": "takes a minute; the profile is one by the devices' law here",
    "plan --offers": "takes minutes",
    "plan --preset": "takes ten seconds; the tutorial's is run",
    "plan runs/p/profile.json --global-batch 64 --strategy all": "takes minutes",
    "train": "takes minutes; the tutorial's is run",
    "export": "of what was trained",
    "why": "of what was trained",
    "validate": "of what was trained",
    "compare": "takes minutes",
    "outer": "takes minutes",
    "testbed": "stays until it is ended",
    "--install-completion": "changes the files that a shell begins with; test_completion.py has some of its own",
}
ADDED = {"contributing.md"}
"""Pages that show how commands are added."""


@pytest.fixture(scope="module")
def program() -> Any:
    """The group of all commands, as typer makes it."""
    add_commands(app, ["compare"])
    return typer.main.get_command(app)


def unknown(group: Any, words: list[str]) -> list[str]:
    """The words that are no command, or no option of the one before them."""
    command, left, wrong = group, list(words), []
    while hasattr(command, "commands") and left and re.fullmatch(r"[a-z][a-z-]+", left[0]):
        name = left.pop(0)
        inner = command.commands.get(name)
        if inner is None:
            return [name]
        command = inner
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    for at, word in enumerate(left):
        if word == "--" and command.name in ("launch", "run"):
            return wrong + (unknown(group, left[at + 1 :]) if command.name == "launch" else [])
        option = word.partition("=")[0].strip("[](),.")
        if re.fullmatch(r"--[a-z][a-z-]*", option) and option not in known:
            wrong.append(f"{command.name} {option}")
    return wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ADDED], ids=lambda page: page.name)
def test_each_command_of_a_page_is_one_and_has_these_options(program, page):
    wrong = [(words, found) for words in commands_in(page.read_text("utf-8")) if (found := unknown(program, words))]
    assert not wrong


def test_the_readmes_commands_run_in_their_order(spantrain, profile_path, tmp_path, monkeypatch):
    """Those that need no other machine and no minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("runs/p").mkdir(parents=True)
    shutil.copy(profile_path, "runs/p")
    text = (ROOT / "README.md").read_text("utf-8").partition("\n## Step by step\n")[2].partition("\n## ")[0]
    commands = [words for words in commands_in(text[: text.index("[What `--page` shows]")]) if words]
    run = [words for words in commands if not " ".join(words).startswith(tuple(NOT_RUN))]
    assert len(run) > 4
    for words in run:
        ended = spantrain(*words)
        assert ended.code == 0, (words, ended.err)
        assert ended.out
