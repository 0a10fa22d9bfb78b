"""The listening side of a plane: one ROUTER for all peers that dial; who may come, who came, which route is whose.

libzmq closes what speaks no ZeroMQ, does not prove a key, or announces a frame over the limit, and tells only that a
connection was accepted and that it ended. Both events name its file descriptor, and so does each frame that came by it:
enough to know which connections ended without ever having spoken, and which without a goodbye.

Both sides may hear of each other from a third, so a peer may dial before it is known here: where a plane allows that,
it waits at the door for a moment, and is no stranger until that is over.

Who may connect: the answering side of ZeroMQ's authentication (ZAP, RFC 27).

CURVE alone accepts any client that knows the server's key. This admits the public keys of known peers only, and ties
what comes by a connection to the peer's name through the `User-Id` of each frame.
"""

import contextlib
import math
import time
from collections.abc import Callable, Container
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Generic

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from spantrain.core.records import Record
from spantrain.transport.connection import links
from spantrain.transport.connection.bounds import BYE, HELLO, RESET, WHO, Refusal
from spantrain.transport.connection.peers import Hello, KeyPair

if TYPE_CHECKING:
    from spantrain.transport.connection.loop import ConnectionLoop

_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_QUESTIONS = 64
"""That may wait to be known; more are refused at once."""


class _Question(Record):
    """ZeroMQ asks whether a key may come in."""

    route: bytes
    number: bytes
    public_key: str
    """Empty where nothing was proved."""
    until_s: float
    """How long its answer may wait for the key to be known."""


