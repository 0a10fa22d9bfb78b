"""The mailbox on the layer of connections: its frames, what goes out when, and what links mean to the exchange.

What says that messages have come has a connection of its own, since on a slow link it would wait behind messages that
go the same way, and whoever waits for it would take his own way for slow. When a link begins anew, both sides send
again what the other does not have.
"""

import contextlib
import math
import time
import zlib

import zmq

from spantrain.transport.connection.bounds import BYE, HELLO, RESET, WHO, Refusal
from spantrain.transport.connection.links import AcceptedLink, DialledLink, PeerLink, Socket, SocketLimits
from spantrain.transport.connection.loop import ConnectionLoop
from spantrain.transport.connection.peers import Hello, KeyPair
from spantrain.transport.connection.threads import Died
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.exchange import Exchange, MailboxPeer
from spantrain.transport.mailbox.outbox import OutgoingMessage

_CONTROL, _EXPRESS, _FIRST_BULK = 0, 1, 2
"""Connections by what they carry."""
SOCKET_LIMITS = SocketLimits(max_frame_bytes=wire.MAX_FRAME_BYTES, unsent_messages=8, unread_messages=64)
"""Unsent: enough to keep a connection busy, few enough for lanes to take turns."""
_RETRY_S = 0.004
"""A ROUTER does not say when a full route has room again; acknowledgements mostly come sooner than this."""
_BURST = 64
_SENT_AWAY_S = 60.0
"""Whoever said goodbye is to be dialled again when the peers are set anew, not before; this is for when it forgot."""
_CURVE_FRAME_BYTES, _PLAIN_FRAME_BYTES = 42, 9


