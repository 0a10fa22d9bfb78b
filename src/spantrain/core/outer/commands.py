"""What the outer optimizer's master commands: the other half of `events`. Each says whom it is for, and why."""

from typing import Annotated

from spantrain.core.outer.events import LayerTransfer, Lease, OuterMessage, PushOutcome, Ticket, TransferWay
from spantrain.core.records import Bounds, Record

_Part = Annotated[float, Bounds(over=0, high=1)]


class MasterCommand(OuterMessage):
    """What the master commands."""

    reason: str

    @property
    def recipients(self) -> tuple[str, ...]:
        """Names of those it is for."""
        return ()


class ToCluster(MasterCommand):
    """A command for a cluster."""

    cluster: str

    @property
    def recipients(self) -> tuple[str, ...]:
        """The cluster."""
        return (self.cluster,)


class ToShard(MasterCommand):
    """A command for a shard."""

    shard: str

    @property
    def recipients(self) -> tuple[str, ...]:
        """The shard."""
        return (self.shard,)


# To clusters.


class Welcome(ToCluster):
    """Registered; a pull of the newest version follows, if there is one."""

    version: int | None
    """None: there are no parameters yet; the first push brings them."""
    fate: PushOutcome | None
    """Of the push that it asked about."""
    leases: tuple[int, ...] = ()
    """Of the chunks that it registered with: those that are still its own."""


class RegisterAgain(MasterCommand):
    """The master does not know this cluster or shard (any more)."""

    member: str

    @property
    def recipients(self) -> tuple[str, ...]:
        """The member."""
        return (self.member,)


class StartPush(ToCluster):
    """Get ready to send; each layer when its turn comes."""

    push: Ticket
    parameters: bool
    """Whether to send the parameters themselves: there are none yet."""


class RefusePush(ToCluster):
    """Not now, or no more: train on; what was learned goes into a later push."""

    push: Ticket | None
    """None: it was never started."""


class AcceptPush(ToCluster):
    """All shards keep the whole push: it is in the next update. Its tokens and samples count when that is committed."""

    push: Ticket


class EndRound(ToCluster):
    """Another cluster has ended a round: push behind the next step, or say that there is too little to push."""


class SkipRound(ToCluster):
    """An accepted push is in no version, or none that is left, since a shard was lost: train on from the same start."""

    push: Ticket


class StartPull(ToCluster):
    """Get ready to receive a version; each layer when its turn comes. Use it when all of it is there."""

    pull: Ticket
    version: int
    counted: Ticket | None
    """The cluster's last push that was decided on: what it waits for, if it waits for that one."""
    left_out: bool = False
    """Whether that push was left out of its update."""


class EndPull(ToCluster):
    """Forget what came of a pull."""

    pull: Ticket


class LeaseChunk(ToCluster):
    """Train on this chunk."""

    lease: Lease


class LeaseNothing(ToCluster):
    """No chunk is free."""

    finished: bool
    """Whether all data is counted; else ask again later."""


# To shards, or to both ends of a transfer.


class Move(MasterCommand):
    """Send this layer now; both ends are told."""

    way: TransferWay
    transfer: LayerTransfer
    version: int
    """Of a pull: what to send. Of a push: the version that it started from."""
    parameters: bool = False
    """Of a push: whether to send the parameters themselves; workers do not hear that it started."""

    @property
    def recipients(self) -> tuple[str, ...]:
        """Both ends, and the cluster's leader."""
        one = self.transfer
        return tuple(dict.fromkeys((one.shard, one.worker, one.cluster)))


class CheckPush(ToShard):
    """Say whether all of your layers of a push are there."""

    push: Ticket


class Forget(ToShard):
    """Free what you hold of a push or a pull; drop what still comes."""

    ticket: Ticket


class Measure(ToShard):
    """Tell the norms of these pushes."""

    update: Ticket
    pushes: tuple[Ticket, ...]


class PushWeight(Record, where="a push"):
    """What part of the mean a push is."""

    push: Ticket
    part: _Part
    base_version: int = 0
    """That the push began from."""


class Combine(ToShard):
    """Make the weighted mean, adding in this order, and tell its norm."""

    update: Ticket
    weights: tuple[PushWeight, ...]
    compensation: float = 0.0
    """How far pushes that began from an older version than the present one are corrected for that."""


class StageVersion(ToShard, where="a step"):
    """Make a new version beside the present one; what else was staged is forgotten."""

    update: Ticket
    version: int
    scale: Annotated[float, Bounds(low=0, high=1)]
    """What the mean is multiplied by."""
    parameters: Ticket | None
    """The push whose tensors are the version as they are; None to step along the mean."""
    part: _Part = 1.0
    """Of a step that all clusters would make together."""


class Commit(ToShard):
    """Serve this version from now on; free the update's pushes, and versions but it and those that are kept."""

    version: int
    update: Ticket
    keep: tuple[int, ...]
    """Older versions that are being pulled."""
    bases: tuple[int, ...] = ()
    """Versions that clusters began from, where pushes are corrected for what came since: their parameters stay."""


class Restore(ToShard):
    """Serve what version `source` held as `version`; forget pushes, what is staged, and other versions in memory."""

    source: int
    version: int


class StartAnew(ToShard):
    """End your process: whoever keeps it up starts another. What this one holds is of no use to the others."""


class Save(MasterCommand):
    """Write the master's state before any command after this one."""


OuterCommand = (
    Welcome | RegisterAgain | StartPush | RefusePush | AcceptPush | EndRound | SkipRound | StartPull | LeaseChunk
    | LeaseNothing | EndPull | Move | CheckPush | Forget | Measure | Combine | StageVersion | Commit | Restore
    | StartAnew | Save
)  # fmt: skip


# What a cluster's client commands its own processes.


class SendLayer(Record):
    """Send a layer of what was learned when the push was asked for."""

    transfer: LayerTransfer
    parameters: bool
    """Whether to send the parameters themselves."""
    reason: str


class SkipPush(Record):
    """The push came to nothing: train on from the same start."""

    reason: str


class UseVersion(Record):
    """All layers of a version are there: begin a round from it."""

    version: int
    counted: bool
    """Whether the last push was part of an update; else it still waits, or there is none."""
    left_out: bool = False
    """Whether it was left out of it."""
    reason: str


ClusterCommand = SendLayer | SkipPush | UseVersion
