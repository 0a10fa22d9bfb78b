"""Master and shards of this machine: started again when they end, in order, and nothing left behind."""

import os
import re
import time
from pathlib import Path

import psutil
import pytest

from spantrain.app.outer.up import ProcessSupervisor
from spantrain.errors import UsageError
from spantrain.transport.control.credentials import Credentials
from testing.patience import PATIENCE_S

CONFIG = """\
name: here
master: {address: "127.0.0.1:0", state: .}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: s0}
"""


def look_until(supervisor: ProcessSupervisor, done) -> None:
    """Look, an hour later each time, so that no pause is waited for."""
    end_s = time.monotonic() + PATIENCE_S
    hour = 0
    while not done():
        assert time.monotonic() < end_s
        supervisor.look(3600.0 * (hour := hour + 1))
        time.sleep(0.02)


def test_pauses_grow_up_to_a_limit_and_are_forgotten_after_a_calm_run(tmp_path: Path) -> None:
    notes: list[str] = []
    now_s, end_s = 0.0, time.monotonic() + PATIENCE_S
    with ProcessSupervisor({"brief": ("--version",)}, tmp_path, notes.append) as supervisor:
        for number, ran_s in enumerate((0.0, 59.0, 0.0, 0.0, 0.0, 60.0), start=1):
            supervisor.look(now_s)
            now_s += ran_s
            while sum("ended" in note for note in notes) < number:
                assert time.monotonic() < end_s
                supervisor.look(now_s)
                time.sleep(0.02)
            now_s += 10.0
    pauses = [re.search(r"again in (\d+) s", note) for note in notes]
    assert [found[1] for found in pauses if found] == ["1", "2", "4", "8", "10", "1"]


@pytest.mark.usefixtures("plain_processes")
def test_what_ends_is_started_again_and_all_end_together(tmp_path: Path) -> None:
    notes: list[str] = []
    commands = {"brief": ("--version",), "long": ("testbed", "--help")}
    before = set(psutil.Process(os.getpid()).children())  # networks that tests of this process share
    with ProcessSupervisor(commands, tmp_path / "logs", notes.append) as supervisor:
        look_until(supervisor, lambda: sum("brief was started again" in note for note in notes) >= 2)
    assert any("brief ended with status 0; it is started again in 1 s" in note for note in notes)
    left = set(psutil.Process(os.getpid()).children()) - before
    assert not [child for child in left if "spantrain" in " ".join(child.cmdline())]
    assert "spantrain" in supervisor.log_of("brief").read_text()


def test_why_one_has_ended_is_told_with_it(tmp_path: Path) -> None:
    notes: list[str] = []
    token = Credentials.create().token.text
    lost = ("outer", "status", f"unix:{tmp_path}/nobody", "--token", token)
    with ProcessSupervisor({"s9": lost}, tmp_path, notes.append) as supervisor:
        look_until(supervisor, lambda: notes)
    assert re.match(rf"s9 ended with status \d: .*{tmp_path}/nobody.*; it is started again in 1 s", notes[0])


def test_wrong_input_is_not_tried_twice(tmp_path: Path) -> None:
    supervisor = ProcessSupervisor({"s9": ("no-such-verb",)}, tmp_path, lambda _: None)
    with supervisor, pytest.raises(UsageError, match="s9 ended with status 2"):
        look_until(supervisor, lambda: False)


def test_the_whole_message_of_wrong_input_is_told_and_no_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "s9.log").write_text("Error: of an earlier run\n")
    config = tmp_path / "outer.yaml"
    config.write_text(CONFIG)
    (tmp_path / "state.json").touch(mode=0o600)
    (tmp_path / "state.json").write_text("{}")
    words = ("outer", "master", str(config), "--end-with-input")
    supervisor = ProcessSupervisor({"s9": words}, tmp_path, lambda _: None)
    with supervisor, pytest.raises(UsageError) as caught:
        look_until(supervisor, lambda: False)
    told = str(caught.value)
    assert f"s9 ended with status 2: {config}: master.state: {tmp_path / 'state.json'}: fragments: is missing" in told
    assert "begin with another folder" in told
    assert "of an earlier run" not in told


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "s9.log").mkdir()
    supervisor = ProcessSupervisor({"s9": ("--version",)}, tmp_path, lambda _: None)
    with supervisor, pytest.raises(UsageError, match=r"s9\.log: cannot be written: Is a directory; move it away"):
        supervisor.look(0.0)


def test_nothing_starts_before_what_it_needs_is_there(tmp_path: Path) -> None:
    there: set[str] = set()
    with ProcessSupervisor(
        {"s0": ("--version",)}, tmp_path, lambda _: None, may_start=lambda name: name in there
    ) as supervisor:
        supervisor.look(0.0)
        assert not supervisor.log_of("s0").exists()
        there.add("s0")
        supervisor.look(1.0)
        assert supervisor.log_of("s0").exists()
