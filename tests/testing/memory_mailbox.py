"""The same mailbox inside one process: no sockets, no thread, the same queues, credit, generations and counts."""

import threading
import time
from itertools import permutations

from spantrain.transport.mailbox.exchange import Exchange, MailboxPeer
from spantrain.transport.mailbox.interface import Limits, Message
from spantrain.transport.mailbox.mailbox import MailboxLike
from spantrain.transport.mailbox.outbox import OutgoingMessage
from spantrain.transport.mailbox.wire import BULK, EXPRESS, Chunk


class MemoryNetwork:
    """Where the mailboxes of one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: dict[str, Exchange] = {}
        self._begun: dict[tuple[str, str], tuple[MailboxPeer, MailboxPeer]] = {}

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
            moved = True
            while moved:
                moved = False
                for source, target in pairs:
                    moved |= self._carry(source, target)

    def _carry(self, source: Exchange, target: Exchange) -> bool:
        out, back = source.peers.get(target.name), target.peers.get(source.name)
        if out is None or back is None:
            return False
        if not self._introduce(source, out, target, back):
            return False
        if target.name not in source.dirty:
            return False
        with source.condition:
            source.dirty.discard(target.name)
        moved = False
        for track in (EXPRESS, BULK):
            while (outgoing := self._peek(source, out, track)) is not None:
                piece = memoryview(outgoing.payload.piece(outgoing.offset, outgoing.length))
                chunk = Chunk(track, outgoing.number, outgoing.offset, 0, outgoing.header_bytes)
                with source.condition:
                    out.outbox.advance(outgoing)
                    out.count(wire_bytes_sent=len(piece) + len(outgoing.header_bytes))
                target.take_chunk(back, chunk, piece)
                moved = True
        with source.condition:
            due = out.inbox.acknowledgement_due
            acknowledgement = out.inbox.take_acknowledgement()
        if due:
            target.take_acknowledgement(back, acknowledgement)
        return moved or due

    def _peek(self, source: Exchange, out: MailboxPeer, track: int) -> OutgoingMessage | None:
        with source.condition:
            return out.outbox.peek(track, time.monotonic())

    def _introduce(self, a: Exchange, a_side: MailboxPeer, b: Exchange, b_side: MailboxPeer) -> bool:
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


class MemoryMailbox(MailboxLike):
    """One device's end, like `Mailbox`; what it sends is carried by whoever calls next."""

    def __init__(self, *, name: str, network: MemoryNetwork, limits: Limits | None = None) -> None:
        super().__init__(Exchange(name=name, limits=limits or Limits(), encrypted=True, dialable=True))
        self._network, self.endpoint = network, f"memory://{name}"
        network.attach(self._exchange)

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Return everything that has arrived; carry what then has credit."""
        messages = super().receive(timeout_s)
        self._carry()
        return messages

    def _carry(self) -> None:
        self._network.pump()

    def close(self) -> None:
        """Stop; what is not received is lost."""
        self._network.detach(self._exchange)
        self._exchange.stop()
