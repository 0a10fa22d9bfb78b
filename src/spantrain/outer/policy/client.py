"""A cluster's side of the protocol: what is asked, sent and used when; no tensors, no clock.

Di-PS, 3.2 and 4.2. Kept: a cluster asks, sends what it is told to, says when all is sent, and goes on from the version
that it gets; after any fault it skips the round and trains on. Decided here: while a push waits the cluster trains on;
a pull tells which of its pushes it counts, so that a version that comes for another reason is not taken for the answer;
after a lost connection the cluster asks what became of a push that it had sent, and forgets one that it had not; after
a push that came to nothing it asks again after a pause, which is twice as long each time.
"""

from collections.abc import Callable, Mapping
from enum import Enum

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import ClusterCommand, OuterCommand, SendLayer, SkipPush, UseVersion
from spantrain.core.outer.events import ChunkProgress, LayerTransfer, OuterEvent, PushOutcome, Ticket, TransferWay

_PAUSE_S = 0.25
_MAX_PAUSE_S = 8.0

Said = OuterEvent | ClusterCommand
"""To the master, or to the cluster's own processes."""


class ClientPhase(Enum):
    """How far a cluster's push is."""

    FREE = "free"
    ASKING = "asking"
    SENDING = "sending"
    SENT = "sent"
    """All of it; the update with it, or its end, is still to come."""


