"""The outer optimizer's processes as users run them: a master, its status, all on one machine, no leftovers."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(300)

CONFIG = """\
name: here
master: {address: "127.0.0.1:0", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: state/s0}
inner_steps: 4
settings: {grace: 0.1 s}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outer.yaml"
    path.write_text(CONFIG)
    return path


@contextmanager
def running(*words: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "spantrain", "outer", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_with(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line.strip()
    raise AssertionError(f"{text!r} was not said, but: {''.join(seen)}")


def test_a_master_is_asked_how_it_stands_and_ends_when_told(spantrain, config) -> None:
    with running("master", config) as master:
        address = line_with(master, "master:").removeprefix("master: ")
        token_file = line_with(master, "token:").removeprefix("token: in ")
        by_file = json.loads(spantrain("outer", "status", config, "--json").out)
        by_address = json.loads(spantrain("outer", "status", address, "--token-file", token_file, "--json").out)
        assert by_file["address"] == by_address["address"] == address
        assert [shard["state"] for shard in by_file["shards"]] == ["away"]
        assert by_address["clusters"] == [], "who only asks is no cluster"
        shown = spantrain("outer", "status", config)
        assert "s0" in shown.out
        assert "away" in shown.out
        second = spantrain("outer", "master", config)
        assert second.code == 2
        assert "another master" in second.err
        master.send_signal(signal.SIGTERM)
        assert master.wait(PATIENCE_S) == 130


@pytest.mark.usefixtures("plain_processes")
def test_up_keeps_them_running_and_leaves_nothing(spantrain, config) -> None:
    import psutil

    with running("up", config, "--json") as up:
        assert up.stdout is not None
        text = ""
        for line in up.stdout:
            text += line
            if line.rstrip() == "}":
                break
        found = json.loads(text[text.index("{") :])
        assert Path(found["token_file"]).read_text().strip() == found["token"]
        until(lambda: shard_states(spantrain, config) == ["ready"] or shard_states(spantrain, config) == ["joining"])
        before = {child.pid for child in psutil.Process(up.pid).children()}
        shard = next(child for child in psutil.Process(up.pid).children() if {"shard", "s0"} <= set(child.cmdline()))
        shard.kill()
        line_with(up, "s0 was killed by signal 9; it is started again in 1 s")
        line_with(up, "s0 was started again")
        after = psutil.Process(up.pid).children()
        assert len(after) == 2
        assert {child.pid for child in after} != before
        up.send_signal(signal.SIGINT)
        assert up.wait(PATIENCE_S) == 130
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in after)


def shard_states(spantrain, config: Path) -> list[str]:
    ended = spantrain("outer", "status", config, "--json")
    return [shard["state"] for shard in json.loads(ended.out)["shards"]] if ended.code == 0 else []


def until(holds) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_shard_that_the_file_does_not_have_is_refused(spantrain, config) -> None:
    ended = spantrain("outer", "shard", config, "s7")
    assert ended.code == 2
    assert "no shard 's7'; it has s0" in ended.err


def test_nobody_there(spantrain, config, tmp_path) -> None:
    from spantrain.transport.control.credentials import JoinToken

    token = JoinToken.create(b"of nobody").text
    ended = spantrain("outer", "status", "127.0.0.1:9", "--token", token)
    assert ended.code == 1
    assert "127.0.0.1:9" in ended.err
    assert spantrain("outer", "status", "nonsense", "--token", token).code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("plain_processes")
def test_a_demonstration_that_is_interrupted_leaves_nothing(tmp_path) -> None:
    import psutil

    with running("demo", "--no-network", "--out", tmp_path / "demo") as demo:
        line_with(demo, "Waiting for the first inner step")
        inside = psutil.Process(demo.pid).children(recursive=True)
        assert len(inside) == 7
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE_S) == 130
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in inside)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_processes")
def test_a_demonstration_that_is_killed_leaves_nothing_either(tmp_path, monkeypatch) -> None:
    import psutil

    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("TMPDIR", str(state))
    with running("demo", "--no-network", "--out", tmp_path / "demo") as demo:
        line_with(demo, "Waiting for the first inner step")
        inside = psutil.Process(demo.pid).children(recursive=True)
        demo.kill()
        gone, alive = psutil.wait_procs(inside, timeout=PATIENCE_S)
        assert not alive
        assert len(gone) == 7
        assert not list(state.iterdir())


SCRIPT = """\
import torch

from spantrain import OuterOptimizer

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
with OuterOptimizer.from_environment(model.named_parameters()) as outer:
    while outer.metrics.outer_rounds < 2:
        inner.zero_grad()
        (model(torch.randn(4, 8)) ** 2).mean().backward()
        inner.step()
        outer.step(tokens=4)
    assert outer.finish(timeout_s=60.0)
    print("version", outer.metrics.version)
"""


@pytest.mark.slow
def test_the_quick_start(spantrain, config, tmp_path) -> None:
    """`up`, then `run` with a plain loop in two clusters."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with running("up", config) as up:
        line_with(up, "token:")
        run = [sys.executable, "-m", "spantrain", "outer", "run", config, "--cluster"]
        clusters = [
            subprocess.Popen([*run, name, "--", sys.executable, script], stdout=subprocess.PIPE, text=True)
            for name in ("a", "b")
        ]
        said = [cluster.communicate(timeout=PATIENCE_S)[0] for cluster in clusters]
        assert [cluster.returncode for cluster in clusters] == [0, 0]
        assert all(text.startswith("version") for text in said)
        status = json.loads(spantrain("outer", "status", config, "--json").out)
        assert status["version"] >= 2  # as many as rounds where both are in each, more where they are not
        assert {one["name"]: one["state"] for one in status["clusters"]} == {"a": "away", "b": "away"}
        assert all(one["pushes"] >= 2 for one in status["clusters"])
        assert "version" in spantrain("outer", "status", config).out
        up.send_signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 130
