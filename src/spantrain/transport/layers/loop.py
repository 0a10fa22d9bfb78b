"""The one thread that owns every socket of a layer wire: it keeps links as the peers are wanted, and moves frames."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import parse_monitor_message

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.connection.threads import Died, ReliedOnThread
from spantrain.transport.connection.waker import Waker
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.departures import Departures
from spantrain.transport.layers.format import (
    CANCEL,
    DATA,
    DONE,
    GRANT,
    OPEN,
    REFUSED,
    RESET,
    WELCOME,
    decode_hello,
    decode_number,
    decode_opening,
    decode_pair,
    decode_refused,
)
from spantrain.transport.layers.host import LayerHost
from spantrain.transport.layers.interface import LayerLimits
from spantrain.transport.layers.link import DialledLayerLink, HostedLayerLink, LayerLink, receive_frames
from spantrain.transport.mailbox.interface import PeerAddress

_LOG = logging.getLogger(__name__)
_BURST = 16
_AGAIN_S = 0.2
"""Until a peer that does not know this side yet is dialled again."""
_LOOK_S = 1.0
"""At most between two looks at what is overdue."""

Order = Callable[[], None]


class LayerLoop(ReliedOnThread):
    """Moves frames between the network and what goes and comes, until it is told to stop."""

    def __init__(self, name: str, bind: str, keypair: KeyPair | None, limits: LayerLimits, died: Died) -> None:
        """`died` is told why it ended before that."""
        super().__init__(self._move, name=f"layers of {name}", died=self._end)
        self._tell = died
        self._own_name, self._keypair, self._limits = name, keypair, limits
        self._orders: deque[Order] = deque()
        self._told = False
        self._look_s = 0.0
        self._patience_s = min(_LOOK_S, limits.no_progress_s / 4)
        self.stopped = False
        self.refused: Counter[str] = Counter()
        self._peers: dict[str, PeerAddress] = {}
        self._dialled: dict[str, DialledLayerLink] = {}
        self._by_socket: dict[object, tuple[DialledLayerLink, int]] = {}
        """By socket and by its monitor; the monitor of each with the line -1."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._host: LayerHost | None = None
        self.endpoint = ""
        try:
            if bind:
                self._listen(bind)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, f"cannot listen on {bind}: {error}; is the port in use?") from error

    def _listen(self, bind: str) -> None:
        self._host = LayerHost(
            self._context, self._own_name, self._keypair, self._limits, peer_of=self._guest, name_of=self._name_of,
            lost=self._link_lost,
        )  # fmt: skip
        self.endpoint = self._host.bind(bind)
        for socket in self._host.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def begin(self, arrivals: Arrivals, departures: Departures) -> None:
        """Start the thread."""
        self.arrivals, self.departures = arrivals, departures
        self.start()

    def order(self, order: Order) -> None:
        """Have the thread do something; any thread may call this."""
        self._orders.append(order)
        if not self._told:
            self._told = True
            self._waker.wake()

    def stop(self) -> None:
        """End soon; called by the thread itself."""
        self.stopped = True

    # Peers and links.

    def _guest(self, name: str) -> PeerAddress | None:
        peer = self._peers.get(name)
        return peer if peer is not None and not peer.endpoint else None

    def _name_of(self, public_key: str) -> str | None:
        return next((peer.name for peer in self._peers.values() if peer.public_key == public_key), None)

    def link_to(self, name: str) -> LayerLink | None:
        """Return the link to a peer, if there is one."""
        return self._dialled.get(name) or (self._host.links.get(name) if self._host is not None else None)

    @property
    def links(self) -> dict[str, LayerLink]:
        """All links, by peer."""
        hosted = self._host.links if self._host is not None else {}
        return {**hosted, **self._dialled}

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Dial who is new and listens, drop who is gone or is another now; called by the thread itself."""
        wanted = {peer.name: peer for peer in peers}
        gone = [name for name, peer in self._peers.items() if wanted.get(name) != peer]
        self._peers = wanted
        for name in gone:
            self._drop(name)
        for name, peer in wanted.items():
            if peer.endpoint and name not in self._dialled:
                self._dialled[name] = DialledLayerLink(peer, self._limits)

    def _drop(self, name: str) -> None:
        reason = f"{name} is no peer any more, or listens elsewhere"
        dialled = self._dialled.pop(name, None)
        if dialled is not None:
            self._hang_up(dialled)
        hosted = self._host.links.get(name) if self._host is not None else None
        if hosted is not None and self._host is not None:
            self._host.drop(hosted, reason, reset=True)
        self._link_lost(name, reason)

    def _hang_up(self, link: DialledLayerLink) -> None:
        for socket in (*link.sockets, *link.monitors):
            self._poller.unregister(socket)
            del self._by_socket[socket]
        link.close()

    def _link_lost(self, name: str, reason: str) -> None:
        self.arrivals.link_lost(name, reason)
        self.departures.link_lost(name, reason)

    def _dial_due(self, now_s: float) -> None:
        for link in self._dialled.values():
            if not link.up and now_s >= link.redial_s:
                self._hang_up(link)
                try:
                    link.dial(self._context, self._own_name, self._keypair)
                except zmq.ZMQError as error:
                    link.close()
                    told = f"it cannot be dialled at {link.peer.endpoint}: {error}"
                    self.refuse(Refusal("bad address", told), link.name)
                    continue
                for line, (socket, monitor) in enumerate(zip(link.sockets, link.monitors, strict=True)):
                    self._by_socket[socket], self._by_socket[monitor] = (link, line), (link, -1)
                    self._poller.register(socket, zmq.POLLIN)
                    self._poller.register(monitor, zmq.POLLIN)

    def _broken(self, link: DialledLayerLink, reason: str) -> None:
        """Take note that a link that was up is not any more; it is dialled anew at once."""
        if link.up:
            _LOG.warning("%s dials %s anew: %s", self._own_name, link.name, reason)
            link.up = False
            self._hang_up(link)
            link.redial_s = 0.0
            self._link_lost(link.name, reason)

    # The thread.

    def _move(self) -> None:
        while not self.stopped:
            ready = dict(self._poller.poll(self._timeout_ms()))
            self._go_on(ready)
        self._close()

    def _end(self, fault: str) -> None:
        self.stopped = True
        self._tell(fault)
        self._context.destroy(linger=0)

    def _timeout_ms(self) -> int | None:
        if self._orders:
            return 0
        now_s = time.monotonic()
        waits_s = [link.redial_s - now_s for link in self._dialled.values() if not link.up]
        if self.arrivals.pending or self.departures.pending:
            waits_s.append(self._patience_s)
        if self._host is not None:
            waits_s.append(self._host.due_s - now_s)
        wait_s = min(waits_s, default=math.inf)
        return None if wait_s == math.inf else max(0, int(1000 * wait_s) + 1)

    def _go_on(self, ready: dict[object, int]) -> None:
        if self._waker.fileno() in ready:
            self._waker.drain()
        self._obey()
        if self._host is not None:
            self._host.attend(ready)
            self._receive_hosted(self._host)
            for refusal in self._host.take_refusals():
                self.refuse(refusal, "the network")
        for socket in ready:
            if socket in self._by_socket:
                self._receive_dialled(socket)
        now_s = time.monotonic()
        self._dial_due(now_s)
        if now_s >= self._look_s:
            self._look_s = now_s + self._patience_s
            self.arrivals.overdue(now_s, self.links)
            self.departures.overdue(now_s, self.links)

    def _obey(self) -> None:
        self._told = False
        while self._orders:
            self._orders.popleft()()

    def refuse(self, refusal: Refusal, who: str) -> None:
        """Count something that was refused; log the first, second, fourth, ... of its kind."""
        self.refused[refusal.reason] += 1
        count = self.refused[refusal.reason]
        if count & (count - 1) == 0:
            _LOG.warning("%s refused something of %s (%d times by now): %s", self._own_name, who, count, refusal)

    def _receive_hosted(self, host: LayerHost) -> None:
        for _ in range(_BURST):
            link: HostedLayerLink | None = None
            try:
                found = host.receive()
                if found is None:
                    return
                link, frames = found
                if frames:
                    self._take(link, frames)
                else:
                    self.departures.flush(link, time.monotonic())
            except Refusal as refusal:
                self.refuse(refusal, link.name if link is not None else "the network")

    def _receive_dialled(self, socket: object) -> None:
        link, line = self._by_socket[socket]
        assert isinstance(socket, zmq.Socket)
        if line < 0:
            self._see_broken(link, socket)
            return
        for _ in range(_BURST):
            if socket not in self._by_socket:
                return  # hung up meanwhile
            try:
                frames = receive_frames(socket)
            except zmq.Again:
                return
            try:
                self._take_dialled(link, frames)
            except Refusal as refusal:
                self.refuse(refusal, link.name)

    def _see_broken(self, link: DialledLayerLink, monitor: "zmq.Socket[bytes]") -> None:
        while monitor.poll(0):
            event = parse_monitor_message(monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED and link.up:
                self._broken(link, "the connection has ended")
                return
            if event["event"] != zmq.EVENT_DISCONNECTED:
                told = f"{link.name} did not prove its key, or refused this side's"
                self.refuse(Refusal("handshake", told), link.name)

    def _take_dialled(self, link: DialledLayerLink, frames: "list[zmq.Frame]") -> None:
        kind = bytes(frames[0].buffer[:1])
        if kind == WELCOME:
            hello = decode_hello(frames[0].bytes)
            if hello.session == link.session and hello.name == link.name and not link.up:
                link.met(hello)
                self.departures.flush(link, time.monotonic())
        elif kind == RESET:
            self._broken(link, "the other side began anew")
            link.redial_s = min(link.redial_s, time.monotonic() + _AGAIN_S)
        elif not link.up:
            raise Refusal("no greeting", "a frame came before the welcome")
        else:
            self._take(link, frames)

    def _take(self, link: LayerLink, frames: "list[zmq.Frame]") -> None:
        """Take one message of a link.

        Raises:
            Refusal: it breaks a rule.
        """
        kind, now_s = bytes(frames[0].buffer[:1]), time.monotonic()
        if len(frames) != (2 if kind == DATA else 1):
            raise Refusal("malformed", f"a message of {len(frames)} frames and kind {kind!r}")
        if kind == DATA:
            self.arrivals.data(link, *decode_pair(frames[0].bytes), frames[1].buffer, now_s)
            return
        head = frames[0].bytes
        if kind == OPEN:
            self.arrivals.opened(link, decode_opening(head), now_s)
        elif kind == CANCEL:
            self.arrivals.cancelled(link, decode_number(head))
        elif kind == GRANT:
            self.departures.granted(link, *decode_pair(head), now_s)
        elif kind == DONE:
            self.departures.done(link, decode_number(head), now_s)
        elif kind == REFUSED:
            self.departures.refused(link, *decode_refused(head), now_s)
        else:
            raise Refusal("malformed", f"unknown kind of message {kind!r}")

    def _close(self) -> None:
        for link in self._dialled.values():
            link.close()
        if self._host is not None:
            self._host.close()
        self._waker.close()
        self._context.term()
