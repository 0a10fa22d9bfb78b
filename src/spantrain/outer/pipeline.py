"""A pipeline of several devices as one cluster: its leader decides, its stages move their own layers.

Di-PS, 3.1: workers of all pipeline ranks talk to the shards themselves. Kept: that; one stage alone speaks for the
cluster, by the decisions of `outer.policy.client` and `outer.policy.pushes`: it does what `outer.client.session` does,
for several stages at once. Decided here: the leader hears how far the others are at the boundaries of steps, and learns
there that they have sent or got a layer; so a push is over, and a version whole, a step or two later than the last
byte. A version stays with its stage, whole, until the leader orders it or says that it never will; what is sent is the
copy of the last push that was ordered, which the master is not asked for before all stages have theirs. A worker
answers for its layers to the master itself, so that the next ones need not wait for a step's end.

Not here: what a stage trains (`runtime`).
To add an order to stages: `core.outer.stages`, carried out in `outer.client.replica`.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand, UseVersion
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket, TransferWay
from spantrain.core.outer.layers import Layer
from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageOrder, StageReport
from spantrain.errors import ProtocolError
from spantrain.outer.client.action_queue import LayerMover
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.client.rounds import VersionWatch
from spantrain.outer.client.session import ClientSession, SessionUpdate
from spantrain.outer.client.sessions import NetworkConnector
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.policy.client import Said
from spantrain.outer.policy.pushes import StageRounds
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.layers.interface import LayerKey

_PULL_PAUSE_S = 0.25
"""Between a pull that was broken off and the next: a stage that lost its connection takes a while to be back."""


class StageLeader(ClientSession):
    """A cluster's session whose layers are moved by several processes, and its part at the boundaries of steps."""

    def __init__(
        self, cluster: str, layers: tuple[Layer, ...], copy: ClusterCopy, *, own: tuple[int, ...],
        others: Mapping[str, tuple[str, tuple[int, ...]]], inner_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin a round, without a connection: it joins when all workers are connected, and gives them work at once.

        Args:
            cluster: its name, and that of this process
            layers: of the whole model
            copy: of this stage's parameters
            own: the layers that it moves
            others: worker's name and layers of the other stages, by device
            inner_steps: between two pushes
            clock: in seconds
        """
        super().__init__(cluster, layers, workers={cluster: own, **dict(others.values())}, clock=clock)
        self._copy, self._others = copy, dict(others)
        self._rounds = StageRounds(others, inner_steps=inner_steps)
        self._watch = VersionWatch(self, inner_steps=inner_steps)
        self._started = False
        self._ordered = SessionUpdate()
        self._copied: TakenPush | None = None
        self._took_s = 0.0
        self._pull_due_s: float | None = None
        self._pull: Ticket | None = None
        """The last pull that began."""
        self._update_pull: Ticket | None = None
        """The pull that brought the version of the last update."""

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the event to register with."""
        with self.changed:
            self._pull_due_s = None
            if welcome.settings.fragments > 1:
                self._warn(
                    "the master has the model in fragments, with which a pipeline takes no part; it trains alone"
                )
                return ()
            if welcome.settings.ahead is not None:
                self._warn("the master would have clusters stand still behind a push (`ahead`); a pipeline trains on")
        return super().joined(welcome)

    def _note(self, command: OuterCommand) -> None:
        super()._note(command)
        if isinstance(command, do.StartPull):
            self._pull = command.pull

    def _use(self, command: UseVersion) -> None:
        super()._use(command)
        self._update_pull = self._pull

    def _tell(self, event: OuterEvent) -> None:
        if isinstance(event, on.PullAsked):
            self._pull_due_s = self._clock() + _PULL_PAUSE_S
        else:
            super()._tell(event)

    # At the boundaries of steps.

    def step(self, tokens: int) -> None:
        """Count a step that all stages have done, or are about to end."""
        self._rounds.pushes.step(tokens)
        self.stepped()
        self._watch.step()
        self.meter.inner_steps += 1
        self.meter.tokens += tokens

    def report(self, *, everything: bool = False, over: bool = False) -> StageReport:
        """Say what all do now; `everything`: push whatever there is; `over`: and then end waiting.

        Raises:
            ProtocolError: a fault of this side has cut it off.
        """
        with self.changed:
            if self.cut_off:
                raise ProtocolError(f"the cluster is cut off from master and shards: {self.cut_off}")
            update = self._ordered = self.take_update()
            if update.version is not None:
                self.meter.version = update.version
                self._watch.came(update.version)
            if update.round_ended and not self._rounds.end_round():
                self.keep_round()
            known = StageOrder(
                skipped=update.skipped,
                pull=None if update.version is None else self._update_pull,
                version=update.version or 0,
                counted=update.counted,
                left_out=update.left_out,
                over=over,
                floor=self._pull,
            )
            order = self._rounds.order(
                known, can_push=self.can_push, wants_first=self.wants_first, everything=everything
            )
            return StageReport(connected=self.registered, order=order)

    def follow(self, meeting: StageMeeting) -> None:
        """Do what was ordered; hear how far the others are."""
        begun_s = time.monotonic()
        taken = self._copy.follow(meeting.order, self._ordered.tensors)
        if taken is not None:
            self._copied, self._took_s = taken, time.monotonic() - begun_s
        self._ordered = SessionUpdate()
        others = {device: meeting.reports[device] for device in self._others}
        if not self._started and all(report.connected for report in others.values()):
            self._started = True
            self.start()
        for device, report in others.items():
            self._hear_of(*self._others[device], report)
        tokens = self._rounds.to_ask(others)
        if tokens is not None and self._copied is not None:
            self.ask(self._copied, tokens=tokens, took_s=self._took_s, ends_round=self._rounds.pushes.ends_round)
            self._copied = None
        with self.changed:
            if self._pull_due_s is not None and self._clock() >= self._pull_due_s:
                self._pull_due_s = None
                super()._tell(on.PullAsked(cluster=self.name))

    def _hear_of(self, worker: str, layers: tuple[int, ...], report: StageReport) -> None:
        """Take in how far another stage is."""
        with self.changed:
            said: list[Said] = []
            for layer in layers:
                if report.sent is not None:
                    said += self._client.sent(self._transfer(worker, report.sent, layer))
                if report.whole is not None:
                    said += self._client.arrived(self._transfer(worker, report.whole, layer))
            if said:
                # Of what arrived the worker itself has told the master.
                self._carry_out([one for one in said if not isinstance(one, on.Moved)])
                self._notify()

    def _transfer(self, worker: str, ticket: Ticket, layer: int) -> LayerTransfer:
        return LayerTransfer(ticket=ticket, cluster=self.name, worker=worker, layer=layer, shard="", size_bytes=0)

    @property
    def has_given_all(self) -> bool:
        """Whether nothing is under way, and nothing left to give."""
        return self.is_idle and not self._rounds.some_left


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
        self._newest: dict[TransferWay, Ticket] = {}
        self._left: dict[TransferWay, set[int]] = {}
        """Layers of the newest push, and of the newest pull, that have not moved."""
        self._moved: dict[TransferWay, Ticket] = {}
        """The last push, and the last pull, of which all layers have."""
        self._coming: dict[str, Tensor] = {}
        self._whole: dict[Ticket, Tensors] = {}

    # At the boundaries of steps.

    def report(self) -> StageReport:
        """Say how far this stage is.

        Raises:
            ProtocolError: a fault of its own has cut it off.
        """
        with self.changed:
            if self._fault:
                raise ProtocolError(f"{self.name} is cut off from master and shards: {self._fault}")
            sent, whole = self._moved.get(TransferWay.PUSH), self._moved.get(TransferWay.PULL)
            return StageReport(connected=self._connected, taken=self._number, sent=sent, whole=whole)

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
            self._dial_anew(welcome.peers)
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
        if not isinstance(command, do.Move) or command.transfer.layer not in self._own:
            return
        way, transfer = command.way, command.transfer
        with self.changed:
            if way is TransferWay.PULL and self._is_newest(way, transfer.ticket):
                self._expect(transfer)
            elif way is TransferWay.PUSH and self._taken is not None and self._is_newest(way, transfer.ticket):
                self._send(transfer, self._taken, parameters=command.parameters)

    def _is_newest(self, way: TransferWay, ticket: Ticket) -> bool:
        """Whether no later push or pull has begun; what is of earlier ones is forgotten."""
        before = self._newest.get(way)
        if before is None or before < ticket:
            self._forget(before)
            self._newest[way], self._left[way] = ticket, set(self._own)
            self._coming = {} if way is TransferWay.PULL else self._coming
        return before is None or before <= ticket

    # From the wire.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:  # noqa: ARG002
        """Take a layer of a version."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer is None or key.ticket != self._newest[key.way]:
                return
            self._coming.update(tensors)
            if self._was_last(key):
                self._whole[key.ticket], self._coming = self._coming, {}
            self._tell(on.Moved(way=TransferWay.PULL, transfer=transfer))
            self._notify()

    def sent(self, peer: str, key: LayerKey) -> None:  # noqa: ARG002
        """Note that a layer of a push has left."""
        with self.changed:
            if self._moves.pop(key, None) is not None and key.ticket == self._newest[key.way]:
                self._was_last(key)
                self._notify()

    def _was_last(self, key: LayerKey) -> bool:
        """Note that a layer has moved; return whether it was the last one."""
        self._left[key.way].discard(key.layer)
        if not self._left[key.way]:
            self._moved[key.way] = key.ticket
        return not self._left[key.way]


def worker_name(cluster: str, stage: int) -> str:
    """Return the name of a stage that does not lead.

    >>> worker_name("a", 2)
    'a/w2'
    """
    return f"{cluster}/w{stage}"


_End = TypeVar("_End", StageLeader, StageWorker)


def _connected(end: _End, cluster: OuterCluster, layers: tuple[Layer, ...] = ()) -> _End:
    """Return a stage's end with its ways to master and shards; it is closed where it cannot have them."""
    connector = NetworkConnector(master=cluster.master, token=cluster.token, encrypted=cluster.encrypted)
    try:
        end.connect(*connector.connect(end, end.name, layers))
    except BaseException:
        end.close()
        raise
    return end


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
    leader = StageLeader(cluster.cluster, layers, copy, own=own, others=others, inner_steps=cluster.inner_steps)
    return _connected(leader, cluster, layers)


def work_as_stage(
    cluster: OuterCluster, layers: tuple[Layer, ...], copy: ClusterCopy, *, name: str, own: tuple[int, ...]
) -> StageWorker:
    """Return a stage that does not lead; it joins at once, for ever."""
    worker = _connected(StageWorker(name, layers, own, copy), cluster)
    worker.start()
    return worker
