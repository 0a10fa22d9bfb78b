"""The outer optimizer's processes as users run them: a master, its status, all on one machine, no leftovers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.transport.control.credentials import JoinToken
from spantrain_studies.outer_demo import roles
from testing.outer.clients import alone, close, small_model, train_step
from testing.patience import PATIENCE_S, until
from testing.programs import living_in, process_of_log
from testing.tokens import token_with_wrong_secret

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
def running(folder: Path, *words: object, of: str = "outer") -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "spantrain", of, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
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
    with running(config.parent, "master", config) as master:
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


def begun_by(process: "subprocess.Popen[str]", folder: Path) -> list[psutil.Process]:
    return [one for one in living_in(folder) if one.pid != process.pid]


def none_lives(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, 0)[1]


def test_up_keeps_them_running_and_leaves_nothing(spantrain, config) -> None:
    with running(config.parent, "up", config, "--json") as up:
        assert up.stdout is not None
        text = ""
        for line in up.stdout:
            text += line
            if line.rstrip() == "}":
                break
        found = json.loads(text[text.index("{") :])
        assert Path(found["token_file"]).read_text().strip() == found["token"]
        until(lambda: shard_states(spantrain, config) == ["ready"] or shard_states(spantrain, config) == ["joining"])
        before = set(begun_by(up, config.parent))
        os.kill(process_of_log(Path(found["logs"]) / "s0.log"), signal.SIGKILL)
        line_with(up, "s0 was killed by signal 9; it is started again in 1 s")
        line_with(up, "s0 was started again")
        after = begun_by(up, config.parent)
        assert len(after) == 2
        assert set(after) != before
        up.send_signal(signal.SIGINT)
        assert up.wait(PATIENCE_S) == 130
        assert none_lives(after)


def shard_states(spantrain, config: Path) -> list[str]:
    ended = spantrain("outer", "status", config, "--json")
    return [shard["state"] for shard in json.loads(ended.out)["shards"]] if ended.code == 0 else []


def test_clusters_reach_all_of_it_through_a_relay(tmp_path, monkeypatch, spantrain) -> None:
    """All that they are told are the relay's ports; master and shards listen at 127.0.0.2."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    first = max(taken)
    (tmp_path / "outer.yaml").write_text(
        f"""\
name: here
master: {{address: "127.0.0.1:{first}", listen: 127.0.0.2, state: state/master}}
shards:
  - {{name: s0, address: "127.0.0.1:{first + 2}", listen: 127.0.0.2, snapshots: state/s0}}
  - {{name: s1, address: "127.0.0.1:{first + 3}", listen: 127.0.0.2, snapshots: state/s1}}
rule: {{name: nesterov, learning_rate: 1.0, momentum: 0.0}}
settings: {{grace: 0 s, clip_norm: none}}
inner_steps: 3
"""
    )
    refused = spantrain("outer", "up", tmp_path / "outer.yaml", "--relay", "127.0.0.1:1")
    assert refused.code == 2
    assert "SPANTRAIN_RELAY_TOKEN" in refused.err
    ports = ("--ports", f"{first}-{first + 3}", "--token-file", tmp_path / "tokens")
    with running(tmp_path, "--listen", "127.0.0.1:0", *ports, of="relay") as relay:
        at = line_with(relay, "Relay at ").split()[2].rstrip(":")
        monkeypatch.setenv("SPANTRAIN_RELAY_TOKEN", (tmp_path / "tokens").read_text().split()[1])
        with running(tmp_path, "up", "outer.yaml", "--relay", at):
            token = tmp_path / "state" / "master" / "token"
            until(lambda: (tmp_path / "state" / "master" / "address").exists() and token.exists())
            model = small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with OuterOptimizer(
                model.named_parameters(), master=f"127.0.0.1:{first}", token=token.read_text().strip(), cluster="a",
                inner_steps=3, options=OuterOptions(wait_for_start_s=PATIENCE_S),
            ) as outer:  # fmt: skip
                for number in range(6):
                    train_step(model, inner, number)
                    outer.step(tokens=8)
                assert outer.finish(PATIENCE_S)
            close(dict(model.named_parameters()), alone(6))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (("127.0.0.1:9503", "127.0.0.1:0"), "shards.s0.address: 127.0.0.1:0: with --relay it needs a port"),
        (("127.0.0.1:9501", "127.0.0.1:0"), "master.address: 127.0.0.1:0: with --relay it needs a port"),
        (("name: here", "name: here\nencryption: off"), "encryption: off, and --relay takes only what is encrypted"),
        (("127.0.0.1:9501", "192.0.2.9:9501"), "master.listen: cannot listen on 192.0.2.9:9501: it is no address of"),
    ],
)
def test_what_no_relay_can_reach_is_refused_by_field(spantrain, tmp_path, monkeypatch, edit, told) -> None:
    monkeypatch.setenv("SPANTRAIN_RELAY_TOKEN", "t" * 32)
    text = """\
name: here
master: {address: "127.0.0.1:9501", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:9503", snapshots: state/s0}
"""
    path = tmp_path / "outer.yaml"
    path.write_text(text.replace(*edit))
    ended = spantrain("outer", "up", path, "--relay", "127.0.0.1:1")
    assert ended.code == 2
    assert f"{path}: {told}" in ended.err


