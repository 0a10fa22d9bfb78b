"""What is known on disk about running testbeds, so that any later process can find them and clear up after them."""

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spantrain.config.files.parsing import parse_json
from spantrain.errors import TestbedError
from spantrain.testbed.namespace_handle import process_started

_MAX_DIRECTORY = 90
"""A Unix socket's path has at most 107 bytes."""


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """A process, told apart from a later one with the same id."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return process_started(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class State:
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
    """Of each host."""
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
        path = self.file("json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        draft.replace(path)

    def remove(self) -> None:
        """Remove every file of this testbed."""
        for suffix in ("sock", "log", "draft", "json"):
            with contextlib.suppress(FileNotFoundError):
                self.file(suffix).unlink()

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
        if not isinstance(fields, dict):
            raise TypeError("it is no object")
        router, keeper = (ProcessMark(**fields.pop(name)) for name in ("router", "keeper"))
        owner = fields.pop("owner")
        return State(
            **{**fields, "networks": tuple(fields["networks"])},
            router=router,
            keeper=keeper,
            owner=None if owner is None else ProcessMark(**owner),
        )
    except FileNotFoundError:
        return None  # it has just ended
    except (ValueError, TypeError, KeyError) as error:
        raise TestbedError(f"{path} is not a testbed's state file ({error}); remove it") from error