class Admission:
    """Answers ZeroMQ's questions about connections; owned by the thread of the sockets."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", name_of: Callable[[str], str | None], *, early_s: float = 0.0
    ) -> None:
        """`early_s`: how long who is not known waits before it is refused: it may only be early."""
        self._name_of, self._early_s = name_of, early_s
        self._waiting: list[_Question] = []
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    @property
    def due_s(self) -> float:
        """When to answer, at the latest; infinite where nobody waits."""
        return min((one.until_s for one in self._waiting), default=math.inf)

    def answer(self) -> list[Refusal]:
        """Answer what was asked, but for those who are not known and may be early; return the refusals."""
        self._hear()
        now_s = time.monotonic()
        asked, self._waiting = self._waiting, []
        refusals: list[Refusal] = []
        for question in asked:
            name = self._name_of(question.public_key) if question.public_key else None
            if name is None and now_s < question.until_s and len(self._waiting) < _MAX_QUESTIONS:
                self._waiting.append(question)
                continue
            if name is None:
                refusals.append(Refusal("unknown peer", "its key is not among those of the current generation"))
            # With 400 the other side's ZeroMQ would give up for good; with 300 it may dial again: it may only be early.
            verdict = [b"300", b"unknown peer", b""] if name is None else [b"200", b"OK", name.encode()]
            self.socket.send_multipart([question.route, b"", b"1.0", question.number, *verdict, b""])
        return refusals

    def _hear(self) -> None:
        while True:
            try:
                request: list[bytes] = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            # ZeroMQ itself asks: the form is given
            route, _, version, number, _, _, _, mechanism, *credentials = request
            proved = version == b"1.0" and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
            key = z85.encode(credentials[0]).decode() if proved else ""
            until_s = time.monotonic() + self._early_s
            self._waiting.append(_Question(route=route, number=number, public_key=key, until_s=until_s))

    def close(self) -> None:
        """Stop answering."""
        self.socket.close()


_MAX_WAITING = 64
"""Connections of which a hello may wait; more are refused at once."""


class _Stand(Enum):
    SILENT = auto()
    """Accepted, and no frame has come by it: the handshake is not over."""
    SPEAKING = auto()
    LEAVING = auto()
    """It has said goodbye."""


class _EarlyHello(Record):
    """A hello under a name that is not known."""

    route: bytes
    frame: "zmq.Frame"
    until_s: float
    """How long it may wait for the name to be known."""


class PeerListener(Generic[links.State]):
    """Owned by the thread of the sockets."""

    def __init__(
        self, plane: "ConnectionLoop[links.State]", context: "zmq.Context[links.Socket]", keypair: KeyPair | None
    ) -> None:
        self._plane = plane
        self._encrypted = keypair is not None
        self._by_route: dict[bytes, links.AcceptedLink[links.State]] = {}
        self._parted: set[bytes] = set()
        """Routes of peers that are none any more; what they still say of what they have is no news."""
        self._stands: dict[int, tuple[bytes, _Stand]] = {}
        """By connection that is there: its route, if something has come by it."""
        self._events: list[tuple[int, int]] = []
        self._early: list[_EarlyHello] = []
        self._turned_away = 0
        self._admission = Admission(context, plane.name_of, early_s=plane.early_s)
        """It is asked where there is encryption."""
        self.router = links.data_socket(context, zmq.ROUTER, keypair, plane.socket_limits)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._encrypted:
            self.router.setsockopt(zmq.CURVE_SERVER, 1)
            self.router.setsockopt(zmq.ZAP_DOMAIN, b"spantrain")
        self._monitor: links.Socket = self.router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.sockets: list[links.Socket] = [self._admission.socket, self._monitor, self.router]
        """Those that something may come to."""

    def bind(self, address: str) -> str:
        """Listen; return the endpoint, with the port that was given.

        Raises:
            zmq.ZMQError: the address cannot be had.
        """
        self.router.setsockopt(zmq.IPV6, int("[" in address))
        self.router.bind(address)
        return str(self.router.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def due_s(self) -> float:
        """When to attend, though nothing is ready; infinite where nobody waits to be known."""
        return min([self._admission.due_s, *(one.until_s for one in self._early)])

    def attend(self, ready: Container[object]) -> None:
        """Answer who asks to come in, and read which connections began and ended; frames are for `receive`."""
        if self._admission.due_s < math.inf or self._admission.socket in ready:
            for refusal in self._admission.answer():
                self._turned_away += 1
                self._plane.refused.refuse(refusal, "the network")
        if self._monitor in ready:
            self._listen()

    def _refuse(self, reason: str, told: str) -> None:
        self._plane.refused.refuse(Refusal(reason, told), "the network")

    def drop(self, link: links.AcceptedLink[links.State], bye: bytes) -> None:
        """Forget a link's routes, and have the other side close them: to dial again (RESET), or not (a goodbye)."""
        for route in [route for route, other in self._by_route.items() if other is link]:
            del self._by_route[route]
            if bye != RESET:
                self._parted.add(route)
        # On the first connection only, behind the acknowledgement: the other side then closes all.
        first = next((route for route in link.routes if route is not None), None)
        if first is not None:
            self._tell(first, bye)

    def _tell(self, route: bytes, head: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # gone, or full of other things: it will find out by itself
            self.router.send_multipart([route, head], flags=zmq.NOBLOCK)

    # What comes in.

    def receive(self) -> None:
        """Take what has come; once that was all, judge the connections that have ended."""
        early, self._early = self._early, []
        for one in early:  # its name may be known now, or its time over
            self._refusing(one.route, partial(self._take_hello, one.route, one.frame, one.until_s))
        for _ in range(self._plane.burst):
            try:
                frames = links.receive_frames(self.router)
            except zmq.Again:
                self._judge()
                return
            route = frames[0].bytes
            self._refusing(route, partial(self._take, route, frames[1:]))

    def _refusing(self, route: bytes, take: Callable[[], None]) -> None:
        link = self._by_route.get(route)
        try:
            take()
        except Refusal as refusal:
            self._plane.refused.refuse(refusal, link.name if link else "the network")

    def _take(self, route: bytes, frames: "list[zmq.Frame]") -> None:
        link, kind = self._by_route.get(route), bytes(frames[0].buffer[:1]) if frames else b""
        if frames and (link is None or kind in (HELLO, BYE)):
            self._note(route, frames[0], leaves=kind == BYE)
        if not kind and self._plane.probes:
            if link is None:
                self._tell(route, WHO)
        elif kind == HELLO:
            self._take_hello(route, frames[0], time.monotonic() + self._plane.early_s)
        elif kind == BYE:
            self._parted.discard(route)
            if link is not None and route in link.routes:
                link.up = link.up and not self._plane.ends_at_goodbye
        elif route in self._parted and kind == self._plane.late_kind:
            return
        elif link is None or route not in link.routes or not (link.up or self._plane.takes_late):
            self._tell(route, RESET)
            raise Refusal("no greeting", "a frame came before a hello, or after a newer one")
        elif self._encrypted and user_of(frames[0]) != link.name:
            raise Refusal("unknown peer", "a route was taken over by another key")
        else:
            self._plane.take(link, kind, frames)

    def _take_hello(self, route: bytes, frame: "zmq.Frame", until_s: float) -> None:
        hello = self._plane.decode_hello(frame.bytes)
        if self._encrypted and user_of(frame) != hello.name:
            raise Refusal("unknown peer", f"{user_of(frame)!r} says that it is {hello.name!r}")
        link = self._plane.accepted_link(hello.name)
        if link is None and time.monotonic() < until_s and len(self._early) < _MAX_WAITING:
            self._early.append(_EarlyHello(route=route, frame=frame, until_s=until_s))
            return
        if link is None:
            if self._plane.resets_unknown:
                self._tell(route, RESET)  # it may only be early: it dials again
            raise Refusal("unknown peer", f"{hello.name!r} is not among those that dial this side")
        if link.begins_anew(hello):
            self._down(link, "it dialled anew")
            link.restart(hello)
        complete = link.hello(route, hello, _descriptor_of(frame))
        self._by_route[route] = link
        for old in [old for old, other in self._by_route.items() if other is link and old not in link.routes]:
            del self._by_route[old]
        self._parted.discard(route)
        if complete:
            self._welcome(link, hello)

    def _welcome(self, link: links.AcceptedLink[links.State], hello: Hello) -> None:
        """Take the hello; answer by every connection, as what follows may overtake the answer: the link is up."""
        self._plane.greeted(link, hello)
        welcome = self._plane.welcome(link)
        try:
            link.up = all(link.send(connection, [welcome]) for connection in range(link.connections))
        except zmq.ZMQError:
            return  # gone again: the other side dials anew
        if link.up:
            self._plane.begun(link)

    def _down(self, link: links.AcceptedLink[links.State], reason: str) -> None:
        if link.up:
            link.up = False
            self._plane.lost(link, reason)

    # Who came and went.

    def _note(self, route: bytes, frame: "zmq.Frame", *, leaves: bool) -> None:
        """Take note of a frame: its connection is past the handshake, and may be saying goodbye."""
        descriptor = _descriptor_of(frame)
        if descriptor is None:
            return
        before, stand = self._stands.get(descriptor, (route, _Stand.SILENT))
        if before not in (route, b""):
            self._forget_older(descriptor)
        elif stand is _Stand.LEAVING:
            return
        self._stands[descriptor] = (route, _Stand.LEAVING if leaves else _Stand.SPEAKING)

    def _listen(self) -> None:
        """Read what happened; `_judge` says what it means, once all frames that came before have been noted."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._events.append((int(event["event"]), int(event["value"])))

    def _forget_older(self, descriptor: int) -> None:
        """Judge the end of what had a descriptor before."""
        self._listen()
        for entry in [entry for entry in self._events if entry[1] == descriptor]:
            self._events.remove(entry)
            if entry[0] == zmq.EVENT_DISCONNECTED:
                self._ended(descriptor)
                return

    def _judge(self) -> None:
        events, self._events = self._events, []
        for event, descriptor in events:
            if event == zmq.EVENT_ACCEPTED:
                self._stands.setdefault(descriptor, (b"", _Stand.SILENT))
            else:
                self._ended(descriptor)

    def _ended(self, descriptor: int) -> None:
        route, stand = self._stands.pop(descriptor, (b"", _Stand.SILENT))
        early = [one for one in self._early if one.route == route]
        if early:
            self._early = [one for one in self._early if one not in early]
            self._refuse("unknown peer", "it left before it was known")
            return
        link = self._by_route.get(route)
        if link is not None and descriptor in link.descriptors:
            self._down(link, "its connection has ended")
        if stand is _Stand.SPEAKING:
            limit = self._plane.socket_limits.max_frame_bytes
            self._refuse(
                "cut off", f"a connection ended without a goodbye: it broke, or announced a frame over {limit} bytes"
            )
        elif stand is _Stand.SILENT and self._turned_away:
            self._turned_away -= 1  # its key was refused: that is counted already
        elif stand is _Stand.SILENT:
            self._refuse("handshake", "a connection ended before it had spoken ZeroMQ and proved its key")

    def close(self) -> None:
        """Stop listening."""
        self._admission.close()
        self.router.disable_monitor()
        self._monitor.close(linger=0)
        self.router.close(linger=links.LINGER_MS)


def user_of(frame: "zmq.Frame") -> str:
    """Return the name that admission gave to the key behind a frame."""
    return str(frame.get("User-Id"))


def _descriptor_of(frame: "zmq.Frame") -> int | None:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None  # a peer of ZeroMQ's first protocol, which is none of ours