def test_a_shard_that_the_file_does_not_have_is_refused(spantrain, config) -> None:
    ended = spantrain("outer", "shard", config, "s7")
    assert ended.code == 2
    assert "no shard 's7'; it has s0" in ended.err


def test_a_shard_whose_token_is_wrong_says_so_once_and_ends(spantrain, config, tmp_path) -> None:
    """It dialled for ever."""
    with running(config.parent, "master", config) as master:
        line_with(master, "token:")
        wrong = token_with_wrong_secret((tmp_path / "state" / "master" / "token").read_text())
        with running(config.parent, "shard", config, "s0", "--token", wrong) as shard:
            told, _ = shard.communicate(timeout=PATIENCE_S)
        assert shard.returncode == 2
        assert told.count("Error: shard s0: the master at ") == 1
        assert "refused the token: take the one that it printed, or wrote down, for this run" in told
        assert "Traceback" not in told


def test_nobody_there(spantrain, config, tmp_path) -> None:
    token = JoinToken.create(b"of nobody").text
    ended = spantrain("outer", "status", "127.0.0.1:9", "--token", token)
    assert ended.code == 1
    assert "127.0.0.1:9" in ended.err
    assert spantrain("outer", "status", "nonsense", "--token", token).code == 2


@pytest.mark.slow
def test_a_demonstration_that_is_interrupted_leaves_nothing(tmp_path) -> None:
    with running(tmp_path, "demo", "--no-network", "--out", tmp_path / "demo") as demo:
        line_with(demo, "Waiting for the first inner step")
        inside = begun_by(demo, tmp_path)
        assert len(inside) == 7
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE_S) == 130
        assert none_lives(inside)


@pytest.mark.slow
def test_a_demonstration_that_is_killed_leaves_nothing_either(tmp_path, monkeypatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("TMPDIR", str(state))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # PyTorch's own, which it keeps
    with running(tmp_path, "demo", "--no-network", "--out", tmp_path / "demo") as demo:
        line_with(demo, "Waiting for the first inner step")
        inside = begun_by(demo, tmp_path)
        demo.kill()
        gone, alive = psutil.wait_procs(inside, timeout=PATIENCE_S)
        assert not alive
        assert len(gone) == 7
        assert not list(state.iterdir())


HOLDER = """\
import fcntl, os, pathlib, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.readline()
pathlib.Path(sys.argv[1], "late").mkdir()
"""


def test_a_folder_is_removed_when_nobody_is_left_to_write_into_it(tmp_path) -> None:
    state = tmp_path / "state"
    (state / "s0").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        line_with(holder, "held")
        removal = threading.Thread(target=roles.remove_unheld, args=(str(state),), daemon=True)
        removal.start()
        removal.join(0.2)
        assert removal.is_alive(), "it waits"
        holder.communicate("\n", timeout=PATIENCE_S)
    removal.join(PATIENCE_S)
    assert not state.exists()


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
    with running(config.parent, "up", config) as up:
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
