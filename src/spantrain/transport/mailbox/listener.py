"""The listening side: one ROUTER for all peers that dial; who may come, who came, and which route is whose."""

from collections.abc import Callable, Mapping
from typing import Any

import zmq

from spantrain.transport.connection.admission import Admission
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.connection.pending_connections import Visitors
from spantrain.transport.mailbox.exchange import Correspondent, Exchange
from spantrain.transport.mailbox.links import AcceptedLink, Link, set_options
from spantrain.transport.mailbox.receiver import Receiver, user_of
from spantrain.transport.mailbox.wire import (
    ACK,
    BYE,
    HELLO,
    RESET,
    WELCOME,
    WHO,
    Greeting,
    decode_greeting,
    encode_bye,
    encode_greeting,
)

_BURST = 64
_LINGER_MS = 200


class Listener:
    """Owned by the thread of the sockets."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        exchange: Exchange,
        keypair: KeyPair | None,
        link_to: Callable[[str], Link | None],
    ) -> None:
        self._exchange = exchange
        self._encrypted = keypair is not None
        self._link_to = link_to
        """The link to the peer of this name; peers may have been admitted since the last look."""
        self._receiver = Receiver(exchange)
        self._by_route: dict[bytes, AcceptedLink] = {}
        self._parted: set[bytes] = set()
        """Routes of peers that are none any more; what they still say of what they have is no news."""
        self._admission = Admission(context, self._name_of) if self._encrypted else None
        self._router = context.socket(zmq.ROUTER)
        set_options(self._router, keypair)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._encrypted:
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.ZAP_DOMAIN, b"spantrain")
        self._visitors = Visitors(self._router)

    def bind(self, address: str) -> str:
        """Listen; return the endpoint, with the port that was given.

        Raises:
            zmq.ZMQError: the address cannot be had.
        """
        self._router.bind(address)
        return str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Those that something may come to."""
        admission = [self._admission.socket] if self._admission is not None else []
        return [*admission, self._router, self._visitors.socket]

    def _name_of(self, public_key: str) -> str | None:
        with self._exchange.condition:
            names = (name for name, known in self._exchange.peers.items() if known.peer.public_key == public_key)
            return next(names, None)

    def attend(self, ready: Mapping[Any, int]) -> None:
        """Answer who asks to come in, and read which connections began and ended; frames are for `receive`.

        `ready`: the sockets that something has come to.
        """
        if self._admission is not None and self._admission.socket in ready:
            refusals = self._admission.answer()
            for refusal in refusals:
                self._exchange.refuse(refusal, "the network")
            self._visitors.note_turned_away(len(refusals))
        if self._visitors.socket in ready:
            self._visitors.listen()

    # Links follow the peers that are wanted.

    def new_link(self, known: Correspondent) -> AcceptedLink:
        """Return a link that waits for a peer to dial."""
        return AcceptedLink(known, self._router)

    def drop(self, link: AcceptedLink, *, returns: bool) -> None:
        """Forget a link's routes, and have the other side close them; it `returns` if it is to dial again."""
        for route in [route for route, other in self._by_route.items() if other is link]:
            del self._by_route[route]
            if not returns:
                self._parted.add(route)
        if link.routes and link.routes[0] is not None:
            # On the first connection only, behind the acknowledgement: the other side then closes all.
            self._tell(link.routes[0], RESET if returns else encode_bye(self._exchange.generation))

    def _tell(self, route: bytes, control: bytes) -> None:
        try:
            self._router.send_multipart([route, control], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # gone, or full of other things: it will find out by itself

    # What comes in.

    def receive(self) -> None:
        """Take what has come; once that was all, judge the connections that have ended."""
        for _ in range(_BURST):
            try:
                frames: list[zmq.Frame] = self._router.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._judge_visitors()
                return
            route = frames[0].bytes
            link = self._by_route.get(route)
            try:
                self._take(route, link, frames[1:])
            except Refusal as refusal:
                self._exchange.refuse(refusal, link.known.peer.name if link else "the network")

    def _judge_visitors(self) -> None:
        for refusal in self._visitors.judge():
            self._exchange.refuse(refusal, "the network")

    def _take(self, route: bytes, link: AcceptedLink | None, frames: "list[zmq.Frame]") -> None:
        kind = bytes(frames[0].buffer[:1]) if frames else b""
        if frames:
            self._visitors.note_frame(frames[0], leaves=kind == BYE)
        if not kind:
            if link is None:
                self._tell(route, WHO)
        elif kind == HELLO:
            self._take_hello(route, frames[0])
        elif kind == BYE:
            self._parted.discard(route)
            if link is not None and route in link.routes:
                link.up = False
        elif kind == ACK and route in self._parted:
            return
        elif link is None or route not in link.routes:
            self._tell(route, RESET)
            raise Refusal("no greeting", "a frame came before a hello, or after a newer one")
        elif self._encrypted and user_of(frames[0]) != link.known.peer.name:
            raise Refusal("unknown peer", "a route was taken over by another key")
        else:
            self._receiver.take(link, kind, frames)

    def _take_hello(self, route: bytes, frame: "zmq.Frame") -> None:
        greeting = decode_greeting(frame.buffer)
        if self._encrypted and user_of(frame) != greeting.name:
            raise Refusal("unknown peer", f"{user_of(frame)!r} says that it is {greeting.name!r}")
        link = self._link_to(greeting.name)
        if not isinstance(link, AcceptedLink):
            raise Refusal("unknown peer", f"{greeting.name!r} is not among those that dial this side")
        complete = link.hello(route, greeting)
        self._by_route[route] = link
        for old in [old for old, other in self._by_route.items() if other is link and old not in link.routes]:
            del self._by_route[old]
        self._parted.discard(route)
        if complete:
            self._welcome(link, greeting)

    def _welcome(self, link: AcceptedLink, greeting: Greeting) -> None:
        """Take the other side's greeting and answer: the link is up."""
        self._exchange.begin(link.known, greeting, fresh_link=True)
        with self._exchange.condition:
            answer = link.known.greeting(self._exchange.name, link.epoch, 0, link.connections)
        welcome = encode_greeting(WELCOME, answer)
        try:
            # On every connection: what follows on one may overtake a welcome on another.
            link.up = all(link.send(connection, [welcome]) for connection in range(link.connections))
        except zmq.ZMQError:
            link.up = False  # gone again: the other side dials anew

    def close(self) -> None:
        """Stop listening."""
        if self._admission is not None:
            self._admission.close()
        self._visitors.close()
        self._router.close(linger=_LINGER_MS)
