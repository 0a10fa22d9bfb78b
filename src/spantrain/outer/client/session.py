"""A cluster's end of the outer optimizer while its loop trains: hears the master and the wire, and gets things done.

Di-PS, 3.2 and 4.2, by the decisions of `outer.policy.client`. Here they meet real threads: commands come from the
link's, layers from the wire's, and the loop comes by between two steps to take a version that is there whole, and to
ask for a push. Nobody waits here for the network but the loop, where it asks to.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand, SendLayer, SkipPush, UseVersion
from spantrain.core.outer.events import ChunkProgress, OuterEvent, Ticket, TransferWay, of_fragment
from spantrain.core.outer.layers import Layer
from spantrain.outer.client.action_queue import LayerMover
from spantrain.outer.client.metrics import ClientMeter
from spantrain.outer.client.replica import TakenPush
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.policy.chunks import LeasedChunks
from spantrain.outer.policy.client import ClientPhase, OuterClient, Said
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers.interface import LayerKey

_LOG = logging.getLogger(__name__)
_LEFT_OUT = "a push was left out of an update: it was not finite, or not as usual (`spantrain outer status` says which)"


@dataclass(frozen=True, kw_only=True)
class SessionUpdate:
    """What has come since the loop came by last; first a push that came to nothing, then a version."""

    skipped: bool = False
    version: int | None = None
    """None: no version has come."""
    tensors: Tensors = field(default_factory=dict)
    counted: bool = False
    """Whether the version counts the last push."""
    left_out: bool = False
    """Whether that was left out of its update."""
    round_ended: bool = False
    """Whether another cluster has ended the round of all."""


class ClientSession(LayerMover):
    """Hears link and wire (`LinkListener`, `WireListener`), and the training loop."""

    def __init__(
        self, cluster: str, layers: tuple[Layer, ...], *, workers: Mapping[str, tuple[int, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic, fragment: int = 0, beside: "ClientSession | None" = None,
    ) -> None:  # fmt: skip
        """Begin without a connection.

        Args:
            cluster: its name
            layers: of the model, or of a fragment of it
            workers: who sends and gets which layers, by default the leader all
            clock: in seconds
            fragment: of the model; the first has what is there once: connection, leases of data, where shards are
            beside: the session before this one of the first fragment, with which lock, queue and counts are shared
        """
        super().__init__(cluster, layers, beside=beside)
        self._clock, self._fragment = clock, fragment
        self._client = OuterClient(cluster, workers or {cluster: tuple(range(len(layers)))})
        self.meter: ClientMeter = beside.meter if beside else ClientMeter(clock)
        self.chunks: LeasedChunks = beside.chunks if beside and not fragment else LeasedChunks()
        self.data: MasterWelcome | None = None
        """The last welcome."""
        self.version = 0
        """The last that the loop took; 0 before there was any."""
        self.cut_off = ""
        """By which fault of this side, for good; empty as long as there is none."""
        self.brings_first = False
        """Whether the push under way brings the first parameters."""
        self.wants_first = False
        """Whether nobody has brought parameters yet, as far as is known here."""
        self._taken: TakenPush | None = None
        self._told: tuple[ChunkProgress, ...] = ()
        self._base_version = 0
        self._coming: dict[int, Tensors] = {}
        self._update = SessionUpdate()
        self._gone_s, self._gone = clock(), "there was none yet"
        """When the last connection ended, and why."""
        self._warned: set[str] = set()

    @property
    def registered(self) -> bool:
        """Whether the master knows this cluster."""
        return self._client.is_registered

    def close(self) -> None:
        """Say goodbye, and end; link and wire are closed here."""
        with self.changed:
            if self.registered:
                self._tell(on.ClusterLeft(cluster=self.name))
        super().close()

    # From the loop.

    def stepped(self) -> None:
        """Note an inner step."""
        with self.changed:
            self._carry_out(self._client.step())

    def waits_for(self) -> str:
        """Return what a new version needs that has not come, as far as is known here."""
        with self.changed:
            if not (self.registered and self.data and self.data.layout):
                return f"a connection to the master ({self._actions.link.problem or self._gone})"
            return self._client.waits_for(self.data.layout.shard_of)

    def take_update(self) -> SessionUpdate:
        """Return what has come since the last call."""
        with self.changed:
            update, self._update = self._update, SessionUpdate()
            if update.version is not None:
                self.version = update.version
            return update

    @property
    def can_push(self) -> bool:
        """Whether to ask for a push now is of use, as the client says, and the loop knows all that has come."""
        return self._update.version is None and not self._update.skipped and self._client.may_ask(self._clock())

    @property
    def pushing(self) -> bool:
        """Whether a push has not ended."""
        return self._client.phase is not ClientPhase.FREE

    @property
    def awaits(self) -> bool:
        """Whether a push has not ended, or the loop has not come by for what ended it."""
        return self.pushing or self._update.skipped or self._update.version is not None

    @property
    def ahead(self) -> float | None:
        """How far to train on meanwhile, as the master says; see `OuterSettings`."""
        return self.data.settings.ahead if self.data else None

    @property
    def has_begun(self) -> bool:
        """Whether a version is here, or this cluster brings the first."""
        return self.version > 0 or (self.brings_first and self.pushing)

    @property
    def is_idle(self) -> bool:
        """Whether it is connected, and nothing is under way or has come that the loop does not know."""
        return self.registered and not (self.awaits or self._client.pull is not None or self.wants_first)

    def ask(self, taken: TakenPush, *, tokens: int, took_s: float, ends_round: bool = False) -> None:
        """Ask to push what was taken; `took_s`: how long that took, `ends_round`: of the other clusters too."""
        with self.changed:
            self._taken, self._told = taken, self.chunks.progress
            self._update = replace(self._update, round_ended=False)
            said = self._client.ask(tokens=tokens, progress=self._told, ends_round=ends_round, took_s=took_s)
            self._carry_out(said)

    def keep_round(self) -> None:
        """Say that there is too little to push now."""
        with self.changed:
            self._carry_out(self._client.keep_round())

    def ask_for_chunks(self) -> None:
        """Ask for data, if little is left and nobody has asked."""
        with self.changed:
            if self.registered and self.data and self.data.samples and self.chunks.ask(self._clock()):
                self._tell(on.ChunkAsked(cluster=self.name))

    @property
    def missed_s(self) -> float:
        """For how long the master has been away: without a connection, or with a question for data not answered."""
        now_s = self._clock()
        return max(0.0 if self.registered else now_s - self._gone_s, self.chunks.unanswered_s(now_s))

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the event to register with."""
        with self.changed:
            if not self._fragment:
                self._actions.connect()
            self._coming = {}
            self._client.disconnected()
            self.meter.end("push", self._fragment)
            self.meter.end("pull", self._fragment)
            self._forget_moves()
            self.data = welcome
            if self.cut_off:
                return ()
            if welcome.layout is None or welcome.layout.layers != self._layers:
                self._warn("the master's model has other layers than this cluster's; give all clusters one model")
                return ()
            if not self._fragment:
                self._dial_anew(welcome.peers)
            self.chunks.connect()
            *ended, registration = self._client.registered(self._clock(), self.chunks.numbers)
            self._carry_out(ended)
            assert isinstance(registration, on.ClusterRegistered)
            return (of_fragment(self._fragment, registration),)

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return a sign of life."""
        return (on.ClusterBeat(cluster=self.name),)

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Pass on where shards listen; one that has come is a reason to ask soon for what was refused without it."""
        with self.changed:
            if not self._fragment:
                super().peers_changed(peers)
            self._client.shards_changed()
            self._notify()

    def disconnected(self, reason: str) -> None:
        """Train on: nothing is pushed until there is a connection again."""
        with self.changed:
            self._client.disconnected()
            self._gone_s, self._gone = self._clock(), reason
            self._notify()

    def died(self, fault: str) -> None:
        """Say that this cluster takes no part any more: the user's own loop trains on."""
        with self.changed:
            first = not self._fragment  # which speaks for all
            if self.registered and first:
                self._tell(on.ClusterLeft(cluster=self.name))
            self._client.disconnected()
            self.cut_off = fault
            if first:
                told = "cluster %s is cut off from all others until it is started again, and trains on alone: %s"
                _LOG.error(told, self.name, fault)
            self._notify()

    def commanded(self, command: OuterCommand) -> None:
        """Take a command."""
        with self.changed:
            self._note(command)
            self._carry_out(self._client.on_command(self._clock(), command))
            self._notify()

    def _note(self, command: OuterCommand) -> None:
        match command:
            case do.Welcome():
                self.wants_first = command.version is None
                self.chunks.keep(command.leases)
            case do.StartPush():
                self.brings_first = command.parameters
                self.meter.begin("push", self._fragment)
            case do.RefusePush(push=Ticket() as push) | do.SkipRound(push=push):
                self._forget(push)
            case do.EndRound():
                ended = self._update.round_ended or self._client.is_to_end(command)
                self._update = replace(self._update, round_ended=ended)
            case do.StartPull():
                self.wants_first = False
                self._coming = {}
                self.meter.begin("pull", self._fragment)
            case do.EndPull():
                self._coming = {}
                self._forget(command.pull)
                self.meter.end("pull", self._fragment)
            case do.LeaseChunk():
                self.chunks.hold(command.lease)
                self.ask_for_chunks()
            case do.LeaseNothing():
                self.chunks.nothing(self._clock(), finished=command.finished)
            case do.Move(way=TransferWay.PULL):
                pull = self._client.pull
                if command.transfer.worker == self.name and pull and command.transfer.ticket == pull.pull:
                    self._expect(command.transfer)

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

    # What was decided.

    def _carry_out(self, said: list[Said]) -> None:
        for one in said:
            match one:
                case SendLayer():
                    if one.transfer.worker == self.name and self._taken is not None:
                        self._send(one.transfer, self._taken, parameters=one.parameters)
                case SkipPush():
                    self.meter.end("push", self._fragment)
                    self.meter.skip(one.reason)
                    self._update = replace(self._update, skipped=True, counted=False, left_out=False)
                    self._taken, self.brings_first = None, False
                case UseVersion():
                    self._use(one)
                case _:
                    self._tell(one)
                    if isinstance(one, on.PushSent):
                        self.meter.end("push", self._fragment)
                    if isinstance(one, on.PushAsked):
                        self._base_version = one.base_version

    def _use(self, command: UseVersion) -> None:
        self.meter.end("pull", self._fragment)
        if command.left_out:
            self._warn(_LEFT_OUT)
            self.meter.skip(_LEFT_OUT)
        elif command.counted:
            self.meter.count(base_version=self._base_version, version=command.version)
        if command.counted:
            self.chunks.count(self._told)
            self._taken, self.brings_first = None, False
        tensors = {name: one for layer in self._coming.values() for name, one in layer.items()}
        before, self._coming = self._update, {}
        self._update = replace(
            before,
            version=command.version,
            tensors=tensors,
            counted=command.counted or before.counted,
            left_out=command.left_out or before.left_out,
        )

    def _tell(self, event: OuterEvent) -> None:
        super()._tell(of_fragment(self._fragment, event))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("cluster %s: %s", self.name, text)
