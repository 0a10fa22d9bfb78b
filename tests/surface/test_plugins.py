"""What installed packages add by entry points: strategies, schedules and commands of theirs are asked like ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from spantrain import plugins
from spantrain.cli.main import add_commands
from spantrain.errors import UsageError
from testing.patience import PATIENCE_S

STRATEGY = """
from spantrain.planner.strategies.baselines import single_device
from spantrain.planner.strategies.registry import RegisteredStrategy

MINE = RegisteredStrategy(propose=single_device, description="the best device, once more")
"""

SCHEDULE = """
from spantrain.schedule.orders import in_turn, warm_up_counts
from spantrain.schedule.dispatch.registered import RegisteredSchedule

MINE = RegisteredSchedule(
    name="mine",
    description="two forwards warm up each stage",
    splits_backward=False,
    orders=lambda layout, split: in_turn(layout, warm_up_counts(layout, lambda _behind: 2), split=bool(split)),
)
"""


def package(folder: Path, code: str, group: str, entry: str) -> Path:
    """A folder as an installer leaves it: a module, and the metadata that names its entry point."""
    (folder / "my_addition.py").write_text(code)
    metadata = folder / "my_addition-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-addition\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return folder


def run(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "spantrain", *map(str, words)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def plan_with(installed: Path, strategies: str) -> subprocess.CompletedProcess[str]:
    words = ("--preset", "laptop", "--model", "gpt2-tiny", "--global-batch", 8, "--strategy", strategies, "--json")
    return run(installed, "plan", *words)


def test_a_package_adds_a_strategy(tmp_path):
    installed = package(tmp_path, STRATEGY, "spantrain.strategies", "mine = my_addition:MINE")
    ended = plan_with(installed, "mine,single-device")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["strategies"]
    assert found["mine"]["step_s"] == found["single-device"]["step_s"]


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        (STRATEGY, "auto = my_addition:MINE", ["'auto' of my-addition", "already"]),
        (STRATEGY, "mine = my_addition:YOURS", ["'mine' of my-addition (my_addition:YOURS)", "cannot be loaded"]),
        ("MINE = 3\n", "mine = my_addition:MINE", ["is a int, not a RegisteredStrategy"]),
    ],
)
def test_a_package_whose_strategy_is_none_is_named(tmp_path, code, entry, says):
    ended = plan_with(package(tmp_path, code, "spantrain.strategies", entry), "all")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for words in says:
        assert words in ended.stderr


def test_a_package_adds_a_schedule(tmp_path):
    installed = package(tmp_path, SCHEDULE, "spantrain.schedules", "mine = my_addition:MINE")
    ended = run(installed, "schedule", "show", "mine", "--stages", 2, "--micro-batches", 4)
    assert ended.returncode == 0, ended.stderr
    assert "mine" in ended.stdout
    near = run(installed, "schedule", "show", "mines", "--stages", 2, "--micro-batches", 4)
    assert near.returncode == 2
    assert "did you mean mine?" in near.stderr


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        (SCHEDULE, "gpipe = my_addition:MINE", ["gpipe", "my-addition"]),
        (SCHEDULE, "mine = my_addition:YOURS", ["mine", "my-addition", "cannot be loaded"]),
        ("MINE = 3\n", "mine = my_addition:MINE", ["mine", "my-addition"]),
    ],
)
def test_a_package_whose_schedule_is_none_is_named(tmp_path, code, entry, says):
    installed = package(tmp_path, code, "spantrain.schedules", entry)
    ended = run(installed, "schedule", "show", "1f1b", "--stages", 2, "--micro-batches", 4)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for words in says:
        assert words in ended.stderr


COMMAND = """
def mine(times: int = 1) -> None:
    \"\"\"Say something.\"\"\"
    print("said " * times)
"""


def test_a_package_adds_a_command(tmp_path):
    entries = "mine = my_addition:mine\nouter.mine = my_addition:mine"
    installed = package(tmp_path, COMMAND, "spantrain.commands", entries)
    for words in (["mine"], ["outer", "mine"]):
        ended = run(installed, *words, "--times", 2)
        assert (ended.returncode, ended.stdout) == (0, "said said \n")
    assert "Say something." in run(installed, "--help").stdout


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("plan = my_addition:mine", ["'plan' of my-addition", "already"]),
        ("mine = my_addition:COMMAND", ["'mine' of my-addition", "cannot be loaded"]),
    ],
)
def test_a_package_whose_command_is_none_is_named_and_ours_go_on(tmp_path, entry, says):
    installed = package(tmp_path, COMMAND, "spantrain.commands", entry)
    ended = run(installed, "mine")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    for words in says:
        assert words in ended.stderr
    assert run(installed, "schedule", "show", "gpipe", "--stages", 2, "--micro-batches", 4).returncode == 0


@pytest.mark.parametrize("words", [["compare"], ["outer", "demo"]])
def test_without_the_studies_their_command_says_what_to_install(monkeypatch, words):
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    app, outer = typer.Typer(), typer.Typer()
    app.command("ours")(lambda: None)
    outer.command("ours")(lambda: None)
    app.add_typer(outer, name="outer")
    add_commands(app, words)
    with pytest.raises(UsageError, match=rf"spantrain {' '.join(words)}.*pip install ./studies"):
        app([*words, "--preset", "laptop", "more"], standalone_mode=False)
