"""What ends a worker's order before it is done, and sees to it that every wait in it ends then, too.

Heartbeats bring the news. Waits that look for it themselves (`Watch.check`) end by it; those inside of torch are ended
from outside (`interrupt`); and a process that all of that does not stop is ended as it stands, with the cause said.

TCP connections of this process that a library holds and does not give out: found, and cut.

Gloo has no way to give up a collective whose peers are silent (its `abort` does nothing), and a wait at a store cannot
be given up either. Both end at once when the connections that they wait on do. Linux tells which those are; elsewhere
none are found.
"""

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from spantrain.config.files.json_codec import from_json
from spantrain.errors import Interrupted, PeerLostError, ProtocolError
from spantrain.runtime.control.requests import Standing
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.address import Address

_AGAIN_S = 1.0
"""After that, waits are ended again: one may have begun just behind the first time."""


def standing_of(answer: Mapping[str, Any], lost: str | None) -> Standing:
    """Read the coordinator's answer to the last heartbeat; one that says nothing changes nothing."""
    try:
        said = from_json(Standing, dict(answer), "answer to a heartbeat", error=ProtocolError)
    except ProtocolError:
        said = Standing()
    return replace(said, lost=lost)


class Watch:
    """Over the order under way, from the thread that hears of news; a context, at whose end it watches no longer."""

    def __init__(
        self, standing: Callable[[], Standing], *, interrupt: Callable[[], None], give_up: Callable[[str], None]
    ) -> None:
        """Begin without an order.

        Args:
            standing: what is known now.
            interrupt: ends waits that cannot look; called in a thread of its own, again and again
                until the order that is over has been left.
            give_up: ends the process, for a cause.
        """
        self._standing = standing
        self._interrupt = interrupt
        self._give_up = give_up
        self._changed = threading.Condition()
        self._order_id: int | None = None
        self._patience_s: float | None = None
        self._until_s = 0.0
        """By then this process must have left what is over, where there is a patience."""
        self._interrupted_s = -_AGAIN_S
        self._interrupter: threading.Thread | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def begin(self, order_id: int | None) -> None:
        """Watch over an order from now on; None: over none, as the one before has been left."""
        with self._changed:
            self._order_id = order_id
            self._changed.notify_all()

    def look_again(self) -> None:
        """Look again: something may have changed."""
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Return if the order under way is still wanted.

        Raises:
            PeerLostError: the coordinator is lost.
            Interrupted: it has ended the order.
        """
        cause = self.cause()
        if cause is not None:
            raise cause

    def cause(self) -> PeerLostError | Interrupted | None:
        """Return why the order under way is over, if it is."""
        return self._standing().why_over(self._order_id)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = self._left_s(time.monotonic())
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(None if left_s is None else min(left_s, _AGAIN_S))
            else:
                return
            standing, order_id = self._standing(), self._order_id
        cause = standing.why_over(order_id) or Interrupted(standing.reason or "the coordinator has ended")
        self._give_up(str(cause))

    def _left_s(self, now_s: float) -> float | None:
        """Return how long to wait for this process to leave what is over; None if nothing is."""
        patience_s = self._standing().patience_s(self._order_id)
        if patience_s != self._patience_s:
            self._patience_s = patience_s
            self._until_s = now_s + (patience_s or 0.0)
        if patience_s is None:
            return None
        busy = self._interrupter is not None and self._interrupter.is_alive()
        if self._order_id is not None and not busy and now_s - self._interrupted_s >= _AGAIN_S:
            self._interrupted_s = now_s
            self._interrupter = threading.Thread(target=self._interrupt, name="interrupt", daemon=True)
            self._interrupter.start()
        return self._until_s - now_s


_OWN_FILES = Path("/proc/self/fd")


def connections() -> frozenset[tuple[int, str]]:
    """Return the sockets that are open here, as (number, the system's name for it): numbers are used again."""
    found = set()
    with suppress(OSError):
        for entry in os.listdir(_OWN_FILES):
            with suppress(OSError):
                name = os.readlink(_OWN_FILES / entry)
                if name.startswith("socket:"):
                    found.add((int(entry), name))
    return frozenset(found)


def cut(before: frozenset[tuple[int, str]], spare: Collection[str] = ()) -> None:
    """End the TCP connections that were opened since; whoever waits on one gets an error.

    Of another library's connections that were opened meanwhile, gRPC's and ZeroMQ's are made again by themselves; but
    that takes round trips, so those with an end at one of the addresses (HOST:PORT) to `spare` stay.
    """
    for number, _ in connections() - before:
        # One that fails was closed meanwhile, or is not connected.
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            # A listener stays: Gloo's thread ends the process if it cannot accept.
            if not is_tcp or copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            ends = (Address(host=host, port=port) for host, port, *_ in (copy.getsockname(), copy.getpeername()))
            if not any(str(end) in spare for end in ends):
                copy.shutdown(socket.SHUT_RDWR)


_WAIT_S = 2.0
"""For all connections together: several times what a packet takes that is lost once."""
_ANSWERED = (0, errno.ECONNREFUSED, errno.ECONNRESET)
"""What becomes of a connection to a machine that is reached; on the way there, others say that there is none."""


def unreached(peers: Iterable[PeerAddress], wait_s: float = _WAIT_S) -> tuple[str, ...]:
    """Return the names of peers of whom nothing comes back; one whose machine refuses is reached.

    Those that cannot be dialled are left out: they dial themselves.
    """
    found = set[str]()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for name, family, address in _dialled(peers):
            line = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            line.setblocking(False)
            begun = line.connect_ex(address)
            if begun == errno.EINPROGRESS:
                selector.register(line, selectors.EVENT_WRITE, (name, line))
            elif begun not in _ANSWERED:
                found.add(name)
        until_s = time.monotonic() + wait_s
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                name, line = key.data
                if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _ANSWERED:
                    found.add(name)
        return tuple(sorted({*found, *(key.data[0] for key in selector.get_map().values())}))


def _dialled(peers: Iterable[PeerAddress]) -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """Yield the name, the family of addresses and the address of each peer that can be dialled."""
    for peer in peers:
        host, _, port = peer.endpoint.removeprefix("tcp://").rpartition(":")
        if peer.endpoint.startswith("tcp://"):
            with suppress(OSError):
                family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
                yield peer.name, family, address
