"""The mailbox of the runtime: tensors to and from named peers over ZeroMQ, encrypted, bounded; either side dials.

keys = KeyPair.generate()
mailbox = Mailbox(name="edge-0", keypair=keys)
... tell the coordinator mailbox.endpoint and mailbox.public_key, learn the peers ...
mailbox.set_peers(generation, peers)
mailbox.send("cloud-0", key, [activations])
for message in mailbox.receive(timeout_s=1.0): ...
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from spantrain.core.messages import AnyKey
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.connection.threads import Died
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.interface import Counters, Limits, Message, SentInterval
from spantrain.transport.mailbox.loop import MailboxLoop
from spantrain.transport.mailbox.outbox import OutgoingMessage

_CLOSE_S = 5.0


class MailboxLike(ABC):
    """One device's end of all its links, whatever carries them.

    `send` and `receive` may be called from any thread. Nothing is dropped or reordered within a message. Messages of
    one generation only are delivered: older ones are dropped and counted, newer ones wait for `set_peers`.
    """

    endpoint: str
    """Where it listens, e.g. `tcp://127.0.0.1:40123`; empty if it does not."""
    public_key = ""
    """What peers must know to trust this side (Z85); empty without encryption."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.name = exchange, exchange.name

    @property
    def address(self) -> PeerAddress:
        """What peers need to know of this side, as it listens."""
        return PeerAddress(name=self.name, endpoint=self.endpoint, public_key=self.public_key)

    @property
    def generation(self) -> int:
        """The generation of the last `set_peers`; messages of it are delivered."""
        return self._exchange.generation

    @property
    def dialled(self) -> tuple[PeerAddress, ...]:
        """Those peers of the last `set_peers` that this side dials; the others dial it, and need not be reached."""
        with self._exchange.condition:
            return tuple(known.peer for known in self._exchange.peers.values() if known.dials)

    def set_peers(self, generation: int, peers: Iterable[PeerAddress], *, dial: bool = True) -> None:
        """Replace the set of peers; nobody else may connect or send.

        Peers whose name, key and (where this side dials) endpoint are as before keep their connections and what is on
        the way. Who dials a peer that has not admitted it yet is refused there, counted, and tries again: with
        `dial=False` nobody new is dialled before `dial()`, so that all sides can admit each other first.

        An entry for this side itself tells whether others can dial it. If both sides of a link can be dialled, the one
        whose name sorts first dials, or who is behind a relay; a peer without endpoint dials.

        Raises:
            ValueError: an older generation, a peer without a key, or neither side can be dialled.
        """
        self._exchange.set_peers(generation, peers, dial=dial)
        self._carry()

    def dial(self, names: Iterable[str] | None = None) -> None:
        """Dial peers that `set_peers(..., dial=False)` held back, all or some; those that are connected stay so.

        Raises:
            ValueError: a name is not among the peers.
        """
        self._exchange.dial(names)
        self._carry()

    def send(self, peer: str, key: AnyKey, tensors: Sequence[torch.Tensor], *, timeout_s: float | None = None) -> bool:
        """Queue tensors for a peer; they must not be changed afterwards.

        Waits while the peer's queue has no room, at most `timeout_s` (None: as long as it takes; 0: not at all).

        Returns:
            False if there was no room in time. True otherwise, also for a message of an older generation, which is
            dropped and counted.

        Raises:
            ValueError: the message breaks a limit.
            PeerLostError: the peer is not among those of the generation.
            ProtocolError: the mailbox is closed.
        """
        limit_bytes = self._exchange.limits.max_message_bytes
        queued = self._exchange.offer(
            peer, OutgoingMessage.pack(key, tensors, limit_bytes, time.monotonic()), timeout_s
        )
        self._carry()
        return queued

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Return everything that has arrived; wait for the first message at most `timeout_s` (None: for ever).

        Empty if the time is over or `wake` was called. What is returned no longer counts against the senders' credit.

        Raises:
            ProtocolError: the mailbox is closed.
        """
        messages, urgent = self._exchange.collect(timeout_s)
        if urgent:
            self._carry()
        return messages

    def wake(self) -> None:
        """Make a `receive` that waits, or the next one, return early."""
        self._exchange.wake()

    def counters(self) -> Counters:
        """Return totals since the start."""
        return self._exchange.counters()

    def sent_intervals(self) -> list[SentInterval]:
        """Return the messages acknowledged since the last call, for the trace's send lane."""
        return self._exchange.take_intervals()

    @abstractmethod
    def _carry(self) -> None:
        """Have what is queued carried."""

    @abstractmethod
    def close(self) -> None:
        """Stop; what is not sent is lost. May be called twice."""


class Mailbox(MailboxLike):
    """A mailbox over ZeroMQ; one thread of its own carries all.

    A connection that breaks is opened again, and what the peer had not acknowledged is sent again, once.
    """

    def __init__(
        self,
        *,
        name: str,
        bind: str = "tcp://127.0.0.1:0",
        keypair: KeyPair | None = None,
        limits: Limits | None = None,
        encrypted: bool = True,
        died: Died = lambda _: None,
    ) -> None:
        """Listen on `bind` (port 0: any; empty: do not listen, only dial out).

        `died` is told why its thread has ended, if a fault ends it; who sends or receives after that is told, too.

        Raises:
            OSError: the address cannot be listened on.
        """
        super().__init__(Exchange(name=name, limits=limits or Limits(), encrypted=encrypted, dialable=bool(bind)))
        keypair = (keypair or KeyPair.generate()) if encrypted else None
        self._loop = MailboxLoop(self._exchange, bind, keypair, died)
        self.endpoint, self.public_key = self._loop.endpoint, keypair.public_key if keypair else ""
        self._loop.start()

    def set_peers(self, generation: int, peers: Iterable[PeerAddress], *, dial: bool = True) -> None:
        """Replace the set of peers, each of which must have a key if there is encryption."""
        addresses = tuple(peers)
        for peer in addresses:
            if self.public_key and not peer.public_key:
                raise ValueError(f"peer {peer.name}: a public key has 40 characters of Z85, got none")
        super().set_peers(generation, addresses, dial=dial)

    def _carry(self) -> None:
        self._loop.wake()

    def close(self) -> None:
        """Stop; what is not sent within 0.2 s is lost. May be called twice."""
        self._exchange.stop()
        self._loop.wake()
        self._loop.join(_CLOSE_S)
