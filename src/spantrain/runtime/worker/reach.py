"""Which peers cannot be reached: a connection to each is tried, and closed as soon as it is there."""

import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

from spantrain.transport.connection.peers import PeerAddress

_WAIT_S = 2.0
"""For all connections together: several times what a packet takes that is lost once."""


def unreached(peers: Iterable[PeerAddress], wait_s: float = _WAIT_S) -> tuple[str, ...]:
    """Return the names of peers of whom nothing comes back; one whose machine refuses is reached.

    Those that cannot be dialled are left out: they dial themselves.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for peer, address in _dialled(peers):
            line = stack.enter_context(socket.socket(*address[:2]))
            line.setblocking(False)
            with suppress(OSError):
                line.connect_ex(address[4])
            selector.register(line, selectors.EVENT_WRITE, peer.name)
        until_s = time.monotonic() + wait_s
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
        return tuple(sorted(key.data for key in selector.get_map().values()))


def _dialled(
    peers: Iterable[PeerAddress],
) -> Iterator[tuple[PeerAddress, tuple[int, int, int, str, tuple[object, ...]]]]:
    for peer in peers:
        host, _, port = peer.endpoint.removeprefix("tcp://").rpartition(":")
        if peer.endpoint.startswith("tcp://"):
            with suppress(OSError):
                found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                yield peer, (int(found[0][0]), int(found[0][1]), found[0][2], found[0][3], found[0][4])
