"""The listening side of a layer wire: one ROUTER for all peers that dial; who may come, whose each connection is.

Both sides hear of each other from a third, so a peer may dial before it is known here: it waits at the door for a
moment, and is no stranger until that is over.
"""

import contextlib
import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from spantrain.transport.connection.admission import Admission
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.layers.format import BYE, HELLO, RESET, WELCOME, decode_hello, encode_hello
from spantrain.transport.layers.interface import LayerLimits
from spantrain.transport.layers.link import HostedLayerLink, layer_socket, receive_frames
from spantrain.transport.mailbox.interface import PeerAddress
from spantrain.transport.mailbox.receiver import user_of

_LINGER_MS = 200
_MOST_WAITING = 64
"""Connections of which a hello may wait; more are refused at once."""


@dataclass(frozen=True, kw_only=True)
class _Knock:
    """A hello under a name that is not known."""

    route: bytes
    frame: "zmq.Frame"
    descriptor: int
    name: str
    until_s: float
    """How long it may wait for the name to be known."""


class LayerHost:
    """Owned by the thread of the sockets."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", name: str, keypair: KeyPair | None, limits: LayerLimits, *,
        peer_of: Callable[[str], PeerAddress | None], name_of: Callable[[str], str | None],
        lost: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        """Make the sockets; `peer_of` a name and `name_of` a public key: of those that may dial this side.

        `lost` is called with the name of a peer whose link has ended, and why.
        """
        self._name, self._limits = name, limits
        self._encrypted = keypair is not None
        self._peer_of, self._lost = peer_of, lost
        self.links: dict[str, HostedLayerLink] = {}
        """By peer; those that are not complete, too."""
        self._by_route: dict[bytes, HostedLayerLink] = {}
        self._spoke: dict[int, bool] = {}
        """By connection that is there: whether something has come by it."""
        self._leaving: set[int] = set()
        self._turned_away = 0
        self._refusals: list[Refusal] = []
        self._knocks: list[_Knock] = []
        self._changes: list[tuple[int, int]] = []
        self._admission = Admission(context, name_of, early_s=limits.early_s) if keypair is not None else None
        self._router = layer_socket(context, zmq.ROUTER, keypair, limits)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keypair is not None:
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.ZAP_DOMAIN, b"spantrain")
        self._monitor: zmq.Socket[bytes] = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._asking = [*([self._admission.socket] if self._admission is not None else []), self._monitor]

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
        return [*self._asking, self._router]

    @property
    def due_s(self) -> float:
        """When to attend, though nothing is ready; infinite where nobody waits to be known."""
        asked_s = self._admission.due_s if self._admission is not None else math.inf
        return min([asked_s, *(knock.until_s for knock in self._knocks)])

    def attend(self, ready: Container[object]) -> None:
        """Answer who asks to come in, and see who came and went, where something is ready."""
        if self.due_s < math.inf or any(socket in ready for socket in self._asking):
            self._look()

    def take_refusals(self) -> list[Refusal]:
        """Return what to count of those who asked, came and went, once: when all was received."""
        told, self._refusals = self._refusals, []
        return told

    def _look(self) -> None:
        if self._admission is not None:
            refusals = self._admission.answer()
            self._turned_away += len(refusals)
            self._refusals += refusals
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._changes.append((int(event["event"]), int(event["value"])))

    def _judge(self) -> None:
        """Act on connections that came and went, once all that came by them was read."""
        changes, self._changes = self._changes, []
        for event, descriptor in changes:
            if event == zmq.EVENT_ACCEPTED:
                self._spoke[descriptor] = False
            else:
                self._ended(descriptor)

    def _ended(self, descriptor: int) -> None:
        spoke, left = self._spoke.pop(descriptor, False), descriptor in self._leaving
        self._leaving.discard(descriptor)
        if any(knock.descriptor == descriptor for knock in self._knocks):
            self._knocks = [knock for knock in self._knocks if knock.descriptor != descriptor]
            self._refusals.append(Refusal("unknown peer", "it left before it was known"))
            return
        for link in [link for link in self.links.values() if descriptor in link.descriptors]:
            self.drop(link, "its connection has ended")
        if spoke and not left:
            told = "a connection ended without a goodbye: it broke, or announced too large a frame"
            self._refusals.append(Refusal("cut off", told))
        elif not spoke and self._turned_away:
            self._turned_away -= 1
        elif not spoke:
            told = "a connection ended before it had spoken ZeroMQ and proved its key"
            self._refusals.append(Refusal("handshake", told))

    def drop(self, link: HostedLayerLink, reason: str, *, reset: bool = False) -> None:
        """Forget a link; `reset` has the other side dial anew."""
        del self.links[link.name]
        for route in [route for route, other in self._by_route.items() if other is link]:
            del self._by_route[route]
            if reset:
                self._tell(route, RESET)
        if link.up:
            link.up = False
            self._lost(link.name, reason)

    def _tell(self, route: bytes, head: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            self._router.send_multipart([route, head], flags=zmq.NOBLOCK)

    def receive(self) -> "tuple[HostedLayerLink, list[zmq.Frame]] | None":
        """Return the next message and whose it is; None if there is none.

        A link that becomes complete is returned with no frames.

        Raises:
            Refusal: it is of nobody that may speak; receive the next.
        """
        while True:
            knock = self._answered_knock() if self._knocks else None
            if knock is not None:
                link = self._greeted(knock.route, knock.frame, knock.descriptor, until_s=knock.until_s)
                if link is not None:
                    return link, []
                continue
            try:
                frames = receive_frames(self._router)
            except zmq.Again:
                self._judge()
                return None
            route, frames = frames[0].bytes, frames[1:]
            kind = bytes(frames[0].buffer[:1]) if frames else b""
            descriptor = _descriptor_of(frames[0]) if kind in {HELLO, BYE} else None
            if descriptor is None:
                return self._link_of(route, frames), frames
            if kind == BYE:
                self._leaving.add(descriptor)
                continue
            until_s = time.monotonic() + self._limits.early_s
            link = self._greeted(route, frames[0], descriptor, until_s=until_s)
            if link is not None:
                return link, []

    def _link_of(self, route: bytes, frames: "list[zmq.Frame]") -> HostedLayerLink:
        link = self._by_route.get(route)
        if link is None or not link.up or not frames:
            self._tell(route, RESET)
            raise Refusal("no greeting", "a frame came before a hello, or of a link that has ended")
        if self._encrypted and user_of(frames[0]) != link.name:
            raise Refusal("unknown peer", "a route was taken over by another key")
        return link

    def _answered_knock(self) -> _Knock | None:
        """Take out a hello that has waited, if its name is known now, or its time is over."""
        now_s = time.monotonic()
        for index, knock in enumerate(self._knocks):
            if now_s >= knock.until_s or self._peer_of(knock.name) is not None:
                return self._knocks.pop(index)
        return None

    def _greeted(self, route: bytes, frame: "zmq.Frame", descriptor: int, *, until_s: float) -> HostedLayerLink | None:
        """Take a hello; return the link if it is complete now. `until_s`: how long it may wait to be known."""
        hello = decode_hello(frame.bytes)
        if self._encrypted and user_of(frame) != hello.name:
            raise Refusal("unknown peer", f"{user_of(frame)!r} says that it is {hello.name!r}")
        peer = self._peer_of(hello.name)
        if peer is None and time.monotonic() < until_s and len(self._knocks) < _MOST_WAITING:
            knock = _Knock(route=route, frame=frame, descriptor=descriptor, name=hello.name, until_s=until_s)
            self._knocks.append(knock)
            return None
        if peer is None:
            self._tell(route, RESET)  # it may only be early: it dials again
            raise Refusal("unknown peer", f"{hello.name!r} is not among those that may dial this side")
        self._look()  # for the end of what had this descriptor before
        self._judge()
        self._spoke[descriptor] = True
        link = self.links.get(hello.name)
        if link is None or link.session != hello.session:
            if link is not None:
                self.drop(link, "it dialled anew")
            link = self.links[hello.name] = HostedLayerLink(peer, self._limits, self._router, hello)
        complete = link.take(hello, route, descriptor)
        self._by_route[route] = link
        if not complete:
            return None
        link.met(hello)
        link.send(0, encode_hello(WELCOME, link.own_hello(self._name)))
        return link

    def close(self) -> None:
        """Stop listening."""
        if self._admission is not None:
            self._admission.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=_LINGER_MS)


def _descriptor_of(frame: "zmq.Frame") -> int | None:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None  # a peer of ZeroMQ's first protocol, which is none of ours
