"""Talk with a router over its Unix socket: one line of JSON each way, then the connection ends."""

import json
import socket
from pathlib import Path
from typing import Any

from spantrain.errors import TestbedError

_TIMEOUT_S = 20.0
"""A router answers within milliseconds; on a machine that is busy with other things, within seconds."""
_MAX_REQUEST_BYTES = 1 << 22
"""A trace of a thousand changes for each of a hundred links."""
_PART_BYTES = 65536

Answer = dict[str, Any]


def ask(path: Path, operation: str, **arguments: Any) -> Answer:
    """Send one request and return the answer.

    Raises:
        TestbedError: The router refused, or does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline()
    except OSError as error:
        raise TestbedError(f"testbed {path.stem} does not answer ({error}); see `spantrain testbed down`") from error
    if not line:
        raise TestbedError(f"testbed {path.stem} ended while it was asked to {operation}")
    answer: Answer = json.loads(line)
    if "error" in answer:
        raise TestbedError(answer["error"])
    return answer


class RequestServer:
    """The router's end: never waits for a client, so that a slow one cannot hold up packets."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(16)
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}

    @property
    def fds(self) -> list[int]:
        """Files to wait on for reading."""
        return [self._listener.fileno(), *self._clients]

    def receive(self, ready_fd: int) -> tuple[int, Answer] | None:
        """Take what a ready file has; return a whole request with the client to answer, if it is one."""
        if ready_fd == self._listener.fileno():
            self._accept()
            return None
        client, received = self._clients[ready_fd]
        try:
            part = client.recv(_PART_BYTES)
        except OSError:
            part = b""
        received += part
        if not part or len(received) > _MAX_REQUEST_BYTES:
            self._close(ready_fd)
        elif received.endswith(b"\n"):
            return self._parse(ready_fd, bytes(received))
        return None

    def answer(self, client_fd: int, answer: Answer) -> None:
        """Answer a request and end its connection."""
        client, _ = self._clients[client_fd]
        line = json.dumps(answer).encode() + b"\n"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(line))
        try:
            client.send(line)
        except OSError:
            pass  # the client has left; nobody to tell
        finally:
            self._close(client_fd)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        self._clients[client.fileno()] = (client, bytearray())

    def _close(self, client_fd: int) -> None:
        self._clients.pop(client_fd)[0].close()

    def _parse(self, client_fd: int, line: bytes) -> tuple[int, Answer] | None:
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        if isinstance(request, dict) and isinstance(request.get("operation"), str):
            return client_fd, request
        self.answer(client_fd, {"error": "a request is one line with a JSON object that has an operation"})
        return None
