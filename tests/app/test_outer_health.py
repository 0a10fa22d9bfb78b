"""Master and shards that run and do not work: found by what the master says, ended, and started again."""

import os
import signal
import threading
from pathlib import Path

import pytest

from spantrain.app.outer.up import MASTER, Health, OuterUp, keep_up
from spantrain.outer.outer_file import load_outer
from testing.patience import until
from testing.programs import process_of_log

STARTED = {MASTER: 0.0, "s0": 0.0, "s1": 0.0}


def health() -> Health:
    return Health(["s0", "s1"], patience_s=60.0)


def test_a_shard_that_the_master_has_not_heard_of_for_long_is_ended_and_has_twice_as_long_then():
    found = health()
    for now_s in range(0, 60, 5):
        found.answered(now_s, {"s0": True, "s1": False})
        assert not found.sick(now_s, STARTED)
    found.answered(60.0, {"s0": True, "s1": False})
    ((name, why),) = found.sick(60.0, STARTED)
    assert name == "s1"
    assert "the master has not heard of it for 60 s, though its process runs" in why
    again = STARTED | {"s1": 62.0}
    found.answered(181.0, {"s0": True, "s1": False})
    assert not found.sick(181.0, again)
    found.answered(182.0, {"s0": True, "s1": False})
    assert [name for name, _ in found.sick(182.0, again)] == ["s1"]


def test_a_shard_has_time_to_come_back_after_a_master_that_was_away():
    found = health()
    found.answered(0.0, {})
    found.answered(0.0, None)
    found.answered(100.0, {"s0": False, "s1": False})
    assert not found.sick(159.0, STARTED)
    found.answered(160.0, {"s0": True, "s1": False})
    assert [name for name, _ in found.sick(160.0, STARTED)] == ["s1"]


def test_a_master_that_answers_no_more_is_ended_and_nobody_else_is_judged_meanwhile():
    found = health()
    found.answered(10.0, {"s0": False})
    found.answered(0.0, None)
    assert not found.sick(69.0, STARTED)
    assert [name for name, _ in found.sick(500.0, STARTED)] == [MASTER]


def test_a_master_that_never_answered_is_left_alone():
    found = health()
    found.answered(0.0, None)
    assert not found.sick(1e6, STARTED)


def test_who_is_down_or_told_to_end_is_not_judged():
    found = health()
    found.answered(0.0, {"s0": False})
    assert not found.sick(1000.0, {MASTER: 0.0})


CONFIG = """\
name: here
master: {address: "127.0.0.1:0", state: master}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: s0}
settings: {lost_after: 3 s}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shard_that_hangs_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "outer.yaml"
    path.write_text(CONFIG)
    stop, up, notes = threading.Event(), list[OuterUp](), list[str]()
    thread = threading.Thread(
        target=keep_up, args=(load_outer(path), path, stop),
        kwargs={"ready": up.append, "note": notes.append, "patience_s": 4.0},
    )  # fmt: skip
    thread.start()
    try:
        until(lambda: up and any("connected" in line for line in (up[0].logs / "master.log").read_text().splitlines()))
        os.kill(process_of_log(up[0].logs / "s0.log"), signal.SIGSTOP)
        until(lambda: "s0 was started again" in notes)
        assert any(note.startswith("s0 is ended: the master has not heard of it for") for note in notes)
        assert not any(note.startswith("master") for note in notes)
    finally:
        stop.set()
        thread.join()
