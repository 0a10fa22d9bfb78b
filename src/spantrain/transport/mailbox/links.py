"""The connections to one peer: one for control, one for small messages, the others for bulk.

What says that messages have come has a connection of its own, since on a slow link it would wait behind messages that
go the same way, and whoever waits for it would take his own way for slow.

Whoever dials opens one DEALER socket for each connection; whoever is dialled has one ROUTER for all peers, on which a
connection is a route. A link is the whole bundle: when one connection breaks, the side that dialled opens all anew,
with a higher epoch, and both sides send again what the other does not have.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod

import zmq

from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.mailbox.exchange import Correspondent
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.wire import HELLO, MAX_FRAME_BYTES, Greeting, encode_greeting

_CONTROL, _EXPRESS, _FIRST_BULK = 0, 1, 2
"""Connections by what they carry."""
_PIPE_CHUNKS = 8
"""Chunks that wait inside ZeroMQ for each connection: enough to keep it busy, few enough for lanes to take turns."""
_UNREAD_MESSAGES = 64
"""That have come by a connection and were not looked at; then TCP holds the sender back."""
_HEARTBEAT_INTERVAL_S = 2.0
_HEARTBEAT_TIMEOUT_S = 15.0
_MOST_PATIENCE = 4
"""Over the first: each time that no answer came, the next is waited for twice as long."""
_SENT_AWAY_S = 60.0
"""Whoever said goodbye is to be dialled again when the peers are set anew, not before; this is for when it forgot."""
_CURVE_FRAME_BYTES, _PLAIN_FRAME_BYTES = 42, 9


def frame_overhead_bytes(encrypted: bool) -> int:
    """Return what ZeroMQ adds to each frame: its length and flags, and nonce and authenticator if encrypted."""
    return _CURVE_FRAME_BYTES if encrypted else _PLAIN_FRAME_BYTES


def set_options(socket: "zmq.Socket[bytes]", keypair: KeyPair | None) -> None:
    """Set what all sockets have in common: bounds, heartbeats, keep-alive, keys."""
    options = {
        zmq.LINGER: 200,
        zmq.SNDHWM: _PIPE_CHUNKS,
        zmq.RCVHWM: _UNREAD_MESSAGES,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.HEARTBEAT_IVL: round(1000 * _HEARTBEAT_INTERVAL_S),
        zmq.HEARTBEAT_TIMEOUT: round(1000 * _HEARTBEAT_TIMEOUT_S),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 400,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    if keypair is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keypair.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keypair.secret_key.encode())


class Link(ABC):
    """What dialled and accepted links have in common."""

    def __init__(self, known: Correspondent) -> None:
        self.known = known
        self.up = False
        self.epoch = 0
        self.control: list[bytes] = []
        """Control frames that found no room."""

    @property
    @abstractmethod
    def connections(self) -> int:
        """Number of connections."""

    @abstractmethod
    def send(self, connection: int, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Hand frames to a connection; False if it has no room.

        Raises:
            zmq.ZMQError: the connection is gone.
        """

    def send_control(self, frame: bytes) -> bool:
        """Hand a control frame to its connection; False if it has no room."""
        return self.send(_CONTROL, [frame])

    def send_express(self, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Hand frames of a small message to their connection; False if it has no room."""
        return self.send(_EXPRESS, frames)

    def send_bulk(self, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Hand frames to the first bulk connection that has room; False if none has.

        The others are for links that one connection does not fill: on a slow one, messages on several would share it
        and all come late.
        """
        return any(self.send(connection, frames) for connection in range(_FIRST_BULK, self.connections))


class DialledLink(Link):
    """Connections that this side opened."""

    def __init__(self, known: Correspondent, limits: Limits) -> None:
        super().__init__(known)
        self.sockets: list[zmq.Socket[bytes]] = []
        self.monitors: list[zmq.Socket[bytes]] = []
        """Each tells that a socket's connection has ended: libzmq makes another, but what was on its way is lost."""
        self.probes: dict[zmq.Socket[bytes], int] = {}
        """How often each socket was asked who it is: more than once means that it was connected again."""
        self.blocked: set[zmq.Socket[bytes]] = set()
        self.welcome_deadline_s = math.inf
        """When to dial again if it is not up by then; never, before it was dialled for the first time."""
        self._welcome_s = self._patience_s = limits.welcome_s
        self._connections = _FIRST_BULK + limits.bulk_connections

    @property
    def connections(self) -> int:
        """Number of connections."""
        return self._connections

    def dial(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, keypair: KeyPair | None) -> None:
        """Open all connections and say hello on each.

        Raises:
            zmq.ZMQError: nothing can be dialled so; close it.
        """
        assert not self.sockets, "close before dialling again"
        self.epoch += 1
        self.up = False
        self.known.inbox.restart(anew=False)
        self.welcome_deadline_s = time.monotonic() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE * self._welcome_s)
        peer = self.known.peer
        for connection in range(self.connections):
            socket = context.socket(zmq.DEALER)
            self.sockets.append(socket)
            set_options(socket, keypair)
            socket.setsockopt(zmq.PROBE_ROUTER, 1)
            if keypair is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, peer.public_key.encode())
            socket.connect(peer.endpoint)
            self.monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            self.probes[socket] = 0
            greeting = self.known.greeting(name, self.epoch, connection, self.connections)
            socket.send(encode_greeting(HELLO, greeting), flags=zmq.NOBLOCK)

    def welcomed(self) -> None:
        """Note that the other side has answered."""
        self.up = True
        self._patience_s = self._welcome_s

    def cut_off(self, monitor: "zmq.Socket[bytes]") -> None:
        """Note that a connection has ended without a goodbye: all are to be opened anew, at once.

        Before the other side has answered, libzmq goes on trying, and `welcome_deadline_s` says when to dial again.
        """
        while monitor.poll(0):
            monitor.recv_multipart()
        if self.up:
            self.up = False
            self.welcome_deadline_s = 0.0

    def sent_away(self) -> None:
        """Note that the other side has said goodbye."""
        self.welcome_deadline_s = time.monotonic() + _SENT_AWAY_S

    def send(self, connection: int, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Hand frames to a connection; False if it has no room."""
        socket = self.sockets[connection]
        if socket in self.blocked:
            return False
        try:
            socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            self.blocked.add(socket)
            return False
        return True

    def close(self, bye: bytes, linger_ms: int) -> None:
        """Say goodbye and close all connections."""
        for socket in self.sockets:
            with contextlib.suppress(zmq.Again):  # it is full: the other side will see it end without a goodbye
                socket.send(bye, flags=zmq.NOBLOCK)
            socket.disable_monitor()
            socket.close(linger=linger_ms)
        for monitor in self.monitors:
            monitor.close(linger=0)
        self.sockets.clear()
        self.monitors.clear()
        self.probes.clear()
        self.blocked.clear()
        self.control.clear()
        self.up = False


class AcceptedLink(Link):
    """Connections that the peer opened to this side's ROUTER."""

    def __init__(self, known: Correspondent, router: "zmq.Socket[bytes]") -> None:
        super().__init__(known)
        self.router = router
        self.routes: list[bytes | None] = []
        self.session = 0

    @property
    def connections(self) -> int:
        """Number of connections."""
        return len(self.routes)

    def hello(self, route: bytes, greeting: Greeting) -> bool:
        """Take one connection's hello; return whether the bundle is complete now."""
        if greeting.session != self.session or greeting.epoch > self.epoch:
            self.session, self.epoch = greeting.session, greeting.epoch
            self.up = False
            self.routes = [None] * greeting.connections
            self.control.clear()
        if greeting.epoch < self.epoch or greeting.connections != len(self.routes) or self.up:
            return False
        self.routes[greeting.connection] = route
        return None not in self.routes

    def send(self, connection: int, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Hand frames to a connection; False if it has no room."""
        route = self.routes[connection]
        assert route is not None, "send only when the link is up"
        try:
            self.router.send_multipart([route, *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
