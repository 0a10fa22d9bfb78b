"""Talk with a router over its Unix socket, one line of JSON each way, then the connection ends; what it answers."""

import json
import socket
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """One host."""

    host: str
    site: str
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class ShapedLinkStatus:
    """One direction between two sites: its shape now, and what has passed since the testbed came up."""

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float
    jitter_s: float
    loss_ratio: float
    speed: float
    """The part of the bandwidth that there is now, by the trace that it follows; 1 without one."""
    bytes_sent: int
    """IP bytes, headers included."""
    packets_sent: int
    packets_dropped: int
    """For want of room in the queue."""
    packets_lost: int
    """By `loss_ratio`."""
    load_bytes_sent: int
    """Of `bytes_sent`, those of `spantrain testbed load`."""
    bytes_waiting: int


@dataclass(frozen=True, kw_only=True)
class LineStatus:
    """What all links of a site share, in one direction: its rate now, and what has passed since it was there."""

    site: str
    way: str
    """`up`: what leaves the site; `down`: what comes."""
    bandwidth_bytes_per_s: float
    speed: float
    """The part of the bandwidth that there is now, by the trace that it follows; 1 without one."""
    bytes_sent: int
    """IP bytes, headers included."""
    load_bytes_sent: int
    """Of `bytes_sent`, those of `spantrain testbed load`."""
    packets_sent: int
    packets_dropped: int
    """For want of room in the queue."""
    bytes_waiting: int


@dataclass(frozen=True, kw_only=True)
class TestbedStatus:
    """A running testbed."""

    __test__ = False

    id: str
    cluster: str
    hosts: tuple[HostStatus, ...]
    links: tuple[ShapedLinkStatus, ...]
    lines: tuple[LineStatus, ...]
    """Of sites that have them."""
    packets_refused: int
    """Addressed to no site, or not IPv4."""
    up_s: float
    router_cpu_s: float
    """Processor time that the router has used since it began."""

    @property
    def router_cpu_share(self) -> float:
        """Part of one processor that the router has used since it began."""
        return self.router_cpu_s / self.up_s

    @property
    def bytes_sent(self) -> int:
        """IP bytes over all links."""
        return sum(link.bytes_sent for link in self.links)
