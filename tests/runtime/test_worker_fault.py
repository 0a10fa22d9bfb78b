"""A worker's process one of whose threads a fault has ended: it says why, and ends."""

import os
import subprocess
import sys

from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S

WORKER = """
import sys, threading
from spantrain.cli import main as cli
from spantrain.runtime.worker.worker import Worker

class Faulty(Worker):
    def _serve(self):
        self._cannot_go_on("the thread 'mailbox edge-0' has ended: LookupError: a fault")
        super()._serve()

import spantrain.app.worker
spantrain.app.worker.Worker = Faulty
cli.main(["worker", "--join", sys.argv[1], "--name", "edge-0", "--backend", "cpu"])
"""


def test_a_worker_that_cannot_go_on_says_why_and_ends(tmp_path):
    left, script = [], tmp_path / "faulty.py"
    script.write_text(WORKER)
    handlers = {
        "introduce": lambda _peer, _facts: {},
        "heartbeat": lambda _peer, _status: {},
        "next_order": lambda _peer, _payload: {"again": True},
        "leave": lambda _peer, payload: left.append(payload["reason"]) or {},
    }
    server = ControlServer(
        bind="127.0.0.1:0", handlers=handlers, on_join=lambda name, _facts: {"device": name, "patience_s": 8.0}
    )
    server.start()
    try:
        words = [sys.executable, str(script), server.join_address]
        environment = {**os.environ, "SPANTRAIN_TOKEN": server.token}
        ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
    finally:
        server.stop()
    assert ended.returncode == 1
    assert ended.stderr.endswith("Error: edge-0: the thread 'mailbox edge-0' has ended: LookupError: a fault\n")
    assert left == ["edge-0: the thread 'mailbox edge-0' has ended: LookupError: a fault"]
