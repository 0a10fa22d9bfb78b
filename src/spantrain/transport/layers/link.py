"""The connections of a layer wire to one peer: one for control, the others for layers; dialled, or come in.

A link lives once: when one of its connections ends, all that was under way by it is lost, and the side that dialled
opens all anew, with a new session. So a piece of one session never ends up in a layer of another.
"""

import contextlib
import secrets
import time
from abc import ABC, abstractmethod

import zmq

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.layers.format import BYE, HEAD_MAX_BYTES, HELLO, LayerHello, encode_hello
from spantrain.transport.layers.interface import LayerLimits
from spantrain.transport.mailbox.interface import PeerAddress
from spantrain.transport.mailbox.links import set_options

_MOST_PATIENCE = 4
_LINGER_MS = 200
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def layer_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, keypair: KeyPair | None, limits: LayerLimits
) -> "zmq.Socket[bytes]":
    """Return a socket with the heartbeats, keep-alive and keys of all data planes, and bounds of its own.

    What waits to be sent is bounded by what the other side grants, not by a number of messages; what has come and was
    not read, by a few frames, and then TCP holds the sender back.
    """
    socket = context.socket(kind)
    set_options(socket, keypair)
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: 0,
        zmq.RCVHWM: max(4, limits.window_bytes // limits.frame_bytes),
        zmq.MAXMSGSIZE: max(limits.frame_bytes, HEAD_MAX_BYTES) + 64,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def receive_frames(socket: "zmq.Socket[bytes]") -> "list[zmq.Frame]":
    """Return the frames of the next message, where they lie; pyzmq's own way asks more often whether there are more.

    Raises:
        zmq.Again: none has come.
    """
    frames = [socket.recv(flags=zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(flags=zmq.NOBLOCK, copy=False))
    return frames


class LayerLink(ABC):
    """What both kinds have in common."""

    def __init__(self, peer: PeerAddress, limits: LayerLimits) -> None:
        self.peer = peer
        self.session = 0
        self.up = False
        self.limits = limits
        self.frame_bytes = limits.frame_bytes
        """Largest piece that both sides take."""
        self.window_bytes = limits.window_bytes
        """What the other side takes of layers that it has not granted anything of."""
        self._poured_bytes: list[int] = []

    @property
    def name(self) -> str:
        """The peer's."""
        return self.peer.name

    def own_hello(self, name: str, *, line: int = 0, lines: int = 2) -> LayerHello:
        """Return what this side says of itself."""
        return LayerHello(
            name=name, session=self.session, line=line, lines=lines, frame_bytes=self.limits.frame_bytes,
            window_bytes=self.limits.window_bytes,
        )  # fmt: skip

    def met(self, hello: LayerHello) -> None:
        """Note what the other side said of itself: the link is up."""
        self.up = True
        self.frame_bytes = min(self.limits.frame_bytes, hello.frame_bytes)
        self.window_bytes = hello.window_bytes
        self._poured_bytes = [0] * (self.lines - 1)

    @property
    @abstractmethod
    def lines(self) -> int:
        """Number of connections, with the one for control."""

    def choose_line(self, size_bytes: int) -> int:
        """Return the connection for a layer: the one that was given the fewest bytes."""
        least = min(range(len(self._poured_bytes)), key=self._poured_bytes.__getitem__)
        self._poured_bytes[least] += size_bytes
        return 1 + least

    @abstractmethod
    def send(self, line: int, head: bytes, piece: "memoryview | bytes | None" = None) -> None:
        """Hand a message to a connection; the piece must not change until it has left. One that is gone drops it."""


class DialledLayerLink(LayerLink):
    """Connections that this side opened."""

    def __init__(self, peer: PeerAddress, limits: LayerLimits) -> None:
        super().__init__(peer, limits)
        self.sockets: list[zmq.Socket[bytes]] = []
        self.monitors: list[zmq.Socket[bytes]] = []
        self.redial_s = 0.0
        """When to dial, or dial anew, unless it is up by then."""
        self._patience_s = limits.welcome_s

    @property
    def lines(self) -> int:
        """Number of connections, with the one for control."""
        return 1 + self.limits.connections

    def dial(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, keypair: KeyPair | None) -> None:
        """Open all connections and say hello on each.

        Raises:
            zmq.ZMQError: nothing can be dialled so; close it.
        """
        self.close()
        self.session = secrets.randbits(62)
        limits, lines = self.limits, self.lines
        self.redial_s = time.monotonic() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE * limits.welcome_s)
        for line in range(lines):
            socket = layer_socket(context, zmq.DEALER, keypair, limits)
            self.sockets.append(socket)
            if keypair is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, self.peer.public_key.encode())
            self.monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED))
            socket.connect(self.peer.endpoint)
            socket.send(encode_hello(HELLO, self.own_hello(name, line=line, lines=lines)), flags=zmq.NOBLOCK)

    def met(self, hello: LayerHello) -> None:
        """Note what the other side answered."""
        super().met(hello)
        self._patience_s = self.limits.welcome_s

    def send(self, line: int, head: bytes, piece: "memoryview | bytes | None" = None) -> None:
        """Hand a message to a connection."""
        if piece is None:
            self.sockets[line].send(head, flags=zmq.NOBLOCK)
        else:
            self.sockets[line].send_multipart([head, piece], flags=zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Say goodbye where there was somebody, and close all connections."""
        for socket in self.sockets:
            if self.up:
                with contextlib.suppress(zmq.Again):
                    socket.send(BYE, flags=zmq.NOBLOCK)
            socket.disable_monitor()
            socket.close(linger=_LINGER_MS if self.up else 0)
        for monitor in self.monitors:
            monitor.close(linger=0)
        self.sockets.clear()
        self.monitors.clear()
        self.up = False


class HostedLayerLink(LayerLink):
    """Connections that the peer opened to this side's ROUTER."""

    def __init__(self, peer: PeerAddress, limits: LayerLimits, router: "zmq.Socket[bytes]", hello: LayerHello) -> None:
        super().__init__(peer, limits)
        self.session = hello.session
        self.routes: list[bytes | None] = [None] * hello.lines
        self.descriptors: set[int] = set()
        """Of the connections: what ZeroMQ's monitor calls them by."""
        self._router = router

    @property
    def lines(self) -> int:
        """Number of connections, with the one for control."""
        return len(self.routes)

    def take(self, hello: LayerHello, route: bytes, descriptor: int) -> bool:
        """Take one connection's hello; return whether the link is complete now.

        Raises:
            Refusal: there is such a connection already.
        """
        if self.up or hello.lines != len(self.routes) or self.routes[hello.line] is not None:
            raise Refusal("malformed", f"{self.name}: a second hello for connection {hello.line} of a session")
        self.routes[hello.line] = route
        self.descriptors.add(descriptor)
        return None not in self.routes

    def send(self, line: int, head: bytes, piece: "memoryview | bytes | None" = None) -> None:
        """Hand a message to a connection."""
        route = self.routes[line]
        assert route is not None, "send only when the link is up"
        with contextlib.suppress(zmq.ZMQError):  # it is gone: the monitor tells so in a moment
            if piece is None:
                self._router.send_multipart([route, head], flags=zmq.NOBLOCK)
            else:
                self._router.send_multipart([route, head, piece], flags=zmq.NOBLOCK, copy=False)
