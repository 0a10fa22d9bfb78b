"""The way into a host: plain data that a child process uses to move itself there.

Also a script by itself, `python -I -S namespace_handle.py HANDLE -- COMMAND...`, which enters and becomes the command;
it is started by path and imports only the standard library, so that it costs a few milliseconds.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000


class NamespaceHandle:
    """Where a host's namespaces can be opened. Plain data: picklable, and small."""

    __slots__ = ("has_user_namespace", "host", "namespace_fd", "router_pid", "router_started")

    def __init__(
        self, *, host: str, router_pid: int, router_started: int, namespace_fd: int, has_user_namespace: bool
    ) -> None:
        self.host = host
        self.router_pid = router_pid
        self.router_started = router_started
        self.namespace_fd = namespace_fd
        self.has_user_namespace = has_user_namespace

    def enter(self) -> None:
        """Move the calling process to the host.

        Call it in a fresh child before it starts a thread: only the calling thread and what it starts move, and a
        process with several threads may not enter a user namespace at all.

        Raises:
            ProcessLookupError: The testbed is gone.
        """
        if process_started(self.router_pid) != self.router_started:
            raise ProcessLookupError(f"host {self.host}: its testbed is no longer running")
        paths = [(CLONE_NEWNET, f"/proc/{self.router_pid}/fd/{self.namespace_fd}")]
        if self.has_user_namespace:
            paths.insert(0, (CLONE_NEWUSER, f"/proc/{self.router_pid}/ns/user"))
        # All are opened first: from inside the user namespace the router's files are out of reach.
        opened = [(kind, os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for kind, path in paths]
        libc = ctypes.CDLL(None, use_errno=True)
        for kind, namespace_fd in opened:
            if libc.setns(namespace_fd, kind) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"host {self.host}: setns: {os.strerror(code)}")
            os.close(namespace_fd)

    def command(self, argv: list[str]) -> list[str]:
        """Return a command line that enters the host and becomes `argv`, keeping its process id."""
        fields = json.dumps({name: getattr(self, name) for name in self.__slots__})
        return [sys.executable, "-I", "-S", os.path.abspath(__file__), fields, "--", *argv]


def process_started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if it is dead.

    With the process id this names a process for good, since ids are used again.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _main(arguments: list[str]) -> int:
    fields, _, *argv = arguments
    try:
        NamespaceHandle(**json.loads(fields)).enter()
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        sys.stderr.write(f"{argv[0]}: no such command\n")
        return 127
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
        return 126


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
