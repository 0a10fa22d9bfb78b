"""The one thread that owns every socket of a plane: it keeps links as the peers are wanted, and moves frames.

What two planes share: who may connect and who came, hello, welcome, reset and goodbye, dialling and dialling anew. A
plane says what its frames mean, who its peers are, and what it makes of links that begin and end.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

import zmq
from zmq.utils.monitor import parse_monitor_message

from spantrain.transport.connection.bounds import BYE, RESET, Refusal, RefusalCounter
from spantrain.transport.connection.links import (
    HANDSHAKE_FAILED,
    AcceptedLink,
    DialledLink,
    PeerLink,
    Socket,
    SocketLimits,
    State,
    receive_frames,
)
from spantrain.transport.connection.listener import PeerListener
from spantrain.transport.connection.peers import Hello, KeyPair, PeerAddress
from spantrain.transport.connection.threads import Died, ReliedOnThread, Waker


class ConnectionLoop(ReliedOnThread, ABC, Generic[State]):
    """Moves frames between a plane and the network until it is told to stop; all but `wake` is the thread's own."""

    welcome_kind: bytes
    decode_hello: Callable[[bytes], Hello]
    """Reads a hello or a welcome; a `Refusal` says which bound it breaks."""
    late_kind = b""
    """A kind of frame of a peer that was dropped which is no fault."""
    probes = False
    """Whether ZeroMQ probes each new connection, so that one that it made again is noticed."""
    takes_late = False
    """Whether frames of a link that is not up any more are taken."""
    watched = zmq.EVENT_DISCONNECTED
    """What the monitors of dialled connections tell."""
    ends_at_goodbye = False
    """Whether a link whose other side says goodbye is not up any more, though more may come by it."""
    burst = 64
    """Messages that are taken of one socket before others have their turn."""
    pause_s = 0.0
    """How long a peer that has not welcomed this side, and asks to begin anew, is left alone."""
    resets_unknown = False
    """Whether who dials and is not known is told to dial again."""
    early_s = 0.0
    """How long who dials and is not known waits before it is refused."""

    def __init__(
        self, name: str, *, title: str, keypair: KeyPair | None, limits: SocketLimits, refused: RefusalCounter,
        died: Died,
    ) -> None:  # fmt: skip
        """`refused` counts what is not accepted; `died` is told why the thread ended before it was to."""
        super().__init__(self._move, name=f"{title} {name}", died=self.end)
        self.own_name, self.socket_limits, self.refused = name, limits, refused
        self.links: dict[str, PeerLink[State]] = {}
        self.endpoint = ""
        self._tell, self._keypair = died, keypair
        self._by_socket: dict[Socket, DialledLink[State]] = {}
        self._context: zmq.Context[Socket] = zmq.Context()
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._listener: PeerListener[State] | None = None

    def listen(self, bind: str) -> None:
        """Let peers dial this side, before the thread is started; nobody can if `bind` is empty.

        Raises:
            OSError: the address cannot be had.
        """
        if not bind:
            return
        try:
            self._listener = PeerListener(self, self._context, self._keypair)
            self.endpoint = self._listener.bind(bind)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, f"cannot listen on {bind}: {error}; is the port in use?") from error
        for socket in self._listener.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wake(self) -> None:
        """Make the thread look at what is to be done; any thread may call this."""
        self._waker.wake()

    # What a plane says.

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the thread is to end."""

    @abstractmethod
    def obey(self) -> None:
        """Do what other threads want; first of all, each time."""

    @abstractmethod
    def wait_s(self) -> float:
        """Return how long `finish` can wait."""

    @abstractmethod
    def finish(self, now_s: float) -> None:
        """Send what is to be sent; last of all, each time."""

    @abstractmethod
    def name_of(self, public_key: str) -> str | None:
        """Return the peer that has a key."""

    def accepted_link(self, name: str) -> AcceptedLink[State] | None:
        """Return the link to a peer that dials this side."""
        link = self.links.get(name)
        return link if isinstance(link, AcceptedLink) else None

    @abstractmethod
    def hellos(self, link: DialledLink[State]) -> list[bytes]:
        """Return what to say on each connection of a link that is dialled now; number it anew."""

    @abstractmethod
    def answers(self, hello: Hello, link: DialledLink[State]) -> bool:
        """Return whether a welcome answers what was said last.

        Raises:
            Refusal: it is somebody else's.
        """

    @abstractmethod
    def greeted(self, link: PeerLink[State], hello: Hello) -> None:
        """Take in what the other side says as a link begins."""

    @abstractmethod
    def welcome(self, link: AcceptedLink[State]) -> bytes:
        """Return the answer to a peer that said hello on all connections."""

    @abstractmethod
    def begun(self, link: PeerLink[State]) -> None:
        """Make use of a link that is up."""

    @abstractmethod
    def take(self, link: PeerLink[State], kind: bytes, frames: "list[zmq.Frame]") -> None:
        """Take one message of the plane's own.

        Raises:
            Refusal: it breaks a rule.
        """

    def take_first(
        self, socket: Socket, link: DialledLink[State], kind: bytes, frames: "list[zmq.Frame]"  # noqa: ARG002
    ) -> bool:  # fmt: skip
        """Return whether a message of a dialled connection was the connection's own business, and is done with."""
        return False

    def lost(self, link: PeerLink[State], reason: str) -> None:
        """Take note that a link that was up is not any more; here that is nothing: what it lacks can be sent again."""

    def farewell(self) -> bytes:
        """Return what to say when connections are closed; nothing if empty."""
        return BYE

    def dialling_anew(self, link: DialledLink[State]) -> None:
        """Take note that a link is dialled once more."""

    # The thread.

    def _move(self) -> None:
        while not self.is_over:
            ready = dict(self._poller.poll(self._timeout_ms()))
            self._go_on(ready)
        self._close()

    def end(self, fault: str) -> None:
        """Say why the thread has ended before it was to."""
        self._tell(fault)
        self._context.destroy(linger=0)

    def _timeout_ms(self) -> int | None:
        now_s = time.monotonic()
        waits_s = [link.redial_s - now_s for link in self.dialled if not link.up]
        if self._listener is not None:
            waits_s.append(self._listener.due_s - now_s)
        wait_s = min(self.wait_s(), *waits_s, math.inf)
        return None if wait_s == math.inf else 0 if wait_s <= 0 else int(1000 * wait_s) + 1

    @property
    def dialled(self) -> list[DialledLink[State]]:
        """The links that this side opens."""
        return [link for link in self.links.values() if isinstance(link, DialledLink)]

    def _go_on(self, ready: dict[Any, int]) -> None:
        if self._waker.fileno() in ready:
            self._waker.drain()
        self.obey()
        if self._listener is not None:
            self._listener.attend(ready)
            self._listener.receive()
        for socket, events in ready.items():
            if socket in self._by_socket:
                self._receive(socket, events)
        now_s = time.monotonic()
        for link in self.dialled:
            if not link.up and now_s >= link.redial_s:
                self._hang_up(link)
                self.dialling_anew(link)
                self.dial(link)
        self.finish(now_s)

    # Links.

    def accept(self, peer: PeerAddress, state: State) -> AcceptedLink[State]:
        """Return a link that waits for a peer to dial."""
        assert self._listener is not None, "a side that cannot be dialled dials"
        return AcceptedLink(peer, state, self._listener.router)

    def dial(self, link: DialledLink[State]) -> None:
        """Dial a peer; who cannot be dialled at all is refused, and tried again."""
        try:
            link.dial(
                self._context, self._keypair, self.socket_limits, self.hellos(link), probes=self.probes,
                watched=self.watched,
            )  # fmt: skip
        except zmq.ZMQError as error:
            link.close(b"")
            refusal = Refusal("bad address", f"it cannot be dialled at {link.peer.endpoint}: {error}")
            self.refused.refuse(refusal, link.name)
            return
        for socket in (*link.sockets, *link.monitors):
            self._by_socket[socket] = link
            self._poller.register(socket, zmq.POLLIN)

    def _hang_up(self, link: DialledLink[State]) -> None:
        for socket in (*link.sockets, *link.monitors):
            self._poller.unregister(socket)
            del self._by_socket[socket]
        link.close(self.farewell())

    def drop(self, name: str, bye: bytes) -> None:
        """Forget a link; whoever dialled it is told to dial again (RESET), or goodbye."""
        link = self.links.pop(name)
        if isinstance(link, DialledLink):
            self._hang_up(link)
        elif isinstance(link, AcceptedLink) and self._listener is not None:
            self._listener.drop(link, bye)

    def hang_up_for(self, link: DialledLink[State], pause_s: float, reason: str) -> None:
        """Close all connections of a link, and dial it again after so long."""
        was_up, link.up = link.up, False
        self._hang_up(link)
        link.redial_s = time.monotonic() + pause_s
        if was_up:
            self.lost(link, reason)

    # What comes in by dialled connections.

    def _receive(self, socket: Socket, events: int) -> None:
        link = self._by_socket[socket]
        if socket in link.monitors:
            self._see_end(link, socket)
            return
        if events & zmq.POLLOUT:
            link.blocked.discard(socket)
            self._poller.modify(socket, zmq.POLLIN)
            self.begun(link)
        for _ in range(self.burst):
            try:
                frames = receive_frames(socket)
            except zmq.Again:
                return
            try:
                self.take_dialled(socket, link, frames)
            except Refusal as refusal:
                self.refused.refuse(refusal, link.name)
            if socket not in self._by_socket:
                return  # hung up meanwhile

    def _see_end(self, link: DialledLink[State], monitor: Socket) -> None:
        """Take note that a connection has ended; a goodbye may have come before that."""
        for socket in tuple(link.sockets):
            if socket in self._by_socket:
                self._receive(socket, 0)
        if monitor not in link.monitors:
            return
        ended = False
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            ended |= event == zmq.EVENT_DISCONNECTED
            if event & HANDSHAKE_FAILED:
                told = f"{link.name} did not prove its key, or refused this side's"
                self.refused.refuse(Refusal("handshake", told), link.name)
        if ended and link.up:
            link.up, link.redial_s = False, 0.0
            self.lost(link, "the connection has ended")

    def take_dialled(self, socket: Socket, link: DialledLink[State], frames: "list[zmq.Frame]") -> None:
        """Take frames of a dialled connection.

        Raises:
            Refusal: they break a rule.
        """
        kind = bytes(frames[0].buffer[:1])
        if kind == RESET:
            self.begin_anew(link)
        elif kind == self.welcome_kind:
            hello = self.decode_hello(frames[0].bytes)
            if self.answers(hello, link) and not link.up:
                self.greeted(link, hello)
                link.welcomed()
                self.begun(link)
        elif self.take_first(socket, link, kind, frames):
            return
        elif not link.up:
            raise Refusal("no greeting", "a frame came before the welcome")
        else:
            self.take(link, kind, frames)

    def begin_anew(self, link: DialledLink[State]) -> None:
        """Do as the other side asks: dial all connections again."""
        if link.up or not self.pause_s:
            self.hang_up_for(link, 0.0, "the other side began anew")
        else:
            link.redial_s = min(link.redial_s, time.monotonic() + self.pause_s)

    def wait_for_room(self, link: DialledLink[State]) -> None:
        """Have the plane hear when connections that are full have room again."""
        for socket in link.blocked:
            self._poller.modify(socket, zmq.POLLIN | zmq.POLLOUT)

    def _close(self) -> None:
        for link in self.dialled:
            self._hang_up(link)
        if self._listener is not None:
            self._listener.close()
        self._waker.close()
        self._context.term()
