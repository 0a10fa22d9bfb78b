"""What the runtime's threads and the thread of the sockets share: peers, queues, counts; one lock guards it all."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from secrets import randbits

from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.mailbox.inbox import Inbox
from spantrain.transport.mailbox.interface import Counters, Limits, Message, PeerCounters, SentInterval
from spantrain.transport.mailbox.outbox import Outbox, OutgoingMessage
from spantrain.transport.mailbox.wire import Acknowledgement, Chunk, Greeting

_BACKGROUND_PART = 32
"""Of the queue of a peer that messages have which yield to others, besides it: a part of so many."""
_MAX_INTERVALS = 65536


@dataclass(kw_only=True, eq=False)
class MailboxPeer:
    """All that is known of one peer, beside the sockets."""

    peer: PeerAddress
    dials: bool
    """Whether this side dials."""
    held_back: bool
    """Whether it is not to be dialled before `dial`; a connection that is there stays."""
    inbox: Inbox
    outbox: Outbox = field(default_factory=Outbox)
    session: int = field(default_factory=lambda: randbits(62) + 1)
    peer_session: int = 0
    counters: PeerCounters = field(default_factory=PeerCounters)

    def greeting(self, name: str, epoch: int, connection: int, connections: int) -> Greeting:
        """Return what this side says when a link begins."""
        return Greeting(
            name=name,
            session=self.session,
            peer_session=self.peer_session,
            epoch=epoch,
            connection=connection,
            connections=connections,
            done=self.inbox.done,
            first=self.outbox.first_numbers,
            granted_bytes=self.inbox.granted_bytes,
        )

    def count(self, **added: float) -> None:
        """Add to counters by name."""
        self.counters = replace(self.counters, **{name: getattr(self.counters, name) + n for name, n in added.items()})


class Exchange:
    """Queues between the threads that send and receive and the one that owns the sockets.

    Methods take the lock themselves; it may be held already.
    """

    def __init__(self, *, name: str, limits: Limits, encrypted: bool, dialable: bool) -> None:
        self.name = name
        self.limits = limits
        self.encrypted = encrypted
        self.generation = 0
        self.peers: dict[str, MailboxPeer] = {}
        self.dirty: set[str] = set()
        self.changed = False
        self.stopped = False
        self._stopped_by = ""
        self.condition = threading.Condition()
        self._dialable = dialable
        self._gone: dict[str, PeerCounters] = {}
        self._arrived: list[tuple[MailboxPeer, Message, int]] = []
        self._held: list[tuple[MailboxPeer, Message, int]] = []
        self.refused = RefusalCounter(name)
        self._own: PeerAddress | None = None
        """As others know this side."""
        self._intervals: deque[SentInterval] = deque(maxlen=_MAX_INTERVALS)
        self._woken = False

    def set_peers(self, generation: int, peers: Iterable[PeerAddress], *, dial: bool) -> None:
        """Replace the peers; those that are as before keep their queues and connections."""
        wanted = {peer.name: peer for peer in peers}
        own = wanted.pop(self.name, None)
        dialable = self._dialable if own is None else bool(own.endpoint)
        with self.condition:
            self._own = own
            if generation < self.generation:
                raise ValueError(f"generation {generation} is older than {self.generation}, the current one")
            for name in [name for name, known in self.peers.items() if not self._stays(known, wanted, dialable)]:
                self._forget(name)
            for peer in wanted.values():
                if peer.name not in self.peers:
                    self.peers[peer.name] = self._introduce(peer, dialable)
                self.peers[peer.name].peer = peer
                self.peers[peer.name].held_back = not dial
            self.generation = generation
            self._drop_older()
            self.changed = True
            self.condition.notify_all()

    def dial(self, names: Iterable[str] | None) -> None:
        """Let peers be dialled that `set_peers` held back; all if None."""
        with self.condition:
            for name in self.peers if names is None else names:
                if name not in self.peers:
                    raise ValueError(f"{self.name}: {name} is not among the peers of generation {self.generation}")
                self.peers[name].held_back = False
            self.changed = True

    def _stays(self, known: MailboxPeer, wanted: Mapping[str, PeerAddress], dialable: bool) -> bool:
        peer = wanted.get(known.peer.name)
        if peer is None or peer.public_key != known.peer.public_key or self._dials(peer, dialable) != known.dials:
            return False
        return not known.dials or peer.endpoint == known.peer.endpoint

    def _dials(self, peer: PeerAddress, dialable: bool) -> bool:
        if not peer.endpoint or not dialable:
            return bool(peer.endpoint)
        if self._own is not None and self._own.is_relayed_to(peer) != peer.is_relayed_to(self._own):
            return self._own.is_relayed_to(peer)  # then nothing goes through the relay
        return self.name < peer.name

    def _introduce(self, peer: PeerAddress, dialable: bool) -> MailboxPeer:
        if not dialable and not peer.endpoint:
            raise ValueError(f"neither {self.name} nor {peer.name} can be dialled; give one of them an endpoint")
        inbox = Inbox(peer.name, self.limits, checked=not self.encrypted)
        known = MailboxPeer(peer=peer, dials=self._dials(peer, dialable), held_back=True, inbox=inbox)
        known.counters = self._gone.pop(peer.name, known.counters)
        return known

    def _forget(self, name: str) -> None:
        known = self.peers.pop(name)
        self._gone[name] = known.counters
        self.dirty.discard(name)
        for queue in (self._arrived, self._held):
            queue[:] = [entry for entry in queue if entry[0] is not known]

    def _drop_older(self) -> None:
        for name, known in self.peers.items():
            if dropped := known.outbox.drop_older(self.generation):
                self.refused.add("old generation, not sent", count=dropped)
                self.dirty.add(name)
        entries = self._arrived + self._held
        self._arrived, self._held = [], []
        for entry in entries:
            self._place(*entry)

    def _place(self, known: MailboxPeer, message: Message, cost: int) -> None:
        if message.key.generation > self.generation:
            self._held.append((known, message, cost))
        elif message.key.generation < self.generation:
            self.refused.add("old generation")
            known.inbox.consume(cost)
            self.dirty.add(known.peer.name)
        else:
            self._arrived.append((known, message, cost))

    def offer(self, peer: str, outgoing: OutgoingMessage, timeout_s: float | None) -> bool:
        """Queue a message for a peer; return False if there was no room in time."""
        with self.condition:
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            while (known := self._open(peer, outgoing)) is not None and not self._has_room(known, outgoing):
                now_s = time.monotonic()
                if deadline_s is not None and now_s >= deadline_s:
                    return False
                self.condition.wait(None if deadline_s is None else deadline_s - now_s)
                known.count(send_stall_s=time.monotonic() - now_s)
            if known is None:
                self.refused.add("old generation, not sent")
                return True
            known.outbox.offer(outgoing)
            known.count(messages_sent=1, payload_bytes_sent=outgoing.header.size_bytes)
            self.dirty.add(peer)
            return True

    def _open(self, peer: str, outgoing: OutgoingMessage) -> MailboxPeer | None:
        self._check_running()
        if outgoing.header.key.generation < self.generation:
            return None
        if peer not in self.peers:
            raise PeerLostError(f"{self.name}: {peer} is not among the peers of generation {self.generation}")
        return self.peers[peer]

    def _has_room(self, known: MailboxPeer, outgoing: OutgoingMessage) -> bool:
        held = known.outbox.held_bytes(yields=outgoing.yields)
        most_bytes = self.limits.send_queue_bytes // (_BACKGROUND_PART if outgoing.yields else 1)
        return held == 0 or held + outgoing.header.charge_bytes <= most_bytes

    def _check_running(self) -> None:
        if self.stopped:
            raise ProtocolError(f"the mailbox of {self.name} is closed{self._stopped_by}")

    def collect(self, timeout_s: float | None) -> tuple[list[Message], bool]:
        """Return what has arrived and whether the thread of the sockets should be told of the room."""
        with self.condition:
            if not self._arrived:
                self.condition.wait_for(lambda: self._arrived or self._woken or self.stopped, timeout_s)
            self._woken = False
            if not self._arrived:
                self._check_running()
            entries, self._arrived = self._arrived, []
            urgent = {known.peer.name for known, _, cost in entries if known.inbox.consume(cost)}
            self.dirty |= urgent
            return [message for _, message, _ in entries], bool(urgent)

    def wake(self) -> None:
        """Make a waiting `collect` return."""
        with self.condition:
            self._woken = True
            self.condition.notify_all()

    def stop(self, fault: str = "") -> None:
        """Let everything that waits return; whoever calls later hears of the fault, if it was one."""
        with self.condition:
            self.stopped, self._stopped_by = True, fault and f": {fault}"
            self.condition.notify_all()

    def begin(self, known: MailboxPeer, greeting: Greeting, *, fresh_link: bool) -> None:
        """Take what the other side says when a link begins.

        `fresh_link`: this side's inbox still is as on the link before (whoever dials has begun anew already).
        """
        with self.condition:
            anew = known.peer_session != greeting.session
            known.peer_session = greeting.session
            if anew or fresh_link:
                known.inbox.restart(anew=anew)
            known.inbox.skip_to(greeting.first)
            done = greeting.done if greeting.peer_session == known.session else ((0, ()), (0, ()))
            self.settle(known, known.outbox.restart(done, greeting.granted_bytes, time.monotonic()))
            self.dirty.add(known.peer.name)

    def take_chunk(self, known: MailboxPeer, chunk: Chunk, data: memoryview) -> None:
        """Take a chunk from the network.

        Raises:
            Refusal: it breaks a rule.
        """
        with self.condition:
            arrival = known.inbox.accept(chunk, data, time.monotonic())
            if arrival is None:
                return
            message, cost = arrival
            known.count(messages_received=1, payload_bytes_received=message.size_bytes)
            self._place(known, message, cost)
            self.dirty.add(known.peer.name)
            self.condition.notify_all()

    def take_acknowledgement(self, known: MailboxPeer, acknowledgement: Acknowledgement) -> None:
        """Take a peer's word of what it has."""
        with self.condition:
            done, granted_bytes = acknowledgement.done, acknowledgement.granted_bytes
            self.settle(known, known.outbox.acknowledge(done, granted_bytes, time.monotonic()))
            self.dirty.add(known.peer.name)

    def settle(self, known: MailboxPeer, messages: Iterable[OutgoingMessage]) -> None:
        """Note messages that the peer has, and let those that wait for room go on."""
        now_s = time.monotonic()
        for outgoing in messages:
            assert outgoing.started_s is not None
            interval = SentInterval(
                peer=known.peer.name,
                key=outgoing.header.key,
                size_bytes=outgoing.header.size_bytes,
                queued_s=outgoing.header.sent_s,
                started_s=outgoing.started_s,
                acknowledged_s=now_s,
            )
            self._intervals.append(interval)
            self.condition.notify_all()

    def take_intervals(self) -> list[SentInterval]:
        """Return the messages acknowledged since the last call; the newest 65536 if there are more."""
        with self.condition:
            intervals = list(self._intervals)
            self._intervals.clear()
            return intervals

    def counters(self) -> Counters:
        """Return totals, peers that are gone included."""
        with self.condition:
            current = {name: known.counters for name, known in self.peers.items()}
            return Counters(peers=self._gone | current, refused=self.refused.snapshot())
