"""The connections to one peer, all together a link: one for control, the others for what a plane carries.

Whoever dials opens one DEALER socket for each connection; whoever is dialled has one ROUTER for all peers, on which a
connection is a route. When one connection breaks, the side that dialled opens all anew.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import zmq

from spantrain.core.records import Record
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.peers import Hello, KeyPair, PeerAddress

State = TypeVar("State")
"""What a plane knows of a peer."""
Frames = Sequence["bytes | bytearray | memoryview"]
Socket = zmq.Socket[bytes]
_HEARTBEAT_INTERVAL_S = 2.0
_HEARTBEAT_TIMEOUT_S = 15.0
LINGER_MS = 200
_MAX_PATIENCE = 4
"""Over the first: each time that no answer came, the next is waited for twice as long."""
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class SocketLimits(Record):
    """Bounds of a plane's sockets."""

    max_frame_bytes: int
    """ZeroMQ closes a connection that announces more."""
    unsent_messages: int
    """That wait inside ZeroMQ for each connection; 0: what waits is bounded by other means."""
    unread_messages: int
    """That have come by a connection and were not looked at; then TCP holds the sender back."""


def data_socket(context: "zmq.Context[Socket]", kind: int, keypair: KeyPair | None, limits: SocketLimits) -> Socket:
    """Return a socket with what all data planes have in common: bounds, heartbeats, keep-alive, keys."""
    socket = context.socket(kind)
    options = {
        zmq.LINGER: LINGER_MS,
        zmq.SNDHWM: limits.unsent_messages,
        zmq.RCVHWM: limits.unread_messages,
        zmq.MAXMSGSIZE: limits.max_frame_bytes,
        zmq.HEARTBEAT_IVL: round(1000 * _HEARTBEAT_INTERVAL_S),
        zmq.HEARTBEAT_TIMEOUT: round(1000 * _HEARTBEAT_TIMEOUT_S),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.HANDSHAKE_IVL: 10_000,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 400,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    if keypair is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keypair.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keypair.secret_key.encode())
    return socket


def receive_frames(socket: Socket) -> "list[zmq.Frame]":
    """Return the frames of the next message, where they lie; pyzmq's own way asks more often whether there are more.

    Raises:
        zmq.Again: none has come.
    """
    frames = [socket.recv(flags=zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(flags=zmq.NOBLOCK, copy=False))
    return frames


class PeerLink(ABC, Generic[State]):
    """What dialled and accepted links have in common; owned by the thread of the sockets."""

    def __init__(self, peer: PeerAddress, state: State) -> None:
        self.peer, self.name, self.state = peer, peer.name, state
        self.up = False
        self.session, self.epoch = -1, 0
        self.connections = 0
        """How many there are, with the one for control."""
        self.control: list[bytes] = []
        """Frames for the first connection that found no room."""

    @abstractmethod
    def send(self, connection: int, frames: Frames, *, copy: bool = True) -> bool:
        """Hand frames to a connection, which must not change if they are not copied; False if it has no room.

        Raises:
            zmq.ZMQError: the connection is gone.
        """


class DialledLink(PeerLink[State]):
    """Connections that this side opened."""

    def __init__(self, peer: PeerAddress, state: State, *, connections: int, welcome_s: float) -> None:
        super().__init__(peer, state)
        self.sockets: list[Socket] = []
        self.monitors: list[Socket] = []
        """Each tells that a socket's connection has ended: libzmq makes another, but what was on its way is lost."""
        self.asked: set[Socket] = set()
        """Those that were asked who this is: once more means that one was connected again."""
        self.blocked: set[Socket] = set()
        self.redial_s = math.inf
        """When to dial, or dial anew, if it is not up by then."""
        self._welcome_s = self._patience_s = welcome_s
        self.connections = connections

    def dial(
        self, context: "zmq.Context[Socket]", keypair: KeyPair | None, limits: SocketLimits, hellos: Sequence[bytes], *,
        probes: bool, watched: int,
    ) -> None:  # fmt: skip
        """Open all connections and say hello on each; `watched` events are told by the monitors.

        Raises:
            zmq.ZMQError: nothing can be dialled so; close it.
        """
        assert not self.sockets, "close before dialling again"
        self.up = False
        self.redial_s = time.monotonic() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE * self._welcome_s)
        for hello in hellos:
            socket = data_socket(context, zmq.DEALER, keypair, limits)
            self.sockets.append(socket)
            socket.setsockopt(zmq.PROBE_ROUTER, int(probes))
            if keypair is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, self.peer.public_key.encode())
            socket.setsockopt(zmq.IPV6, int("[" in self.peer.endpoint))
            self.monitors.append(socket.get_monitor_socket(watched))
            socket.connect(self.peer.endpoint)
            socket.send(hello, flags=zmq.NOBLOCK)

    def welcomed(self) -> None:
        """Note that the other side has answered."""
        self.up = True
        self._patience_s = self._welcome_s

    def send(self, connection: int, frames: Frames, *, copy: bool = True) -> bool:
        """Hand frames to a connection; False if it has no room."""
        socket = self.sockets[connection]
        if socket in self.blocked:
            return False
        try:
            socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            self.blocked.add(socket)
            return False
        return True

    def close(self, bye: bytes) -> None:
        """Close all connections, after a goodbye if there is one."""
        for socket in self.sockets:
            if bye:
                with contextlib.suppress(zmq.Again):  # it is full: the other side will see it end without a goodbye
                    socket.send(bye, flags=zmq.NOBLOCK)
            socket.disable_monitor()
            socket.close(linger=LINGER_MS if bye else 0)
        for monitor in self.monitors:
            monitor.close(linger=0)
        for kept in (self.sockets, self.monitors, self.asked, self.blocked, self.control):
            kept.clear()
        self.up = False


class AcceptedLink(PeerLink[State]):
    """Connections that the peer opened to this side's ROUTER."""

    def __init__(self, peer: PeerAddress, state: State, router: Socket) -> None:
        super().__init__(peer, state)
        self._router = router
        self.routes: list[bytes | None] = []
        self.descriptors: set[int] = set()
        """What ZeroMQ's monitor calls the connections by."""

    def begins_anew(self, hello: Hello) -> bool:
        """Whether a hello is of connections that are opened in the place of all before."""
        if hello.session != self.session or hello.epoch > self.epoch:
            return True
        said = hello.connections == len(self.routes) and self.routes[hello.connection] is not None
        return said and not self.up and hello.epoch == self.epoch

    def restart(self, hello: Hello) -> None:
        """Wait for the connections that a hello is the first of."""
        self.session, self.epoch, self.up = hello.session, hello.epoch, False
        self.connections, self.routes = hello.connections, [None] * hello.connections
        self.descriptors.clear()
        self.control.clear()

    def hello(self, route: bytes, hello: Hello, descriptor: int | None) -> bool:
        """Take one connection's hello; return whether the link is complete now.

        Raises:
            Refusal: there is such a connection already.
        """
        if hello.epoch < self.epoch:
            return False
        if self.up or hello.connections != len(self.routes):
            raise Refusal("malformed", f"{self.name}: a second hello for connection {hello.connection} of a session")
        self.routes[hello.connection] = route
        if descriptor is not None:
            self.descriptors.add(descriptor)
        return None not in self.routes

    def send(self, connection: int, frames: Frames, *, copy: bool = True) -> bool:
        """Hand frames to a connection; False if it has no room."""
        route = self.routes[connection]
        assert route is not None, "send only when the link is up"
        try:
            self._router.send_multipart([route, *frames], flags=zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return False
        return True
