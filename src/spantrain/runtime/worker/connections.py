"""TCP connections of this process that a library holds and does not give out: found, and cut.

Gloo has no way to give up a collective whose peers are silent (its `abort` does nothing), and a wait at a store cannot
be given up either. Both end at once when the connections that they wait on do. Linux tells which those are; elsewhere
none are found.
"""

import contextlib
import os
import socket
from pathlib import Path

_OWN_FILES = Path("/proc/self/fd")


def connections() -> frozenset[tuple[int, str]]:
    """Return the sockets that are open here, as (number, the system's name for it): numbers are used again."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(_OWN_FILES):
            with contextlib.suppress(OSError):
                name = os.readlink(_OWN_FILES / entry)
                if name.startswith("socket:"):
                    found.add((int(entry), name))
    return frozenset(found)


def cut(before: frozenset[tuple[int, str]]) -> int:
    """End the TCP connections that were opened since; return how many. Whoever waits on one gets an error.

    Of another library's connections that were opened meanwhile, gRPC's and ZeroMQ's are made again by themselves.
    """
    return sum(_ended(number) for number, _ in connections() - before)


def _ended(number: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            # A listener stays: Gloo's thread ends the process if it cannot accept.
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return False
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # closed meanwhile, or not connected
    return True
