"""A pipeline's stage that does not lead its cluster: moves its own layers as the master says, and tells how far it is.

Di-PS, 3.1: workers of all pipeline ranks talk to the shards themselves. Kept: that; the cluster's leader alone decides
(`outer.pipeline.leader`). Decided here: a version stays here, whole, until the leader orders it or says that it never
will; what is sent is the copy of the last push that was ordered, which the master is not asked for before all stages
have theirs. A worker answers for its layers to the master itself, so that the next ones need not wait for a step's end.
"""

from collections.abc import Mapping
from contextlib import ExitStack

from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket, TransferWay
from spantrain.core.outer.layers import Layer
from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageReport
from spantrain.errors import ProtocolError
from spantrain.outer.client.action_queue import LayerMover
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.client.sessions import NetworkConnector
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.pipeline.leader import StageLeader
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.layers.interface import LayerKey


class StageWorker(LayerMover):
    """Hears link and wire (`LinkListener`, `WireListener`), and the boundaries of steps."""

    def __init__(self, name: str, layers: tuple[Layer, ...], own: tuple[int, ...], copy: ClusterCopy) -> None:
        """Begin without a connection; `layers`: of the whole model, `own`: those that it moves."""
        super().__init__(name, layers)
        self._own, self._copy = frozenset(own), copy
        self._connected = False
        self._fault = ""
        self._number = 0
        self._taken: TakenPush | None = None
        self._push: Ticket | None = None
        self._unsent: set[int] = set()
        self._sent: Ticket | None = None
        self._pull: Ticket | None = None
        self._missing: set[int] = set()
        self._coming: dict[str, Tensor] = {}
        self._whole: dict[Ticket, Tensors] = {}
        self._last_whole: Ticket | None = None

    # At the boundaries of steps.

    def report(self) -> StageReport:
        """Say how far this stage is.

        Raises:
            ProtocolError: a fault of its own has cut it off.
        """
        with self.changed:
            if self._fault:
                raise ProtocolError(f"{self.name} is cut off from master and shards: {self._fault}")
            return StageReport(connected=self._connected, taken=self._number, sent=self._sent, whole=self._last_whole)

    def follow(self, meeting: StageMeeting) -> None:
        """Do what the leader orders.

        Raises:
            ProtocolError: it orders a version that is not here.
        """
        order = meeting.order
        with self.changed:
            version = self._whole.pop(order.pull, None) if order.pull is not None else {}
            if order.floor is not None:
                self._whole = {pull: one for pull, one in self._whole.items() if pull >= order.floor}
        if version is None:
            raise ProtocolError(f"{self.name}: the leader orders version {order.version}, which did not come here")
        taken = self._copy.follow(order, version)
        with self.changed:
            if taken is not None:
                self._taken, self._number = taken, order.push

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection: what was moving has ended; a worker does not register."""
        with self.changed:
            self._actions.connect()
            self._forget_moves()
            self._actions.dial_anew(welcome.peers)
            self._connected = True
            self._notify()
        return ()

    def disconnected(self, reason: str) -> None:  # noqa: ARG002 - the link says it
        """Train on: nothing moves until there is a connection again."""
        with self.changed:
            self._connected = False
            self._notify()

    def died(self, fault: str) -> None:
        """Have the run end at the next boundary: a stage that moves nothing would hold up all others."""
        with self.changed:
            self._fault = fault
            self._notify()

    def commanded(self, command: OuterCommand) -> None:
        """Move a layer; a worker is told nothing else."""
        if isinstance(command, do.Move) and command.transfer.layer in self._own:
            with self.changed:
                if command.way is TransferWay.PUSH:
                    self._push_layer(command)
                else:
                    self._pull_layer(command.transfer)

    def _push_layer(self, command: do.Move) -> None:
        transfer, taken = command.transfer, self._taken
        if taken is None or (self._push is not None and transfer.ticket < self._push):
            return
        if transfer.ticket != self._push:
            self._forget(self._push)
            self._push, self._unsent = transfer.ticket, set(self._own)
        self._send(transfer, taken, parameters=command.parameters)

    def _pull_layer(self, transfer: LayerTransfer) -> None:
        if self._pull is not None and transfer.ticket < self._pull:
            return
        if transfer.ticket != self._pull:
            self._forget(self._pull)
            self._pull, self._missing, self._coming = transfer.ticket, set(self._own), {}
        self._expect(transfer)

    # From the wire.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:  # noqa: ARG002
        """Take a layer of a version."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer is None or key.ticket != self._pull:
                return
            self._coming.update(tensors)
            self._missing.discard(key.layer)
            if not self._missing:
                self._whole[key.ticket], self._coming = self._coming, {}
                self._last_whole = key.ticket
            self._tell(on.Moved(way=TransferWay.PULL, transfer=transfer))
            self._notify()

    def sent(self, peer: str, key: LayerKey) -> None:  # noqa: ARG002
        """Note that a layer of a push has left."""
        with self.changed:
            if self._moves.pop(key, None) is None or key.ticket != self._push:
                return
            self._unsent.discard(key.layer)
            if not self._unsent:
                self._sent = key.ticket
            self._notify()


def worker_name(cluster: str, stage: int) -> str:
    """Return the name of a stage that does not lead.

    >>> worker_name("a", 2)
    'a/w2'
    """
    return f"{cluster}/w{stage}"


def lead_stages(
    cluster: OuterCluster, layers: tuple[Layer, ...], copy: ClusterCopy, *, own: tuple[int, ...],
    others: Mapping[str, tuple[str, tuple[int, ...]]],
) -> StageLeader:  # fmt: skip
    """Return the leader of a cluster; it joins when all others have.

    Args:
        cluster: where to join, and as whom
        layers: of the whole model
        copy: of this stage's parameters
        own: the layers that it moves
        others: worker's name and layers of the other stages, by device

    Raises:
        UsageError: address, token or name are none.
    """
    connector = NetworkConnector(master=cluster.master, token=cluster.token, encrypted=cluster.encrypted)
    with ExitStack() as undo:
        leader = StageLeader(
            cluster.cluster, layers, copy, own=own, others=others, inner_steps=cluster.inner_steps,
            start=connector.start,
        )  # fmt: skip
        undo.callback(leader.close)
        leader.connect(*connector.connect(leader, cluster.cluster, layers))
        undo.pop_all()
    return leader


def work_as_stage(
    cluster: OuterCluster, layers: tuple[Layer, ...], copy: ClusterCopy, *, name: str, own: tuple[int, ...]
) -> StageWorker:
    """Return a stage that does not lead; it joins at once, for ever."""
    connector = NetworkConnector(master=cluster.master, token=cluster.token, encrypted=cluster.encrypted)
    with ExitStack() as undo:
        worker = StageWorker(name, layers, own, copy)
        undo.callback(worker.close)
        worker.connect(*connector.connect(worker, name))
        undo.pop_all()
    connector.start()
    return worker
