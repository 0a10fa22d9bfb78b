"""A call that is held for as long as a worker's connection is there, over a real one."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spantrain.errors import PeerLostError
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.protocol import PRESENCE, RemoteRefusal
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S


class Watched:
    """A coordinator that notes which connections open and close."""

    def __init__(self, bind: str, stack: ExitStack) -> None:
        self.lines: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()
        self.server = ControlServer(
            bind=bind, handlers={}, on_join=lambda _name, _facts: {}, on_line=lambda *line: self.lines.put(line)
        )
        self.server.start()
        self._stack = stack

    def join(self, name: str) -> ControlClient:
        client = ControlClient.join(
            self.server.join_address, self.server.token, name=name, facts={}, timeout_s=PATIENCE_S
        )
        self._stack.callback(client.close)
        return client

    def heard(self) -> tuple[str, int, bool]:
        return self.lines.get(timeout=PATIENCE_S)


@pytest.fixture(params=["tcp", "unix"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        made = Watched("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/join", stack)
        stack.callback(made.server.stop, 0.1)
        yield made


def test_each_connection_is_told_of_when_it_opens_and_when_it_closes(watched: Watched) -> None:
    one = watched.join("edge-1")
    other = one.another()
    held = one.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-1", 0, True)
    held_too = other.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-1", 1, True)
    for number, (client, call) in enumerate([(one, held), (other, held_too)]):
        client.close()
        assert watched.heard() == ("edge-1", number, False)
        with pytest.raises(PeerLostError):
            call.result()


def test_who_is_released_is_let_go_and_not_held_again(watched: Watched) -> None:
    client = watched.join("edge-1")
    held = client.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-1", 0, True)
    watched.server.release("edge-1")
    assert held.result() == {}
    assert watched.heard() == ("edge-1", 0, False)
    with pytest.raises(RemoteRefusal, match="not a member"):
        client.call(PRESENCE, {}, timeout_s=PATIENCE_S)


def test_a_server_that_stops_lets_go_at_once_and_tells_of_nobodys_end(watched: Watched) -> None:
    held = watched.join("edge-1").begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-1", 0, True)
    watched.server.stop(PATIENCE_S)
    assert held.result() == {}
    assert watched.lines.empty()


def test_who_is_nudged_is_answered_at_once_and_not_taken_for_gone(watched: Watched) -> None:
    client, other = watched.join("edge-1"), watched.join("edge-2")
    held = client.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-1", 0, True)
    stays = other.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert watched.heard() == ("edge-2", 1, True)
    watched.server.nudge(["edge-1", "edge-3"])
    assert held.result() == {}
    assert watched.lines.empty()
    assert not stays.ended
    again = client.begin(PRESENCE, {}, timeout_s=PATIENCE_S)
    assert [watched.heard(), watched.heard()] == [("edge-1", 2, True), ("edge-1", 0, False)]
    assert not again.ended
    client.close()
    assert watched.heard() == ("edge-1", 2, False)
