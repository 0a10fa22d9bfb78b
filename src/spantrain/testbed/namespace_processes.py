"""Find and end the processes that live in given network namespaces."""

import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress

_GRACE_S = 2.0
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def network_of(pid: int) -> int | None:
    """Return the inode of a process's network namespace; None if the process is dead or not ours to look at."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except _GONE:
        return None


def find_processes(networks: Collection[int], *, spare: Collection[int] = (), mark: str | None = None) -> list[int]:
    """Return the processes in these namespaces (by inode) but for `spare`.

    Args:
        networks: Inodes of network namespaces.
        spare: Processes to leave out.
        mark: If given, only processes that were started with this `NAME=value` in their environment.
    """
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    found = [pid for pid in pids if pid not in spare and network_of(pid) in networks]
    return found if mark is None else [pid for pid in found if _started_with(pid, mark)]


def end_processes(networks: Collection[int], *, spare: Collection[int] = (), mark: str | None = None) -> int:
    """End all processes in these namespaces: ask first, kill what is left after two seconds. Return how many."""
    deadline_s = time.monotonic() + _GRACE_S
    ended: set[int] = set()
    while pids := find_processes(networks, spare=spare, mark=mark):
        ended.update(pids)
        late = time.monotonic() >= deadline_s
        with ExitStack() as stack:
            handles = list(_handles(stack, pids, networks))
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL if late else signal.SIGTERM)
            waiting = set(handles)
            while waiting and (left_s := deadline_s + late * 1.0 - time.monotonic()) > 0:
                waiting.difference_update(select.select(list(waiting), [], [], left_s)[0])
    return len(ended)


def end_process(pid: int, *, grace_s: float) -> None:
    """Wait for a process to end by itself, and kill it if it has not after `grace_s`."""
    with ExitStack() as stack, suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        stack.callback(os.close, handle)
        if not select.select([handle], [], [], grace_s)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], 5.0)


def _handles(stack: ExitStack, pids: list[int], networks: Collection[int]) -> Iterator[int]:
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            if network_of(pid) in networks:  # looked at again: the id may have been given to another process
                yield handle


def _started_with(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except _GONE:
        return False