class OuterClient:
    """Hears the master and its own processes; answers with what is to be told to either, in order.

    >>> client = OuterClient("a", {"w0": (0, 1)})
    >>> client.ask(tokens=100)[0].tokens, client.phase.value
    (100, 'asking')
    >>> client.ask(tokens=200)
    []
    >>> [type(said).__name__ for said in client.on_command(0.0, do.RefusePush(cluster="a", push=None, reason="away"))]
    ['SkipPush']
    """

    def __init__(self, cluster: str, workers: Mapping[str, tuple[int, ...]]) -> None:
        self._cluster = cluster
        self._workers = dict(workers)
        self._layers = frozenset(layer for layers in workers.values() for layer in layers)
        self._push: Ticket | None = None
        self._unsent: set[int] = set()
        self.pull: do.StartPull | None = None
        """What is coming now."""
        self._missing: set[int] = set()
        self.phase = ClientPhase.FREE
        self.is_registered = self._told_training = False
        self._pause_s, self._again_s = _PAUSE_S, 0.0
        self._refused = ""
        """Why the last push came to nothing."""
        self.version = 0
        """That the round began from; 0 before there was any."""

    def waits_for(self, shard_of: Callable[[int], str]) -> str:
        """Return what the next version needs that has not come."""
        layers = self._missing if self.pull else self._unsent
        shards = ", ".join(sorted({shard_of(layer) for layer in layers}))
        if self.pull:
            return f"{len(layers)} layers of version {self.pull.version}, from {shards}"
        match self.phase:
            case ClientPhase.ASKING:
                return "the master's answer to a push"
            case ClientPhase.SENDING:
                return f"{len(layers)} layers of its push to be taken by {shards}"
            case ClientPhase.SENT:
                return "an update with its push, which the shards have; `spantrain outer status` says what keeps it"
        return f"a push, which came to nothing: {self._refused}" if self._refused else "its round to end"

    def may_ask(self, now_s: float) -> bool:
        """Whether to ask for a push now is of use: registered, none under way, and none refused a moment ago."""
        return self.is_registered and self.phase is ClientPhase.FREE and now_s >= self._again_s

    def shards_changed(self) -> None:
        """Note that a shard has come, perhaps: a reason to ask soon for what was refused without it."""
        self._pause_s, self._again_s = _PAUSE_S, 0.0

    def disconnected(self) -> None:
        """Note that the connection has ended."""
        self.is_registered = False

    def registered(self, now_s: float, leases: tuple[int, ...] = ()) -> list[Said]:
        """Begin a connection: what was not sent whole has come to nothing."""
        said: list[Said] = []
        if self.phase in (ClientPhase.ASKING, ClientPhase.SENDING):
            said += self._skip(now_s, "the connection was lost")
        self.pull = None
        self.is_registered = self._told_training = False
        return [
            *said,
            on.ClusterRegistered(cluster=self._cluster, workers=self._workers, unresolved=self._push, leases=leases),
        ]

    def step(self) -> list[Said]:
        """Note an inner step; the first one on a connection is told."""
        if self._told_training or not self.is_registered:
            return []
        self._told_training = True
        return [on.TrainingBegun(cluster=self._cluster)]

    def ask(
        self, *, tokens: int, progress: tuple[ChunkProgress, ...] = (), ends_round: bool = False, took_s: float = 0.0
    ) -> list[Said]:
        """Ask to push what was learned up to now; nothing while an earlier push has not ended.

        `took_s`: how long it took to copy that; the pause after a refusal is ten times as long at least.
        """
        if self.phase is not ClientPhase.FREE:
            return []
        self.phase = ClientPhase.ASKING
        self._pause_s = max(self._pause_s, 10 * took_s)
        return [
            on.PushAsked(
                cluster=self._cluster,
                base_version=self.version,
                tokens=tokens,
                progress=progress,
                ends_round=ends_round,
            )
        ]

    def keep_round(self) -> list[Said]:
        """Say that there is too little to push; nothing while a push is under way, which says more."""
        return [on.RoundKept(cluster=self._cluster)] if self.phase is ClientPhase.FREE else []

    def is_to_end(self, command: OuterCommand) -> bool:
        """Whether a command ends this cluster's round.

        Not one that a push has crossed on its way: that push is for the same window, and the next round is young.
        """
        return isinstance(command, do.EndRound) and self.phase is not ClientPhase.ASKING

    def on_command(self, now_s: float, command: OuterCommand) -> list[Said]:
        """Take in what the master commands; what belongs to a push or a pull that has ended changes nothing."""
        match command:
            case do.Welcome():
                self.is_registered, self._again_s = True, 0.0
                return self._skip(now_s, "it was in no version") if command.fate is PushOutcome.SKIPPED else []
            case do.StartPush() if self.phase is ClientPhase.ASKING:
                self.phase, self._push = ClientPhase.SENDING, command.push
                self._unsent, self._refused, self._pause_s = set(self._layers), "", _PAUSE_S
            case do.RefusePush() if self.phase is not ClientPhase.FREE and command.push == self._push:
                return self._skip(now_s, command.reason)
            case do.SkipRound() if command.push == self._push:
                return self._skip(now_s, command.reason)
            case do.StartPull():
                self.pull, self._missing = command, set(self._layers)
            case do.EndPull() if self.pull and command.pull == self.pull.pull:
                self.pull = None
                return [on.PullAsked(cluster=self._cluster)]
            case do.Move(way=TransferWay.PUSH) if command.transfer.ticket == self._push:
                return [SendLayer(transfer=command.transfer, parameters=command.parameters, reason=command.reason)]
        return []

    def _skip(self, now_s: float, reason: str) -> list[Said]:
        self.phase, self._push, self._refused = ClientPhase.FREE, None, reason
        self._again_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, max(_MAX_PAUSE_S, self._pause_s))
        return [SkipPush(reason=reason)]

    def sent(self, transfer: LayerTransfer) -> list[Said]:
        """Note that a layer has left; after the last, tell the master."""
        if self._push is None or transfer.ticket != self._push or self.phase is not ClientPhase.SENDING:
            return []
        self._unsent.discard(transfer.layer)
        if self._unsent:
            return []
        self.phase = ClientPhase.SENT
        return [on.PushSent(cluster=self._cluster, push=self._push)]

    def arrived(self, transfer: LayerTransfer) -> list[Said]:
        """Note that a layer has arrived whole; after the last, use the version."""
        pull = self.pull
        if pull is None or transfer.ticket != pull.pull or transfer.layer not in self._missing:
            return []
        self._missing.remove(transfer.layer)
        moved = on.Moved(way=TransferWay.PULL, transfer=transfer)
        if self._missing:
            return [moved]
        counted = self.phase is ClientPhase.SENT and pull.counted == self._push
        if counted:
            self.phase, self._push = ClientPhase.FREE, None
        self.version, self.pull = pull.version, None
        left_out = counted and pull.left_out
        return [UseVersion(version=pull.version, counted=counted, left_out=left_out, reason=pull.reason), moved]
