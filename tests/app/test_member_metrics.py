"""Metrics of a worker, a master and a shard, each a process as users start it."""

import http.client
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.config.cluster_file import load_preset
from testing.patience import PATIENCE_S

TOKEN = "what-prometheus-shows"
OUTER = """\
name: here
master: {address: "127.0.0.1:0", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: state/s0}
inner_steps: 4
"""
WHERE = re.compile(r"Metrics: http://(127\.0\.0\.1:\d+)/metrics\n")


@contextmanager
def running(*words: object, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "spantrain", *map(str, words), "--metrics", "127.0.0.1:0"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "SPANTRAIN_METRICS_TOKEN": TOKEN, **variables},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := WHERE.search(line):
            return found[1]
    raise AssertionError("it did not say where its metrics are")


def scraped(address: str, token: str = TOKEN) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_master_and_its_shards_tell_prometheus_how_they_stand(tmp_path):
    config = tmp_path / "outer.yaml"
    config.write_text(OUTER)
    logs = tmp_path / "state" / "master" / "logs"
    with running("outer", "up", config) as up:
        assert up.stdout is not None
        assert "master:" in up.stdout.readline()
        addresses = {name: logged_address(logs / f"{name}.log") for name in ("master", "s0")}
        status, text = scraped(addresses["s0"])
        assert status == 200
        assert 'spantrain_shard_layers_received_total{shard="s0"} 0\n' in text
        status, text = scraped(addresses["master"])
        assert status == 200
        assert "spantrain_outer_updates_total 0\n" in text
        assert 'spantrain_outer_shard_ready{shard="s0"} 0\n' in text
        assert scraped(addresses["master"], "wrong")[0] == 401
        assert all(TOKEN not in path.read_text() for path in logs.iterdir())
        up.terminate()
        up.wait(PATIENCE_S)


def logged_address(path: Path) -> str:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        found = WHERE.search(path.read_text()) if path.exists() else None
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"{path} does not say where its metrics are")


class Starting(SilentReporter):
    """Starts the worker that the coordinator waits for."""

    address = ""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def note(self, text: str) -> None:
        found = re.search(r"SPANTRAIN_TOKEN=(\S+) spantrain worker --join (\S+)", text)
        if found and not self.address:
            words = ("worker", "--join", found[2], "--name", "lab-0", "--backend", "cpu")
            self.address = address_of(self._stack.enter_context(running(*words, SPANTRAIN_TOKEN=found[1])))


def test_a_worker_tells_prometheus_that_it_has_joined(tmp_path):
    options = SessionOptions(listen="127.0.0.1:0", join_timeout_s=PATIENCE_S)
    with ExitStack() as stack:
        starting = Starting(stack)
        stack.enter_context(open_session(load_preset("laptop"), ("lab-0",), options, tmp_path, starting))
        status, text = scraped(starting.address)
        assert status == 200
        assert 'spantrain_worker_joined{device="lab-0"} 1\n' in text
        assert "spantrain_worker_steps_total" not in text, "it holds nothing of a run"
