"""Connections that break while both sides are silent: what was on its way comes all the same, once."""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from spantrain.core.messages import MessageKey
from spantrain.transport.mailbox.interface import Message
from spantrain.transport.mailbox.mailbox import Mailbox
from testing.patience import until

SILENCE_S = 0.3
"""After this, acknowledgements have gone: who has nothing to send would not find out by sending."""
MEGABYTE = torch.ones(1_000_000, dtype=torch.uint8)


class Wire:
    """A network between whoever dials and one endpoint: it can swallow what passes, and cut all connections."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._behind = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._other: dict[socket.socket, socket.socket] = {}
        self._swallows = False
        self._ends = False
        self._carried_s = time.monotonic()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def swallow(self) -> None:
        """Take what is sent and hand nothing on."""
        self._swallows = True

    @property
    def silent_s(self) -> float:
        """Seconds since anything passed."""
        return time.monotonic() - self._carried_s

    def cut(self) -> None:
        """Reset all connections; those that come later are served again."""
        with self._lock:
            self._swallows = False
            for end in tuple(self._other):
                self._drop(end)

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ends:
            for ready, _ in self._selector.select(0.02):
                with self._lock:
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif ready.fileobj in self._other:
                        self._carry(ready.fileobj)

    def _accept(self) -> None:
        ends = (self._listener.accept()[0], socket.create_connection(self._behind))
        for end, other in (ends, ends[::-1]):
            self._other[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _carry(self, end) -> None:
        try:
            data = end.recv(1 << 16)
            self._carried_s = time.monotonic()
            if data and not self._swallows:
                self._other[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        if end not in self._other:
            return
        for gone in (end, self._other[end]):
            del self._other[gone]
            self._selector.unregister(gone)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()


@pytest.fixture(params=["curve", "plain"])
def joined(request) -> Iterator[tuple[Mailbox, Mailbox, Wire]]:
    """Two mailboxes: the first dials the second, over a wire."""
    with contextlib.ExitStack() as stack:
        dialler, listener = (Mailbox(name=name, encrypted=request.param == "curve") for name in ("a", "b"))
        for mailbox in (dialler, listener):
            stack.callback(mailbox.close)
        wire = Wire(listener.endpoint)
        stack.callback(wire.close)
        listener.set_peers(1, [dialler.address, listener.address])
        dialler.set_peers(1, [dialler.address, replace(listener.address, endpoint=wire.endpoint)])
        yield dialler, listener, wire


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sender_dials", [True, False])
def test_what_was_on_its_way_comes_though_nobody_sends_again(
    joined, sender_dials: bool, key: Callable[..., MessageKey], collect: Callable[[Mailbox, int], list[Message]]
) -> None:
    dialler, listener, wire = joined
    source, target = (dialler, listener) if sender_dials else (listener, dialler)
    source.send(target.name, key(0), [MEGABYTE])
    collect(target, 1)
    until(lambda: wire.silent_s > SILENCE_S)
    wire.swallow()
    source.send(target.name, key(1), [MEGABYTE])
    until(lambda: source.counters().peers[target.name].messages_sent == 2)
    wire.cut()
    (message,) = collect(target, 1)
    assert (message.key, message.size_bytes) == (key(1), MEGABYTE.nbytes)
    assert dialler.counters().peers[listener.name].reconnections >= 1
    source.send(target.name, key(2), [MEGABYTE])
    assert [found.key for found in collect(target, 1)] == [key(2)], "nothing comes twice"
