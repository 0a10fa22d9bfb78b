"""What the outer optimizer's master commands: the other half of `outer_events`. Each says why."""

import math
from dataclasses import dataclass

from spantrain.core.outer.events import LayerTransfer, Lease, PushOutcome, Ticket, TransferWay

# To clusters.


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Registered; a pull of the newest version follows, if there is one."""

    cluster: str
    version: int | None
    """None: there are no parameters yet; the first push brings them."""
    fate: PushOutcome | None
    """Of the push that it asked about."""
    leases: tuple[int, ...] = ()
    """Of the chunks that it registered with: those that are still its own."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class RegisterAgain:
    """The master does not know this cluster or shard (any more)."""

    member: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StartPush:
    """Get ready to send; each layer when its turn comes."""

    cluster: str
    push: Ticket
    parameters: bool
    """Whether to send the parameters themselves: there are none yet."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class RefusePush:
    """Not now, or no more: train on; what was learned goes into a later push."""

    cluster: str
    push: Ticket | None
    """None: it was never started."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class AcceptPush:
    """All shards keep the whole push: it is in the next update. Its tokens and samples count when that is committed."""

    cluster: str
    push: Ticket
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndRound:
    """Another cluster has ended a round: push behind the next step, or say that there is too little to push."""

    cluster: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SkipRound:
    """An accepted push is in no version, or none that is left, since a shard was lost: train on from the same start."""

    cluster: str
    push: Ticket
    reason: str


@dataclass(frozen=True, kw_only=True)
class StartPull:
    """Get ready to receive a version; each layer when its turn comes. Use it when all of it is there."""

    cluster: str
    pull: Ticket
    version: int
    counted: Ticket | None
    """The cluster's last push that was decided on: what it waits for, if it waits for that one."""
    left_out: bool = False
    """Whether that push was left out of its update."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndPull:
    """Forget what came of a pull."""

    cluster: str
    pull: Ticket
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaseChunk:
    """Train on this chunk."""

    cluster: str
    lease: Lease
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaseNothing:
    """No chunk is free."""

    cluster: str
    finished: bool
    """Whether all data is counted; else ask again later."""
    reason: str


# To shards, or to both ends of a transfer.


@dataclass(frozen=True, kw_only=True)
class Move:
    """Send this layer now; both ends are told."""

    way: TransferWay
    transfer: LayerTransfer
    version: int
    """Of a pull: what to send. Of a push: the version that it started from."""
    parameters: bool = False
    """Of a push: whether to send the parameters themselves; workers do not hear that it started."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckPush:
    """Say whether all of your layers of a push are there."""

    shard: str
    push: Ticket
    reason: str


@dataclass(frozen=True, kw_only=True)
class Forget:
    """Free what you hold of a push or a pull; drop what still comes."""

    shard: str
    ticket: Ticket
    reason: str


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Tell the norms of these pushes."""

    shard: str
    update: Ticket
    pushes: tuple[Ticket, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class PushWeight:
    """What part of the mean a push is."""

    push: Ticket
    part: float
    base_version: int = 0
    """That the push began from."""

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ValueError(f"a push's part must be over 0 and at most 1, got {self.part}")


@dataclass(frozen=True, kw_only=True)
class Combine:
    """Make the weighted mean, adding in this order, and tell its norm."""

    shard: str
    update: Ticket
    weights: tuple[PushWeight, ...]
    compensation: float = 0.0
    """How far pushes that began from an older version than the present one are corrected for that."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class StageVersion:
    """Make a new version beside the present one; what else was staged is forgotten."""

    shard: str
    update: Ticket
    version: int
    scale: float
    """What the mean is multiplied by."""
    parameters: Ticket | None
    """The push whose tensors are the version as they are; None to step along the mean."""
    part: float = 1.0
    """Of a step that all clusters would make together."""
    reason: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and 0 <= self.scale <= 1):
            raise ValueError(f"scale must be from 0 to 1, got {self.scale}")
        if not 0 < self.part <= 1:
            raise ValueError(f"a step's part must be over 0 and at most 1, got {self.part}")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Serve this version from now on; free the update's pushes, and versions but it and those that are kept."""

    shard: str
    version: int
    update: Ticket
    keep: tuple[int, ...]
    """Older versions that are being pulled."""
    bases: tuple[int, ...] = ()
    """Versions that clusters began from, where pushes are corrected for what came since: their parameters stay."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Serve what version `source` held as `version`; forget pushes, what is staged, and other versions in memory."""

    shard: str
    source: int
    version: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StartAnew:
    """End your process: whoever keeps it up starts another. What this one holds is of no use to the others."""

    shard: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write the master's state before any command after this one."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class FragmentCommand:
    """A command of one fragment of the layers; what comes without this is of fragment 0, or of all."""

    fragment: int
    command: "OuterCommand"

    def __post_init__(self) -> None:
        if self.fragment < 1 or isinstance(self.command, FragmentCommand):
            raise ValueError(f"only a command of a fragment over 0 is told with its fragment, once; got {self}")


OuterCommand = (
    Welcome | RegisterAgain | StartPush | RefusePush | AcceptPush | EndRound | SkipRound | StartPull | LeaseChunk
    | LeaseNothing | EndPull | Move | CheckPush | Forget | Measure | Combine | StageVersion | Commit | Restore
    | StartAnew | Save | FragmentCommand
)  # fmt: skip


def tag_command(fragment: int, command: OuterCommand) -> OuterCommand:
    """Return a command with its fragment, as it is told."""
    return FragmentCommand(fragment=fragment, command=command) if fragment else command


def untag_command(command: OuterCommand) -> tuple[int, OuterCommand]:
    """Return the fragment and what is commanded of it."""
    return (command.fragment, command.command) if isinstance(command, FragmentCommand) else (0, command)


# What a cluster's client commands its own processes.


@dataclass(frozen=True, kw_only=True)
class SendLayer:
    """Send a layer of what was learned when the push was asked for."""

    transfer: LayerTransfer
    parameters: bool
    """Whether to send the parameters themselves."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SkipPush:
    """The push came to nothing: train on from the same start."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class UseVersion:
    """All layers of a version are there: begin a round from it."""

    version: int
    counted: bool
    """Whether the last push was part of an update; else it still waits, or there is none."""
    left_out: bool = False
    """Whether it was left out of it."""
    reason: str


ClusterCommand = SendLayer | SkipPush | UseVersion
