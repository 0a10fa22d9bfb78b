"""The one thread that owns every socket: it waits long, moves frames, and keeps links as the peers are wanted."""

import contextlib
import math
import time
from typing import Any

import zmq

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.connection.threads import Died, ReliedOnThread
from spantrain.transport.connection.waker import Waker
from spantrain.transport.mailbox.exchange import Correspondent, Exchange
from spantrain.transport.mailbox.links import AcceptedLink, DialledLink, Link
from spantrain.transport.mailbox.listener import Listener
from spantrain.transport.mailbox.receiver import Receiver
from spantrain.transport.mailbox.sender import Sender
from spantrain.transport.mailbox.wire import BYE, RESET, WELCOME, WHO, decode_bye, decode_greeting, encode_bye

_RETRY_S = 0.004
"""A ROUTER does not say when a full route has room again; acknowledgements mostly come sooner than this."""
_BURST = 64
_LINGER_MS = 200


class Loop(ReliedOnThread):
    """Moves frames between an `Exchange` and the network until it is told to stop."""

    def __init__(self, exchange: Exchange, bind: str, keypair: KeyPair | None, died: Died) -> None:
        """`died` is told why it ended before that; then the exchange is stopped."""
        super().__init__(self._move, name=f"mailbox {exchange.name}", died=self._end)
        self._exchange, self._tell = exchange, died
        self._keypair = keypair
        self._sender = Sender(exchange)
        self._receiver = Receiver(exchange)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[str, Link] = {}
        self._by_socket: dict[zmq.Socket[bytes], DialledLink] = {}
        self._retry: set[str] = set()
        self._waker = Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._listener: Listener | None = None
        self.endpoint = ""
        try:
            if bind:
                self._listen(bind)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, f"cannot listen on {bind}: {error}; is the port in use?") from error

    def _listen(self, bind: str) -> None:
        self._listener = Listener(self._context, self._exchange, self._keypair, self._link_to)
        self.endpoint = self._listener.bind(bind)
        for socket in self._listener.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wake(self) -> None:
        """Make the thread look at the exchange; any thread may call this."""
        self._waker.wake()

    def _move(self) -> None:
        while not self._exchange.stopped:
            ready = self._poller.poll(self._timeout_ms())
            self._go_on(dict(ready))
        self._close()

    def _end(self, fault: str) -> None:
        self._exchange.stop(fault)
        self._tell(fault)
        self._context.destroy(linger=0)

    def _timeout_ms(self) -> int | None:
        if self._exchange.dirty:
            return 0
        now_s = time.monotonic()
        deadlines = [link.welcome_deadline_s for link in self._dialled if not link.up]
        if self._retry:
            deadlines.append(now_s + _RETRY_S)
        wait_s = min(deadlines, default=math.inf) - now_s
        return None if wait_s == math.inf else max(0, int(1000 * wait_s) + 1)

    @property
    def _dialled(self) -> list[DialledLink]:
        return [link for link in self._links.values() if isinstance(link, DialledLink)]

    def _go_on(self, ready: dict[Any, int]) -> None:
        if self._waker.fileno() in ready:
            self._waker.drain()
        if self._listener is not None:
            self._listener.attend(ready)
        if self._exchange.changed:
            self._reconcile()
        if self._listener is not None:
            self._listener.receive()
        for socket, events in ready.items():
            if socket in self._by_socket:
                self._receive_dialled(socket, events)
        self._redial_unanswered()
        self._flush_all()

    # Links follow the peers that are wanted.

    def _reconcile(self) -> None:
        with self._exchange.condition:
            self._exchange.changed = False
            wanted = dict(self._exchange.peers)
        for name in [name for name, link in self._links.items() if wanted.get(name) is not link.known]:
            self._drop(name, returns=name in wanted)
        for name, known in wanted.items():
            if name not in self._links:
                self._links[name] = self._new_link(known)
            link = self._links[name]
            if isinstance(link, DialledLink) and not link.sockets and not known.held_back:
                self._dial(link)

    def _new_link(self, known: Correspondent) -> Link:
        if known.dials:
            return DialledLink(known, self._exchange.limits)
        assert self._listener is not None, "a side that cannot be dialled dials"
        return self._listener.new_link(known)

    def _link_to(self, name: str) -> Link | None:
        """Return the link to a peer, which may have been admitted since the last look."""
        if self._exchange.changed:
            self._reconcile()
        return self._links.get(name)

    def _drop(self, name: str, *, returns: bool) -> None:
        link = self._links.pop(name)
        self._retry.discard(name)
        if link.up:
            self._acknowledge_last(link)
        if isinstance(link, DialledLink):
            self._hang_up(link)
        elif isinstance(link, AcceptedLink):
            assert self._listener is not None
            self._listener.drop(link, returns=returns)

    def _acknowledge_last(self, link: Link) -> None:
        """Tell a peer that is dropped what has come, or it would send it again when it is met again."""
        with contextlib.suppress(zmq.ZMQError), self._exchange.condition:
            self._sender.acknowledge(link)

    def _dial(self, link: DialledLink) -> None:
        try:
            with self._exchange.condition:
                link.dial(self._context, self._exchange.name, self._keypair)
        except zmq.ZMQError as error:
            link.close(b"", 0)
            told = f"it cannot be dialled at {link.known.peer.endpoint}: {error}"
            self._exchange.refuse(Refusal("bad address", told), link.known.peer.name)
            return
        for socket in (*link.sockets, *link.monitors):
            self._by_socket[socket] = link
            self._poller.register(socket, zmq.POLLIN)

    def _hang_up(self, link: DialledLink) -> None:
        for socket in (*link.sockets, *link.monitors):
            self._poller.unregister(socket)
            del self._by_socket[socket]
        link.close(encode_bye(self._exchange.generation), _LINGER_MS)

    def _redial(self, link: DialledLink) -> None:
        self._hang_up(link)
        link.known.count(reconnections=1)
        self._dial(link)

    def _part(self, link: DialledLink, generation: int) -> None:
        """Hang up on who said goodbye; dial again when the peers were, or will be, set anew since."""
        self._hang_up(link)
        link.sent_away()
        if generation < self._exchange.generation and not link.known.held_back:
            self._redial(link)

    def _redial_unanswered(self) -> None:
        now_s = time.monotonic()
        for link in self._dialled:
            if not link.up and now_s >= link.welcome_deadline_s:
                self._redial(link)

    # What comes in.

    def _receive_dialled(self, socket: "zmq.Socket[bytes]", events: int) -> None:
        link = self._by_socket[socket]
        if socket in link.monitors:
            self._note_end(link, socket)
            return
        if events & zmq.POLLOUT:
            link.blocked.discard(socket)
            self._poller.modify(socket, zmq.POLLIN)
            self._exchange.dirty.add(link.known.peer.name)
        for _ in range(_BURST):
            try:
                frames: list[zmq.Frame] = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                again = self._take_dialled(socket, link, frames)
            except Refusal as refusal:
                self._exchange.refuse(refusal, link.known.peer.name)
                continue
            if again:
                self._redial(link)
            if socket not in self._by_socket:
                return

    def _note_end(self, link: DialledLink, monitor: "zmq.Socket[bytes]") -> None:
        """Take note that a connection has ended; a goodbye may have come before that."""
        for socket in tuple(link.sockets):
            if socket in self._by_socket:
                self._receive_dialled(socket, 0)
        if monitor in link.monitors:
            link.cut_off(monitor)

    def _take_dialled(self, socket: "zmq.Socket[bytes]", link: DialledLink, frames: "list[zmq.Frame]") -> bool:
        """Take frames of a dialled connection; return whether the link must be dialled again."""
        kind = bytes(frames[0].buffer[:1])
        if kind == RESET:
            return True
        if kind == WHO:
            link.probes[socket] += 1
            return link.probes[socket] > 1
        if kind == BYE:
            self._part(link, decode_bye(frames[0].buffer))
        elif kind == WELCOME:
            greeting = decode_greeting(frames[0].buffer)
            if greeting.name != link.known.peer.name:
                raise Refusal("unknown peer", f"{greeting.name!r} answered in the place of {link.known.peer.name!r}")
            if greeting.epoch == link.epoch and not link.up:
                self._exchange.begin(link.known, greeting, fresh_link=False)
                link.welcomed()
        elif not link.up:
            raise Refusal("no greeting", "a frame came before the welcome")
        else:
            self._receiver.take(link, kind, frames)
        return False

    # What goes out.

    def _flush_all(self) -> None:
        with self._exchange.condition:
            names = self._exchange.dirty | self._retry
            self._exchange.dirty.clear()
            self._retry.clear()
            for name in names:
                link = self._links.get(name)
                if link is not None and link.up:
                    self._flush_or_give_up(name, link)

    def _flush_or_give_up(self, name: str, link: Link) -> None:
        try:
            if not self._sender.flush(link):
                self._wait_for_room(name, link)
        except zmq.ZMQError:
            link.up = False  # the route is gone; whoever dialled dials again
            if isinstance(link, DialledLink):
                link.welcome_deadline_s = 0.0

    def _wait_for_room(self, name: str, link: Link) -> None:
        if isinstance(link, DialledLink):
            for socket in link.blocked:
                self._poller.modify(socket, zmq.POLLIN | zmq.POLLOUT)
        else:
            self._retry.add(name)

    def _close(self) -> None:
        for link in self._dialled:
            self._hang_up(link)
        if self._listener is not None:
            self._listener.close()
        self._waker.close()
        self._context.term()
