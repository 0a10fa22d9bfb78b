"""A layer wire on the layer of connections: its frames, and what links mean to what goes and comes."""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq

from spantrain.transport.connection.bounds import HELLO, RESET, Refusal, RefusalCounter
from spantrain.transport.connection.links import HANDSHAKE_FAILED, AcceptedLink, DialledLink, PeerLink, SocketLimits
from spantrain.transport.connection.loop import ConnectionLoop
from spantrain.transport.connection.peers import Hello, KeyPair, PeerAddress
from spantrain.transport.connection.threads import Died
from spantrain.transport.layers import format as wire
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.departures import Departures
from spantrain.transport.layers.interface import LayerLimits, LayerLink, LayerTerms

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.2
"""Until a peer that does not know this side yet is dialled again."""
_LOOK_S = 1.0
"""At most between two looks at what is overdue."""

Order = Callable[[], None]


def socket_limits(limits: LayerLimits) -> SocketLimits:
    """Return the bounds of sockets: what waits to be sent is bounded by what the other side grants."""
    return SocketLimits(
        max_frame_bytes=max(limits.frame_bytes, wire.HEAD_MAX_BYTES) + 64,
        unsent_messages=0,
        unread_messages=max(4, limits.window_bytes // limits.frame_bytes),
    )


class LayerLoop(ConnectionLoop[LayerTerms]):
    """Moves frames between the network and what goes and comes, until it is told to stop."""

    welcome_kind = wire.WELCOME
    decode_hello = staticmethod(wire.decode_hello)
    watched = zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
    burst = 16
    pause_s = _AGAIN_S
    resets_unknown = True
    is_over = False

    def __init__(self, name: str, bind: str, keypair: KeyPair | None, limits: LayerLimits, died: Died) -> None:
        """`died` is told why it ended before that.

        Raises:
            OSError: the address cannot be had.
        """
        super().__init__(
            name, title="layers of", keypair=keypair, limits=socket_limits(limits), refused=RefusalCounter(name),
            died=died,
        )  # fmt: skip
        self.early_s = limits.early_s
        self._limits = limits
        self._orders: deque[Order] = deque()
        self._told = False
        self._look_s = 0.0
        self._patience_s = min(_LOOK_S, limits.no_progress_s / 4)
        self._peers: dict[str, PeerAddress] = {}
        self.listen(bind)

    def begin(self, arrivals: Arrivals, departures: Departures) -> None:
        """Start the thread."""
        self.arrivals, self.departures = arrivals, departures
        self.start()

    def order(self, order: Order) -> None:
        """Have the thread do something; any thread may call this."""
        self._orders.append(order)
        if not self._told:
            self._told = True
            self.wake()

    def stop(self) -> None:
        """End soon; called by the thread itself."""
        self.is_over = True

    def end(self, fault: str) -> None:
        """Say why the thread has ended before it was to."""
        self.is_over = True
        super().end(fault)

    def obey(self) -> None:
        """Do what was ordered."""
        self._told = False
        while self._orders:
            self._orders.popleft()()

    def wait_s(self) -> float:
        """Return how long nothing can be overdue."""
        return (
            0.0 if self._orders else self._patience_s if self.arrivals.pending or self.departures.pending else math.inf
        )

    def finish(self, now_s: float) -> None:
        """Give up what is overdue."""
        if now_s >= self._look_s:
            self._look_s = now_s + self._patience_s
            self.arrivals.overdue(now_s, self.links)
            self.departures.overdue(now_s, self.links)

    # Peers and links.

    def name_of(self, public_key: str) -> str | None:
        """Return the peer that has a key."""
        return next((peer.name for peer in self._peers.values() if peer.public_key == public_key), None)

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Dial who is new and listens, drop who is gone or is another now; called by the thread itself."""
        wanted = {peer.name: peer for peer in peers}
        gone = [name for name, peer in self._peers.items() if wanted.get(name) != peer]
        self._peers = wanted
        for name in gone:
            if name in self.links:
                self.drop(name, RESET)
            self._give_up(name, f"{name} is no peer any more, or listens elsewhere")
        for name, peer in wanted.items():
            if name not in self.links and (peer.endpoint or self.endpoint):
                self.links[name] = self._new_link(peer)

    def _new_link(self, peer: PeerAddress) -> LayerLink:
        terms = LayerTerms(frame_bytes=self._limits.frame_bytes, window_bytes=self._limits.window_bytes)
        if not peer.endpoint:
            return self.accept(peer, terms)
        link = DialledLink(peer, terms, connections=2, welcome_s=self._limits.welcome_s)
        link.redial_s = 0.0
        return link

    # Beginnings and ends.

    def _own_hello(self, session: int, connection: int, connections: int) -> wire.LayerHello:
        return wire.LayerHello(
            name=self.own_name, session=session, connection=connection, connections=connections,
            frame_bytes=self._limits.frame_bytes, window_bytes=self._limits.window_bytes,
        )  # fmt: skip

    def hellos(self, link: DialledLink[LayerTerms]) -> list[bytes]:
        """Return what to say on each connection, in a new session."""
        link.session = secrets.randbits(62)
        return [
            wire.encode_hello(HELLO, self._own_hello(link.session, connection, link.connections))
            for connection in range(link.connections)
        ]

    def answers(self, hello: Hello, link: DialledLink[LayerTerms]) -> bool:
        """Return whether a welcome is of this session."""
        return hello.session == link.session and hello.name == link.name

    def greeted(self, link: LayerLink, hello: Hello) -> None:
        """Note what the other side takes."""
        assert isinstance(hello, wire.LayerHello)
        link.state.frame_bytes = min(self._limits.frame_bytes, hello.frame_bytes)
        link.state.window_bytes = hello.window_bytes

    def welcome(self, link: AcceptedLink[LayerTerms]) -> bytes:
        """Return the answer to a peer."""
        return wire.encode_hello(wire.WELCOME, self._own_hello(link.session, 0, 2))

    def begun(self, link: LayerLink) -> None:
        """Pour what waits."""
        self.departures.flush(link, time.monotonic())

    def lost(self, link: LayerLink, reason: str) -> None:
        """Give up all that is under way."""
        if isinstance(link, DialledLink):
            _LOG.warning("%s dials %s anew: %s", self.own_name, link.name, reason)
        self._give_up(link.name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        self.arrivals.link_lost(name, reason)
        self.departures.link_lost(name, reason)

    # What comes in.

    def take(self, link: PeerLink[LayerTerms], kind: bytes, frames: "list[zmq.Frame]") -> None:
        """Take what is said of layers, and their bytes."""
        now_s = time.monotonic()
        if len(frames) != (2 if kind == wire.DATA else 1):
            raise Refusal("malformed", f"a message of {len(frames)} frames and kind {kind!r}")
        head = frames[0].bytes
        if kind == wire.DATA:
            self.arrivals.data(link, *wire.decode_pair(head), frames[1].buffer, now_s)
        elif kind == wire.OPEN:
            self.arrivals.opened(link, wire.decode_opening(head), now_s)
        elif kind == wire.CANCEL:
            self.arrivals.cancelled(link, wire.decode_number(head))
        elif kind == wire.GRANT:
            self.departures.granted(link, *wire.decode_pair(head), now_s)
        elif kind == wire.DONE:
            self.departures.done(link, wire.decode_number(head), now_s)
        elif kind == wire.REFUSED:
            self.departures.refused(link, *wire.decode_refused(head), now_s)
        else:
            raise Refusal("malformed", f"unknown kind of message {kind!r}")
