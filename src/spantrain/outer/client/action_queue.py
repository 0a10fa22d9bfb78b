"""What a cluster's process decided is done by one thread: it tells the master, expects and sends layers, in order.

It has the ways to the master and to the shards, for a plain loop's session and for a pipeline's stage. Those decide
under their lock, which the link's and the wire's threads, and the training loop, wait for. Nothing is called under it
that might wait for a lock of theirs, or that makes something large.
"""

import logging
import queue
import threading
from collections.abc import Callable

from spantrain.core.outer import events as on
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket, TransferWay
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout
from spantrain.errors import ProtocolError, SpanTrainError
from spantrain.outer.client.replica import TakenPush
from spantrain.outer.link.link import MasterLink
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.layers.transport import LayerTransport

_LOG = logging.getLogger(__name__)


class ActionQueue:
    """Does pieces of work one after the other; those of a connection that has ended are left out."""

    def __init__(self, name: str) -> None:
        self.link: MasterLink
        self.wire: LayerTransport
        self._ways: tuple[LayerTransport | MasterLink, ...] = ()
        """Both, once it is said by what to talk."""
        self._pieces: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._connection = 0
        self._thread = threading.Thread(target=self._run, name=f"outer-{name}", daemon=True)
        self._thread.start()

    def use(self, link: MasterLink, wire: LayerTransport) -> None:
        """Talk by these from now on."""
        self.link, self.wire, self._ways = link, wire, (wire, link)

    def connect(self) -> None:
        """Begin a new connection: what was not done over the one before it is left undone."""
        self._connection += 1

    def do(self, piece: Callable[[], None]) -> None:
        """Do a piece of work when it is its turn; returns at once."""
        self._pieces.put((self._connection, piece))

    def close(self) -> None:
        """Do what is left, and end, with link and wire.

        The wire says goodbye to the shards first: as soon as the master has heard a goodbye it has them hang up.
        """
        self._pieces.put(None)
        self._thread.join()
        for way in self._ways:
            way.close()

    # The thread.

    def _run(self) -> None:
        while (entry := self._pieces.get()) is not None:
            connection, piece = entry
            if connection != self._connection:
                continue
            try:
                piece()
            except SpanTrainError as error:
                _LOG.warning("outer optimizer: %s; training goes on", error)
            except Exception:  # noqa: BLE001 - the outermost loop of this thread: training goes on, whatever it was
                _LOG.exception("outer optimizer: a fault of its own; training goes on")


class LayerMover:
    """A process of a cluster that moves layers as the master says; it hears its link and its wire, under one lock.

    What all kinds of them share: the session of a cluster's leader, its sessions of all fragments together, and a
    further stage of a pipeline.
    """

    def __init__(self, name: str, layers: tuple[Layer, ...], *, beside: "LayerMover | None" = None) -> None:
        """Begin without a connection; `layers`: of the whole model; `beside`: with whom lock and queue are shared."""
        self.name, self._layers = name, layers
        self.changed: threading.Condition = beside.changed if beside else threading.Condition()
        """Held for all below; notified whenever something was heard."""
        self._actions: ActionQueue = beside._actions if beside else ActionQueue(name)
        self._first: LayerMover = beside._first if beside else self
        self._heard = 0
        """How often that was, of the first of those that share a lock."""
        self._moves: dict[LayerKey, LayerTransfer] = {}

    def connect(self, link: MasterLink, wire: LayerTransport) -> None:
        """Talk by these from now on."""
        self._actions.use(link, wire)

    def start(self) -> None:
        """Join: from now on something is heard."""
        self._actions.link.start()

    def close(self) -> None:
        """End; link and wire are closed here."""
        self._actions.close()

    @property
    def refused(self) -> str:
        """Why the master has never let it in, and will not; empty as long as it may."""
        return str(self._actions.link.refused or "")

    @property
    def heard(self) -> int:
        """How often something was heard."""
        return self._first._heard

    def wait(self, heard: int, limit_s: float) -> None:
        """Wait until something was heard since `heard` was read, or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.heard != heard, timeout=limit_s)

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return nothing: a cluster's leader says that it lives."""
        return ()

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:  # noqa: ARG002
        """Return nothing: the layers are known here."""
        return ()

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Pass on where shards listen."""
        self._dial(peers)

    def _dial(self, peers: tuple[PeerAddress, ...]) -> None:
        self._actions.do(lambda: self._actions.wire.set_peers(peers))

    def _dial_anew(self, peers: tuple[PeerAddress, ...]) -> None:
        """Talk to these shards, by new connections alone.

        Those of before may be of a network that was cut: TCP waits long before it tries such again.
        """
        self._dial(())
        self._dial(peers)

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:  # noqa: ARG002
        """Tell the master that a layer did not come, or could not be sent: it ends the push or pull."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer is not None:
                self._tell(on.TransferLost(way=key.way, transfer=transfer, reason=reason))

    def _expect(self, transfer: LayerTransfer) -> None:
        """Take in a layer of a version."""
        self._move(TransferWay.PULL, transfer, lambda key, specs: self._actions.wire.expect(transfer.shard, key, specs))

    def _send(self, transfer: LayerTransfer, taken: TakenPush, *, parameters: bool) -> None:
        """Send a layer of a push, which is made when it is its turn."""

        def send(key: LayerKey, specs: tuple[ParameterSpec, ...]) -> None:
            tensors = taken.tensors(specs, transfer.wire_format, parameters=parameters)
            self._actions.wire.send(transfer.shard, key, tensors)

        self._move(TransferWay.PUSH, transfer, send)

    def _move(
        self, way: TransferWay, transfer: LayerTransfer, begin: Callable[[LayerKey, tuple[ParameterSpec, ...]], None]
    ) -> None:
        """Have a layer begin to move; one that cannot is lost."""
        if transfer.layer >= len(self._layers):
            raise ProtocolError(f"the master moves layer {transfer.layer}; {self.name} has no such layer")
        key = LayerKey(ticket=transfer.ticket, way=way, layer=transfer.layer)
        self._moves[key] = transfer

        def move() -> None:
            try:
                begin(key, self._layers[transfer.layer].parameters)
            except (SpanTrainError, ValueError) as error:
                self.lost(transfer.shard, key, str(error))

        self._actions.do(move)

    def _forget(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._moves = {key: one for key, one in self._moves.items() if key.ticket != ticket}
            self._actions.do(lambda: self._actions.wire.forget(ticket))

    def _forget_moves(self) -> None:
        for ticket in {key.ticket for key in self._moves}:
            self._forget(ticket)

    def _tell(self, event: OuterEvent) -> None:
        self._actions.do(lambda: self._actions.link.tell(event))

    def _notify(self) -> None:
        self._first._heard += 1
        self.changed.notify_all()
