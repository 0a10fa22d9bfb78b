"""Where a coordinator can listen, and what a worker finds there."""

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from spantrain.errors import PeerLostError, UsageError
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.credentials import JoinToken
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S

TOKEN = JoinToken.create(b"some certificate").text


def _server(bind: str) -> ControlServer:
    handlers = {"echo": lambda peer, payload: {"peer": peer, "payload": payload}}
    return ControlServer(bind=bind, handlers=handlers, on_join=lambda _name, _facts: {}, max_peers=2)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_busy_port_is_one_clear_error(kind: str, tmp_path: Path) -> None:
    first = _server("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/join")
    first.start()
    second = _server(first.join_address)
    with pytest.raises(UsageError, match=r"cannot listen on .*(the port is in use|another one does)"):
        second.start()
    ControlClient.join(first.join_address, first.token, name="edge-1", facts={}, timeout_s=PATIENCE_S).close()
    first.stop(0.1)


LONELY = "127.83.65.78"
"""Loopback, too, but nobody else is given a free port of it between two lines of a test."""


def _listener_with_a_free_port_before() -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as before:
            before.bind((LONELY, 0))
            after = socket.socket()
            after.bind((LONELY, before.getsockname()[1] + 1))
            after.listen()
            return after
    raise AssertionError("no two neighbouring ports are free")


def test_the_next_port_must_be_free_too() -> None:
    with _listener_with_a_free_port_before() as taken:
        port = taken.getsockname()[1]
        coordinator = _server(f"{LONELY}:{port - 1}")
        with pytest.raises(UsageError, match=rf"{LONELY}:{port}: the port is in use"):
            coordinator.start()
    with socket.socket() as free:  # what had been taken before the failure is given back
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((LONELY, port - 1))


def test_a_stale_socket_file_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "join"))
    stale.close()
    first = _server(f"unix:{tmp_path}/join")
    first.start()
    assert (tmp_path / "join").stat().st_mode & 0o777 == 0o600
    first.stop(0.1)
    (tmp_path / "join").write_text("precious")
    with pytest.raises(UsageError, match="a file that is not a socket"):
        _server(f"unix:{tmp_path}/join").start()
    assert (tmp_path / "join").read_text() == "precious"


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("127.0.0.1", "not an address"),
        ("127.0.0.1:70000", "not an address"),
        ("::1:29400", "not an address"),
        ("unix:relative", "absolute path"),
        ("unix:/" + "x" * 100, "at most 99 bytes"),
        ("127.0.0.1:65535", "this port and the next"),
        ("unix:/nowhere-at-all/join", "no folder"),
        ("192.0.2.1:29400", "it is no address of this machine"),
        ("a..b:29400", "not an address"),
        ("fe80::1%eth0:29400", "not an address"),
        ("[nonsense]:29400", "not an address"),
    ],
)
def test_an_address_that_cannot_be_listened_on(bind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _server(bind).start()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"no coordinator answers at unix:.*No such file"):
        ControlClient.join(f"unix:{tmp_path}/none", TOKEN, name="edge-1", facts={}, timeout_s=0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerLostError, match="Connection refused"):
            ControlClient.join(where, TOKEN, name="edge-1", facts={}, timeout_s=0.3)


def test_something_else_there() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def greet() -> None:
            with contextlib.suppress(OSError):
                connection, _ = other.accept()
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.recv(1 << 16)

        thread = threading.Thread(target=greet)
        thread.start()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UsageError, match="is not a coordinator"):
            ControlClient.join(where, TOKEN, name="edge-1", facts={}, timeout_s=PATIENCE_S)
        thread.join(PATIENCE_S)


def test_a_worker_may_come_before_the_coordinator(tmp_path: Path) -> None:
    coordinator = _server(f"unix:{tmp_path}/join")
    joined: list[ControlClient] = []

    def come_early() -> None:
        address, token = f"unix:{tmp_path}/join", coordinator.token
        joined.append(ControlClient.join(address, token, name="edge-1", facts={}, timeout_s=PATIENCE_S))

    thread = threading.Thread(target=come_early)
    thread.start()
    coordinator.start()
    thread.join(PATIENCE_S)
    assert joined[0].call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"
    joined[0].close()
    coordinator.stop(0.1)


def test_on_all_addresses_workers_are_told_the_machine_s_name() -> None:
    server = _server("0.0.0.0:0")
    server.start()
    host, _, port = server.join_address.rpartition(":")
    assert host == socket.gethostname()
    ControlClient.join(f"localhost:{port}", server.token, name="edge-1", facts={}, timeout_s=PATIENCE_S).close()
    server.stop(0.1)
