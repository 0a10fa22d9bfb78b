"""How later processes find a running testbed and talk with its router: state files, requests, and the answers.

A request over the router's Unix socket is one line of JSON each way, then the connection ends.
"""

import contextlib
import dataclasses
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spantrain.config.files.json_codec import from_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import write_atomically
from spantrain.core.records import Record
from spantrain.errors import ConfigError, TestbedError
from spantrain.testbed.namespace_handle import process_started

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


def _tell(client: socket.socket, line: bytes) -> None:
    with client, contextlib.suppress(OSError):  # the client has left, or does not read: nobody to tell
        client.sendall(line)


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
            client, _ = self._listener.accept()
            client.setblocking(False)
            self._clients[client.fileno()] = (client, bytearray())
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
        """Answer a request and end its connection; in a thread, as the client has to read in between."""
        client, _ = self._clients.pop(client_fd)
        client.settimeout(_TIMEOUT_S)
        line = json.dumps(answer).encode() + b"\n"
        threading.Thread(target=_tell, args=(client, line), name="answer", daemon=True).start()

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


class HostStatus(Record):
    """One host."""

    host: str
    site: str
    address: str
    interface: str


class _CarrierStatus(Record):
    """What carries packets in one direction: its rate now, and what has passed since it was there."""

    bandwidth_bytes_per_s: float
    speed: float
    """The part of the bandwidth that there is now, by the trace that it follows; 1 without one."""
    bytes_sent: int
    """IP bytes, headers included."""
    load_bytes_sent: int
    """Those of `bytes_sent` that `spantrain testbed load` made."""
    packets_sent: int
    packets_dropped: int
    """For want of room in the queue."""
    bytes_waiting: int


class ShapedLinkStatus(_CarrierStatus):
    """One direction between two sites."""

    source: str
    target: str
    latency_s: float
    jitter_s: float
    loss_ratio: float
    packets_lost: int
    """By `loss_ratio`."""
    is_cut: bool
    """Whether nothing passes now (`spantrain testbed partition`)."""


class LineStatus(_CarrierStatus):
    """What all links of a site share, in one direction."""

    site: str
    way: str
    """`up`: what leaves the site; `down`: what comes."""


class TestbedStatus(Record):
    """A running testbed."""

    __test__ = False

    id: str
    cluster: str
    hosts: tuple[HostStatus, ...]
    links: tuple[ShapedLinkStatus, ...]
    lines: tuple[LineStatus, ...]
    """Lines of sites that have them."""
    packets_refused: int
    """Addressed to no site, or not IPv4."""
    up_s: float
    router_cpu_s: float
    """Processor time that the router has used since it began."""

    @property
    def router_cpu_share(self) -> float:
        """Part of one processor that the router has used since it began."""
        return self.router_cpu_s / self.up_s


_MAX_DIRECTORY = 90
"""A Unix socket's path has at most 107 bytes."""


class ProcessMark(Record):
    """A process, told apart from a later one with the same id."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return process_started(self.pid) == self.started


class State(Record):
    """One testbed, as its router has written it down."""

    directory: str
    """Where its files are."""
    testbed_id: str
    cluster: str
    boot_id: str
    router: ProcessMark
    keeper: ProcessMark
    owner: ProcessMark | None
    """The program whose testbed it is and with which it ends; None if it was left to run by itself."""
    has_user_namespace: bool
    site_of: Mapping[str, str]
    """The site of each host."""
    address_of: Mapping[str, str]
    namespace_fd_of: Mapping[str, int]
    """Open in the router."""
    networks: tuple[int, ...]
    """Inodes of all network namespaces."""

    @property
    def running(self) -> bool:
        """Whether its router lives."""
        return self.boot_id == boot_id() and self.router.alive

    @property
    def in_use(self) -> bool:
        """Whether it runs and belongs to a program that does, too."""
        return self.running and self.owner is not None and self.owner.alive

    def write(self) -> None:
        """Write the state file at once and whole."""
        write_atomically(self.file("json"), json.dumps(dataclasses.asdict(self)), error=TestbedError)

    def remove(self) -> None:
        """Remove every file of this testbed."""
        for suffix in ("sock", "log", "json"):
            self.file(suffix).unlink(missing_ok=True)

    def file(self, suffix: str) -> Path:
        """Return the path of one of its files."""
        return Path(self.directory, f"{self.testbed_id}.{suffix}")


def mark_of(pid: int) -> ProcessMark:
    """Return the mark of a process that is known to live."""
    started = process_started(pid)
    assert started is not None, f"process {pid} is dead"
    return ProcessMark(pid=pid, started=started)


def boot_id() -> str:
    """Return a name for the time since the machine started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def runtime_dir() -> Path:
    """Return this user's directory for sockets and state files, made if need be.

    Raises:
        TestbedError: The directory belongs to someone else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base, "spantrain") if base else Path(tempfile.gettempdir(), f"spantrain-{os.geteuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise TestbedError(f"{path} must be a directory of this user with mode 700; remove it, or set XDG_RUNTIME_DIR")
    if len(os.fsencode(path)) > _MAX_DIRECTORY:
        raise TestbedError(f"{path} is too long for a socket's path; set XDG_RUNTIME_DIR to a shorter directory")
    return path


def read_states() -> list[State]:
    """Return all testbeds of this user, running or not."""
    paths = sorted(runtime_dir().glob("*.json"))
    return [state for path in paths if (state := _read(path)) is not None]


def _read(path: Path) -> State | None:
    try:
        fields = parse_json(path.read_text(encoding="utf-8"), str(path), error=TestbedError, remedy="remove it")
        return from_json(State, fields, str(path))
    except FileNotFoundError:
        return None  # it has just ended
    except (ValueError, ConfigError) as error:
        raise TestbedError(f"{path} is not a testbed's state file ({error}); remove it") from error
