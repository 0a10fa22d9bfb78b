"""Who is lost and when; a worker's heartbeat against a real coordinator."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spantrain.errors import UsageError
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.heartbeat import HeartbeatThread, Silence
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S


class Beats:
    """A coordinator that counts beats and asks for a stop after the third."""

    def __init__(self, bind: str) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.server = ControlServer(
            bind=bind, handlers={"heartbeat": self._beat}, on_join=lambda _name, _facts: {}, max_peers=2
        )

    def _beat(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((peer, payload))
        return {"stop": len(self.seen) >= 3}


@pytest.fixture
def beats(tmp_path: Path) -> Iterator[Beats]:
    beats = Beats(f"unix:{tmp_path}/join")
    beats.server.start()
    yield beats
    beats.server.stop(0.1)


@pytest.fixture
def client(beats: Beats) -> Iterator[ControlClient]:
    client = ControlClient.join(
        beats.server.join_address, beats.server.token, name="edge-1", facts={}, timeout_s=PATIENCE_S
    )
    yield client
    client.close()


def test_beats_bring_back_what_is_asked(beats: Beats, client: ControlClient) -> None:
    asked = threading.Event()
    thread = HeartbeatThread(
        client, interval_s=0.01, on_change=lambda: asked.set() if thread.answer.get("stop") else None
    )
    assert thread.answer == {}
    thread.start()
    assert asked.wait(PATIENCE_S)
    thread.stop()
    assert [peer for peer, _ in beats.seen[:3]] == ["edge-1"] * 3
    first, *others = (payload["round_trip_s"] for _, payload in beats.seen[:3])
    assert first == 0 < min(others), "how long the one before took"
    assert thread.coordinator_lost is None


def test_a_coordinator_that_goes_away_is_noticed(beats: Beats, client: ControlClient) -> None:
    changed, gone = threading.Event(), threading.Event()

    def on_change() -> None:
        changed.set()
        if thread.coordinator_lost:
            gone.set()

    thread = HeartbeatThread(client, interval_s=0.02, timeout_s=0.6, on_change=on_change)
    thread.start()
    assert changed.wait(PATIENCE_S)
    beats.server.stop(0.1)
    assert gone.wait(PATIENCE_S)
    thread.stop()
    assert thread.coordinator_lost is not None
    assert "no heartbeat for" in thread.coordinator_lost
    assert "the coordinator at unix:" in thread.coordinator_lost


class Line:
    """A connection on which nothing is answered, or everything, at once."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.closed = False

    def begin(self, _method: str, _payload: dict[str, Any], *, timeout_s: float, done: Callable[[], None]) -> "Line":
        if self.answers:
            done()
        return self

    @property
    def ended(self) -> bool:
        return self.answers

    def result(self) -> dict[str, Any]:
        return {"answered": True}

    def close(self) -> None:
        self.closed = True


class Dialled:
    """A client whose connections of some numbers carry nothing, such as those from before an outage."""

    address = "there"

    def __init__(self, *silent: int) -> None:
        self.lines: list[Line] = []
        self._silent = silent

    def begin(self, _method: str, _payload: dict[str, Any], *, timeout_s: float, done: Callable[[], None]) -> Line:
        return Line(answers=False)

    def another(self) -> Line:
        self.lines.append(Line(len(self.lines) not in self._silent))
        return self.lines[-1]


def test_a_beat_that_is_not_answered_is_sent_on_new_connections_until_one_answers() -> None:
    """TCP on the old one may find out only much later that the network is back."""
    client, heard = Dialled(0, 1), threading.Event()
    thread = HeartbeatThread(client, interval_s=60.0, timeout_s=2.0, on_change=heard.set)  # type: ignore[arg-type]
    thread.start()
    assert heard.wait(PATIENCE_S)
    assert thread.answer == {"answered": True}
    thread.stop()
    assert len(client.lines) == 3
    assert all(line.closed for line in client.lines)
    assert thread.coordinator_lost is None


def test_one_that_never_answers_is_lost_and_every_connection_closed() -> None:
    client = Dialled(*range(100))
    thread = HeartbeatThread(client, interval_s=0.01, timeout_s=0.4)  # type: ignore[arg-type]
    thread.start()
    assert thread.await_loss(PATIENCE_S)
    thread.stop()
    assert "the coordinator at there was lost: no heartbeat for" in str(thread.coordinator_lost)
    assert len(client.lines) > 2
    assert all(line.closed for line in client.lines)


def test_a_beat_that_is_refused_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_line: Line) -> dict[str, Any]:
        raise UsageError("the coordinator knows no such worker")

    monkeypatch.setattr(Line, "result", refused)
    client = Dialled()
    thread = HeartbeatThread(client, interval_s=60.0, timeout_s=2.0)  # type: ignore[arg-type]
    thread.start()
    assert thread.await_loss(PATIENCE_S)
    thread.stop()
    assert "knows no such worker" in str(thread.coordinator_lost)
    assert client.lines
    assert all(line.closed for line in client.lines)


def test_whoever_was_not_running_cannot_have_heard_anybody() -> None:
    silence = Silence(6.0, begun_s=0.0)
    assert silence.too_long(0.1) is None
    assert silence.too_long(100.0) is None, "it has slept"
    assert silence.too_long(100.9) is None
    silence.heard(101.0)
    silence.heard(100.0)
    for tenth in range(1010, 1100):
        assert (silence.too_long(tenth / 10) is not None) == (tenth / 10 - 101.0 > 6.0)


def test_a_released_worker_is_told_at_its_next_beat(beats: Beats, client: ControlClient) -> None:
    thread = HeartbeatThread(client, interval_s=0.01)
    thread.start()
    assert not thread.await_loss(0.0)
    beats.server.release("edge-1")
    assert thread.await_loss(PATIENCE_S)
    thread.stop()
    assert "not a member" in str(thread.coordinator_lost)


def test_the_runtime_package_is_imported_without_grpc() -> None:
    code = "import sys, spantrain.runtime, spantrain.transport.control; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
