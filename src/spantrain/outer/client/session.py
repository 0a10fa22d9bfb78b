"""A cluster's end of the outer optimizer while its loop trains: hears the master and the wire, and gets things done.

Di-PS, 3.2 and 4.2, by the decisions of `outer.policy.client`. Here they meet real threads: commands come from the
link's, layers from the wire's, and the loop comes by between two steps to take a version that is there whole, and to
ask for a push. Nobody waits here for the network but the loop, where it asks to.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand, SendLayer, SkipPush, UseVersion
from spantrain.core.outer.events import ChunkProgress, LayerTransfer, OuterEvent, Ticket, TransferWay
from spantrain.core.outer.layers import Layer, ShardLayout
from spantrain.errors import ProtocolError
from spantrain.outer.client.action_queue import ActionQueue, WireLike
from spantrain.outer.client.leases import LeasedChunks
from spantrain.outer.client.metrics import ClientMeter
from spantrain.outer.client.replica import TakenPush
from spantrain.outer.link.link import LinkLike, MasterWelcome
from spantrain.outer.policy.client import ClientPhase, OuterClient, Said
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.mailbox.interface import PeerAddress

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


@dataclass(frozen=True, kw_only=True)
class SessionUpdate:
    """What has come since the loop came by last; first a push that came to nothing, then a version."""

    skipped: bool = False
    version: int | None = None
    """None: no version has come."""
    tensors: Tensors | None = None
    counted: bool = False
    """Whether the version counts the last push."""
    left_out: bool = False
    """Whether that was left out of its update."""
    round_ended: bool = False
    """Whether another cluster has ended the round of all."""


class ClientSession:
    """Hears link and wire (`LinkListener`, `WireListener`), and the training loop."""

    def __init__(
        self, cluster: str, layers: tuple[Layer, ...], *, workers: Mapping[str, tuple[int, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic, changed: threading.Condition | None = None,
        chunks: LeasedChunks | None = None, meter: ClientMeter | None = None,
    ) -> None:  # fmt: skip
        """Begin without a connection; `workers`: who sends and gets which layers, by default the leader all.

        Where several sessions of a cluster have a fragment of the layers each, they share the rest.
        """
        self.name = self._cluster = cluster
        self._layers, self._clock = layers, clock
        self._client = OuterClient(cluster, workers or {cluster: tuple(range(len(layers)))})
        self._actions = ActionQueue(cluster)
        self.changed = changed or threading.Condition()
        """Held for all below; notified whenever something was heard."""
        self.heard = 0
        """How often that was."""
        self.chunks = chunks or LeasedChunks()
        self.meter = meter or ClientMeter(clock)
        self.data: MasterWelcome | None = None
        """The last welcome."""
        self.registered = False
        self.cut_off = ""
        """By which fault of this side, for good; empty as long as there is none."""
        self.brings_first = False
        """Whether the push under way brings the first parameters."""
        self._wants_first = False
        self._taken: TakenPush | None = None
        self._told: tuple[ChunkProgress, ...] = ()
        self._base_version = 0
        self._coming: dict[int, Tensors] = {}
        self._moves: dict[LayerKey, LayerTransfer] = {}
        self._news = SessionUpdate()
        self._pause_s, self._again_s = _PAUSE_S, 0.0
        self._gone_s, self._gone = clock(), "there was none yet"
        """When the last connection ended, and why."""
        self._warned: set[str] = set()

    def connect(self, link: LinkLike, wire: WireLike) -> None:
        """Talk by these from now on."""
        self._actions.use(link, wire)

    def close(self) -> None:
        """Say goodbye, and end; link and wire are closed here."""
        with self.changed:
            if self.registered:
                self._tell(on.ClusterLeft(cluster=self._cluster))
        self._actions.close()

    # From the loop.

    def stepped(self) -> None:
        """Note an inner step."""
        with self.changed:
            self._carry_out(self._client.step())

    def waits_for(self) -> str:
        """Return what a new version needs that has not come, as far as is known here."""
        with self.changed:
            if not (self.registered and self.data and self.data.layout):
                return f"a connection to the master ({self._gone})"
            return self._client.waits_for(self.data.layout.shard_of)

    def take_news(self) -> SessionUpdate:
        """Return what has come since the last call."""
        with self.changed:
            news, self._news = self._news, SessionUpdate()
            if news.version is not None:
                self.meter.version = news.version
            return news

    def wait(self, heard: int, limit_s: float) -> None:
        """Wait until something was heard since `heard` was read, or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.heard != heard, timeout=limit_s)

    @property
    def can_push(self) -> bool:
        """Whether to ask for a push now is of use: connected, none under way, and none refused a moment ago."""
        free = self._client.phase is ClientPhase.FREE and self._news.version is None and not self._news.skipped
        return self.registered and free and self._clock() >= self._again_s

    @property
    def wants_first(self) -> bool:
        """Whether nobody has brought parameters yet, as far as is known here."""
        return self._wants_first

    @property
    def pushing(self) -> bool:
        """Whether a push has not ended."""
        return self._client.phase is not ClientPhase.FREE

    @property
    def awaits(self) -> bool:
        """Whether a push has not ended, or the loop has not come by for what ended it."""
        return self.pushing or self._news.skipped or self._news.version is not None

    @property
    def ahead(self) -> float | None:
        """How far to train on meanwhile, as the master says; see `OuterSettings`."""
        return self.data.settings.ahead if self.data else None

    @property
    def refused(self) -> bool:
        """Whether a push came to nothing, and the loop has not come by since."""
        return self._news.skipped

    @property
    def pulling(self) -> bool:
        """Whether a version is coming, or there and not yet taken."""
        return self._client.pull is not None or self._news.version is not None

    def ask(self, taken: TakenPush, *, tokens: int, took_s: float, ends_round: bool = False) -> None:
        """Ask to push what was taken.

        `took_s`: how long that took, no shorter is the pause after a refusal; `ends_round`: of the other clusters too.
        """
        with self.changed:
            self._taken, self._told = taken, self.chunks.progress
            self._pause_s = max(self._pause_s, 10 * took_s)
            self._news = replace(self._news, round_ended=False)
            self._carry_out(self._client.ask(tokens=tokens, progress=self._told, ends_round=ends_round))

    def keep_round(self) -> None:
        """Say that there is too little to push now."""
        with self.changed:
            self._carry_out(self._client.keep_round())

    def ask_for_chunks(self) -> None:
        """Ask for data, if little is left and nobody has asked."""
        with self.changed:
            if self.registered and self.data and self.data.samples and self.chunks.ask(self._clock()):
                self._tell(on.ChunkAsked(cluster=self._cluster))

    @property
    def missed_s(self) -> float:
        """For how long the master has been away: without a connection, or with a question for data not answered."""
        now_s = self._clock()
        return max(0.0 if self.registered else now_s - self._gone_s, self.chunks.unanswered_s(now_s))

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the event to register with."""
        with self.changed:
            self._actions.connect()
            self._forget_all()
            self.data = welcome
            if self.cut_off:
                return ()
            if welcome.layout is None or welcome.layout.layers != self._layers:
                self._warn("the master's model has other layers than this cluster's; give all clusters one model")
                return ()
            self._actions.dial_anew(welcome.peers)
            self.chunks.connect()
            said = self._client.registered(self.chunks.numbers)
            self._carry_out(said[:-1])
            registration = said[-1]
            assert isinstance(registration, on.ClusterRegistered)
            return (registration,)

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return a sign of life."""
        return (on.ClusterBeat(cluster=self._cluster),)

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Pass on where shards listen; one that has come is a reason to ask soon for what was refused without it."""
        with self.changed:
            self._actions.dial(peers)
            self._pause_s, self._again_s = _PAUSE_S, 0.0
            self._notify()

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:  # noqa: ARG002
        """Register with nothing: a cluster told its layers when it joined."""
        return ()

    def disconnected(self, reason: str) -> None:
        """Train on: nothing is pushed until there is a connection again."""
        with self.changed:
            self.registered, self._gone_s, self._gone = False, self._clock(), reason
            self._notify()

    def died(self, fault: str) -> None:
        """Say that this cluster takes no part any more: the user's own loop trains on."""
        with self.changed:
            if self.registered:
                self._tell(on.ClusterLeft(cluster=self._cluster))
            self.cut_off, self.registered = fault, False
            told = "cluster %s is cut off from all others until it is started again, and trains on alone: %s"
            _LOG.error(told, self._cluster, fault)
            self._notify()

    def commanded(self, command: OuterCommand) -> None:
        """Take a command."""
        with self.changed:
            self._note(command)
            self._carry_out(self._client.on_command(command))
            self._notify()

    def _note(self, command: OuterCommand) -> None:
        match command:
            case do.Welcome():
                self.registered, self._wants_first = True, command.version is None
                self.chunks.keep(command.leases)
                self._again_s = 0.0
            case do.StartPush():
                self._pause_s, self.brings_first = _PAUSE_S, command.parameters
                self.meter.begin("push")
            case do.RefusePush(push=Ticket() as push) | do.SkipRound(push=push):
                self._forget(push)
            case do.EndRound():
                ended = self._news.round_ended or self._client.is_to_end(command)
                self._news = replace(self._news, round_ended=ended)
            case do.StartPull():
                self._wants_first = False
                self._coming = {}
                self.meter.begin("pull")
            case do.EndPull():
                self._coming = {}
                self._forget(command.pull)
                self.meter.end("pull")
            case do.LeaseChunk():
                self.chunks.hold(command.lease)
            case do.LeaseNothing():
                self.chunks.nothing(self._clock(), finished=command.finished)
            case do.Move(way=TransferWay.PULL):
                self._expect(command.transfer)

    def _expect(self, transfer: LayerTransfer) -> None:
        pull = self._client.pull
        if transfer.worker != self._cluster or pull is None or transfer.ticket != pull.pull:
            return
        key = LayerKey(ticket=transfer.ticket, way=TransferWay.PULL, layer=transfer.layer)
        parameters = self._layer(transfer).parameters
        self._moves[key] = transfer
        self._actions.expect(transfer.shard, key, parameters, lost=self.lost)

    def _layer(self, transfer: LayerTransfer) -> Layer:
        if transfer.layer >= len(self._layers):
            raise ProtocolError(f"the master moves layer {transfer.layer}; cluster {self._cluster} has no such layer")
        return self._layers[transfer.layer]

    # From the wire.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:  # noqa: ARG002
        """Take a layer of a version."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer is None:
                return
            self._coming[key.layer] = tensors
            self._carry_out(self._client.arrived(transfer))
            self._notify()

    def sent(self, peer: str, key: LayerKey) -> None:  # noqa: ARG002
        """Note that a layer of a push has left."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer:
                self._carry_out(self._client.sent(transfer))

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:  # noqa: ARG002
        """Tell the master that a layer did not come, or could not be sent."""
        with self.changed:
            transfer = self._moves.pop(key, None)
            if transfer:
                self._tell(on.TransferLost(way=key.way, transfer=transfer, reason=reason))

    def _notify(self) -> None:
        self.heard += 1
        self.changed.notify_all()

    # What was decided.

    def _carry_out(self, said: list[Said]) -> None:
        for one in said:
            match one:
                case SendLayer():
                    self._send(one)
                case SkipPush():
                    self._skip(one.reason)
                case UseVersion():
                    self._use(one)
                case _:
                    self._tell(one)
                    if isinstance(one, on.PushSent):
                        self.meter.end("push")
                    if isinstance(one, on.PushAsked):
                        self._base_version = one.base_version

    def _send(self, command: SendLayer) -> None:
        transfer, taken = command.transfer, self._taken
        if transfer.worker != self._cluster or taken is None:
            return
        key = LayerKey(ticket=transfer.ticket, way=TransferWay.PUSH, layer=transfer.layer)
        specs = self._layer(transfer).parameters
        self._moves[key] = transfer
        make = partial(taken.tensors, specs, transfer.wire_format, parameters=command.parameters)
        self._actions.send(transfer.shard, key, make, lost=self.lost)

    def _skip(self, reason: str) -> None:
        self.meter.end("push")
        self.meter.skip(reason)
        self._news = replace(self._news, skipped=True, counted=False, left_out=False)
        self._taken, self.brings_first = None, False
        self._again_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, max(_LONGEST_PAUSE_S, self._pause_s))

    def _use(self, command: UseVersion) -> None:
        self.meter.end("pull")
        if command.counted:
            self.meter.count(base_version=self._base_version, version=command.version)
            self.chunks.count(self._told)
            self._taken, self.brings_first = None, False
        tensors = {name: one for layer in self._coming.values() for name, one in layer.items()}
        before, self._coming = self._news, {}
        self._news = replace(
            before,
            version=command.version,
            tensors=tensors,
            counted=command.counted or before.counted,
            left_out=command.left_out or before.left_out,
        )

    def _forget(self, ticket: Ticket) -> None:
        self._moves = {key: one for key, one in self._moves.items() if key.ticket != ticket}
        self._actions.forget(ticket)

    def _forget_all(self) -> None:
        self._coming = {}
        self.registered = False
        self.meter.end("push")
        self.meter.end("pull")
        for ticket in {key.ticket for key in self._moves}:
            self._forget(ticket)

    def _tell(self, event: OuterEvent) -> None:
        self._actions.tell(event)

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 20:
            self._warned.add(text)
            _LOG.warning("cluster %s: %s", self._cluster, text)
