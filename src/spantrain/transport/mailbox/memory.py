"""The same mailbox inside one process: no sockets, no thread, the same queues, credit, generations and counts."""

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import permutations

import torch

from spantrain.core.messages import MessageKey
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.mailbox.exchange import Correspondent, Exchange
from spantrain.transport.mailbox.interface import Counters, Limits, Message, SentInterval
from spantrain.transport.mailbox.outbox import Parcel
from spantrain.transport.mailbox.wire import BULK, EXPRESS, Chunk


class MemoryNetwork:
    """Where the mailboxes of one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: dict[str, Exchange] = {}
        self._begun: dict[tuple[str, str], tuple[Correspondent, Correspondent]] = {}

    def mailbox(self, name: str, limits: Limits | None = None) -> "MemoryMailbox":
        """Make a mailbox."""
        return MemoryMailbox(name=name, network=self, limits=limits)

    def attach(self, exchange: Exchange) -> None:
        """Let a mailbox be found; a new one takes the place of an old one of the same name."""
        with self._lock:
            self._exchanges[exchange.name] = exchange

    def detach(self, exchange: Exchange) -> None:
        """Let a mailbox be found no more."""
        with self._lock:
            if self._exchanges.get(exchange.name) is exchange:
                del self._exchanges[exchange.name]

    def pump(self) -> None:
        """Carry everything that may be carried."""
        with self._lock:
            pairs = list(permutations(self._exchanges.values(), 2))
            while any(self._carry(source, target) for source, target in pairs):
                pass

    def _carry(self, source: Exchange, target: Exchange) -> bool:
        out, back = source.peers.get(target.name), target.peers.get(source.name)
        if out is None or back is None:
            return False
        if not self._introduce(source, out, target, back):
            return False
        moved = False
        for track in (EXPRESS, BULK):
            while (parcel := self._peek(source, out, track)) is not None:
                piece = memoryview(parcel.payload.piece(parcel.offset, parcel.length))
                chunk = Chunk(track, parcel.number, parcel.offset, 0, parcel.header)
                with source.condition:
                    out.outbox.advance(parcel)
                    out.count(wire_bytes_sent=len(piece) + len(parcel.header))
                target.take_chunk(back, chunk, piece)
                moved = True
        with target.condition:
            due = back.inbox.acknowledgement_due
            acknowledgement = back.inbox.take_acknowledgement()
        if due:
            source.take_acknowledgement(out, acknowledgement)
        return moved or due

    def _peek(self, source: Exchange, out: Correspondent, track: int) -> Parcel | None:
        with source.condition:
            return out.outbox.peek(track, time.monotonic())

    def _introduce(self, a: Exchange, a_side: Correspondent, b: Exchange, b_side: Correspondent) -> bool:
        """Connect two sides, if they are not; return whether they are now."""
        if a.name > b.name:
            a, a_side, b, b_side = b, b_side, a, a_side
        if self._begun.get((a.name, b.name)) == (a_side, b_side):
            return True
        if (a_side if a_side.dials else b_side).held_back:
            return False
        self._begun[a.name, b.name] = (a_side, b_side)
        with a.condition:
            a_side.inbox.restart(anew=False)
            hello = a_side.greeting(a.name, 1, 0, 1)
        b.begin(b_side, hello, fresh_link=True)
        with b.condition:
            welcome = b_side.greeting(b.name, 1, 0, 1)
        a.begin(a_side, welcome, fresh_link=False)
        return True


class MemoryMailbox:
    """One device's end, like `Mailbox`; what it sends is carried by whoever calls next."""

    def __init__(self, *, name: str, network: MemoryNetwork, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._exchange = Exchange(name=name, limits=self._limits, encrypted=True, dialable=True)
        self._network = network
        network.attach(self._exchange)

    @property
    def name(self) -> str:
        """Name of this side."""
        return self._exchange.name

    @property
    def endpoint(self) -> str:
        """Made up, so that it looks like an address."""
        return f"memory://{self.name}"

    @property
    def public_key(self) -> str:
        """Empty: nobody listens in."""
        return ""

    @property
    def address(self) -> PeerAddress:
        """What peers need to know of this side."""
        return PeerAddress(name=self.name, endpoint=self.endpoint, public_key=self.public_key)

    @property
    def generation(self) -> int:
        """The generation of the last `set_peers`."""
        return self._exchange.generation

    def set_peers(self, generation: int, peers: Iterable[PeerAddress], *, dial: bool = True) -> None:
        """Replace the set of peers; see `Mailbox.set_peers`."""
        self._exchange.set_peers(generation, peers, dial=dial)
        self._network.pump()

    def dial(self, names: Iterable[str] | None = None) -> None:
        """Dial peers that `set_peers(..., dial=False)` held back, all or some; those that are connected stay so.

        Raises:
            ValueError: a name is not among the peers.
        """
        self._exchange.dial(names)
        self._network.pump()

    def send(
        self, peer: str, key: MessageKey, tensors: Sequence[torch.Tensor], *, timeout_s: float | None = None
    ) -> bool:
        """Queue tensors for a peer; see `Mailbox.send`."""
        parcel = Parcel.pack(key, tensors, self._limits.max_message_bytes, time.monotonic())
        queued = self._exchange.offer(peer, parcel, timeout_s)
        self._network.pump()
        return queued

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Return everything that has arrived; see `Mailbox.receive`."""
        messages, _ = self._exchange.collect(timeout_s)
        self._network.pump()
        return messages

    def wake(self) -> None:
        """Make a `receive` that waits, or the next one, return early."""
        self._exchange.wake()

    def counters(self) -> Counters:
        """Return totals since the start."""
        return self._exchange.counters()

    def sent_intervals(self) -> list[SentInterval]:
        """Return the messages acknowledged since the last call."""
        return self._exchange.take_intervals()

    def close(self) -> None:
        """Stop; what is not received is lost."""
        self._network.detach(self._exchange)
        self._exchange.stop()