class MailboxLoop(ConnectionLoop[MailboxPeer]):
    """Moves frames between an `Exchange` and the network until the exchange is stopped."""

    welcome_kind = wire.WELCOME
    decode_hello = staticmethod(wire.decode_greeting)
    late_kind = wire.ACK
    probes = True
    takes_late = True
    ends_at_goodbye = True

    def __init__(self, exchange: Exchange, bind: str, keypair: KeyPair | None, died: Died) -> None:
        """`died` is told why it ended before that; then the exchange is stopped.

        Raises:
            OSError: the address cannot be had.
        """
        super().__init__(
            exchange.name, title="mailbox", keypair=keypair, limits=SOCKET_LIMITS, refused=exchange.refused, died=died
        )
        self._exchange = exchange
        self._overhead_bytes = _CURVE_FRAME_BYTES if exchange.encrypted else _PLAIN_FRAME_BYTES
        """What ZeroMQ adds to each frame: its length and flags, and nonce and authenticator if encrypted."""
        self._retry: set[str] = set()
        self.listen(bind)

    def end(self, fault: str) -> None:
        """Tell who waits."""
        self._exchange.stop(fault)
        super().end(fault)

    @property
    def is_over(self) -> bool:
        """Whether the exchange was stopped."""
        return self._exchange.stopped

    def wait_s(self) -> float:
        """Return how long nothing is to be sent."""
        return 0.0 if self._exchange.dirty else _RETRY_S if self._retry else math.inf

    # Links follow the peers that are wanted.

    def obey(self) -> None:
        """Make links to who is new, and drop those to who is gone."""
        if not self._exchange.changed:
            return
        with self._exchange.condition:
            self._exchange.changed = False
            wanted = dict(self._exchange.peers)
        for name in [name for name, link in self.links.items() if wanted.get(name) is not link.state]:
            self._acknowledge_last(self.links[name])
            self._retry.discard(name)
            self.drop(name, RESET if name in wanted else wire.encode_bye(self._exchange.generation))
        for name, known in wanted.items():
            if name not in self.links:
                self.links[name] = self._new_link(known)
            link = self.links[name]
            if isinstance(link, DialledLink) and not link.sockets and not known.held_back:
                self.dial(link)

    def _new_link(self, known: MailboxPeer) -> PeerLink[MailboxPeer]:
        if not known.dials:
            return self.accept(known.peer, known)
        limits = self._exchange.limits
        connections = _FIRST_BULK + limits.bulk_connections
        return DialledLink(known.peer, known, connections=connections, welcome_s=limits.welcome_s)

    def _acknowledge_last(self, link: PeerLink[MailboxPeer]) -> None:
        """Tell a peer that is dropped what has come, or it would send it again when it is met again."""
        if link.up:
            with contextlib.suppress(zmq.ZMQError), self._exchange.condition:
                self._acknowledge(link)

    def name_of(self, public_key: str) -> str | None:
        """Return the peer that has a key."""
        with self._exchange.condition:
            names = (name for name, known in self._exchange.peers.items() if known.peer.public_key == public_key)
            return next(names, None)

    def accepted_link(self, name: str) -> AcceptedLink[MailboxPeer] | None:
        """Return the link to a peer that dials this side; it may have been admitted since the last look."""
        self.obey()
        return super().accepted_link(name)

    # Beginnings and ends.

    def hellos(self, link: DialledLink[MailboxPeer]) -> list[bytes]:
        """Return what to say on each connection, in a new epoch."""
        with self._exchange.condition:
            link.epoch += 1
            link.state.inbox.restart(anew=False)
            return [
                wire.encode_greeting(
                    HELLO, link.state.greeting(self.own_name, link.epoch, connection, link.connections)
                )
                for connection in range(link.connections)
            ]

    def answers(self, hello: Hello, link: DialledLink[MailboxPeer]) -> bool:
        """Return whether a welcome is of this epoch."""
        if hello.name != link.name:
            raise Refusal("unknown peer", f"{hello.name!r} answered in the place of {link.name!r}")
        return hello.epoch == link.epoch

    def greeted(self, link: PeerLink[MailboxPeer], hello: Hello) -> None:
        """Take in what the other side has and what it grants."""
        assert isinstance(hello, wire.Greeting)
        self._exchange.begin(link.state, hello, fresh_link=isinstance(link, AcceptedLink))

    def welcome(self, link: AcceptedLink[MailboxPeer]) -> bytes:
        """Return the answer to a peer."""
        with self._exchange.condition:
            return wire.encode_greeting(
                wire.WELCOME, link.state.greeting(self.own_name, link.epoch, 0, link.connections)
            )

    def begun(self, link: PeerLink[MailboxPeer]) -> None:
        """Have what waits sent."""
        self._exchange.dirty.add(link.name)

    def farewell(self) -> bytes:
        """Return a goodbye of this generation."""
        return wire.encode_bye(self._exchange.generation)

    def dialling_anew(self, link: DialledLink[MailboxPeer]) -> None:
        """Count it."""
        link.state.count(reconnections=1)

    # What comes in.

    def take_first(
        self, socket: Socket, link: DialledLink[MailboxPeer], kind: bytes, frames: "list[zmq.Frame]"
    ) -> bool:
        """Take who asks who this is, and goodbyes."""
        if kind == WHO:
            if socket in link.asked:
                self.begin_anew(link)
            else:
                link.asked.add(socket)
        elif kind == BYE:
            # Dialled again when the peers are set anew; at once if they were since.
            anew = wire.decode_bye(frames[0].buffer) < self._exchange.generation and not link.state.held_back
            self.hang_up_for(link, 0.0 if anew else _SENT_AWAY_S, "it said goodbye")
        return kind in (WHO, BYE)

    def take(self, link: PeerLink[MailboxPeer], kind: bytes, frames: "list[zmq.Frame]") -> None:
        """Take chunks and acknowledgements."""
        size_bytes = sum(len(frame.buffer) + self._overhead_bytes for frame in frames)
        link.state.count(wire_bytes_received=size_bytes)
        if kind == wire.CHUNK:
            if len(frames) != 2:
                raise Refusal("truncated" if len(frames) < 2 else "malformed", f"a chunk of {len(frames)} frames")
            self._exchange.take_chunk(link.state, wire.decode_chunk(frames[0].buffer), frames[1].buffer)
        elif kind == wire.ACK and len(frames) == 1:
            self._exchange.take_acknowledgement(link.state, wire.decode_acknowledgement(frames[0].buffer))
        else:
            raise Refusal("malformed", f"unknown kind of frame {kind!r} in {len(frames)} parts")

    # What goes out.

    def finish(self, now_s: float) -> None:  # noqa: ARG002
        """Send what may be sent to those of whom there is news."""
        with self._exchange.condition:
            names = self._exchange.dirty | self._retry
            self._exchange.dirty.clear()
            self._retry.clear()
            for name in names:
                link = self.links.get(name)
                if link is not None and link.up:
                    self._flush(link)

    def _flush(self, link: PeerLink[MailboxPeer]) -> None:
        try:
            if self.flush(link):
                return
        except zmq.ZMQError:
            link.up = False  # the route is gone; whoever dialled dials again
            if isinstance(link, DialledLink):
                link.redial_s = 0.0
            return
        if isinstance(link, DialledLink):
            self.wait_for_room(link)
        else:
            self._retry.add(link.name)

    def flush(self, link: PeerLink[MailboxPeer]) -> bool:
        """Send what may be sent: control frames, then small messages, then large; return False if room was short.

        Raises:
            zmq.ZMQError: the connection is gone.
        """
        while link.control:
            if not link.send(_CONTROL, [link.control[0]]):
                return False
            del link.control[0]
        known = link.state
        self._acknowledge(link)
        roomy = not link.control
        for track in (wire.EXPRESS, wire.BULK):
            for _ in range(_BURST):
                outgoing = known.outbox.peek(track, time.monotonic())
                if outgoing is None:
                    break
                if not self._send_chunk(link, outgoing):
                    roomy = False
                    break
                known.outbox.advance(outgoing)
            else:
                self._exchange.dirty.add(link.name)
        return roomy

    def _acknowledge(self, link: PeerLink[MailboxPeer]) -> None:
        """Tell the peer what has come, if that is news.

        Raises:
            zmq.ZMQError: the connection is gone.
        """
        inbox = link.state.inbox
        if not inbox.acknowledgement_due:
            return
        frame = wire.encode_acknowledgement(inbox.take_acknowledgement())
        link.control.append(frame)
        link.state.count(wire_bytes_sent=len(frame) + self._overhead_bytes)
        if len(link.control) == 1 and link.send(_CONTROL, [frame]):
            link.control.clear()

    def _send_chunk(self, link: PeerLink[MailboxPeer], outgoing: OutgoingMessage) -> bool:
        piece = outgoing.payload.piece(outgoing.offset, outgoing.length)
        checksum = 0 if self._exchange.encrypted else zlib.crc32(piece)
        head = wire.encode_chunk(
            wire.Chunk(outgoing.track, outgoing.number, outgoing.offset, checksum, outgoing.header_bytes)
        )
        # Bulk goes by the first of its connections that has room; the others are for links that one does not fill: on a
        # slow one, messages on several would share it and all come late.
        ways = [_EXPRESS] if outgoing.track == wire.EXPRESS else range(_FIRST_BULK, link.connections)
        sent = any(link.send(connection, [head, piece]) for connection in ways)
        if sent:
            link.state.count(wire_bytes_sent=len(head) + len(piece) + 2 * self._overhead_bytes)
        return sent
