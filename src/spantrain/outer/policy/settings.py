"""The master's numbers, and the small state that it keeps over a restart."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from spantrain.core.outer.events import Ticket
from spantrain.core.records import Bounds, Record
from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.guard import GuardSettings, GuardState


class OuterSettings(Record):
    """How the master decides."""

    grace_s: Annotated[float, Bounds(low=0)] = 1.0
    """From the first push of a window to the update, which comes sooner where every cluster has pushed. Without end it
    is a synchronous outer optimizer."""
    clip_norm: Annotated[float | None, Bounds(over=0)] = 1.0
    """The mean is scaled down to this norm; None for never."""
    part_steps: bool = True
    """Whether a window that holds pushes of some of the clusters is a part of a step, as large as their tokens are of
    those of one push of every cluster: one of four equal clusters steps a quarter, so tokens count alike at any speeds
    and the momentum acts once a round. False is a whole step for each window, as in Di-PS, algorithm 1."""
    common_rounds: bool = True
    """Whether a cluster that has taken all steps of a round ends that of the others, who push what they have: so a
    window holds pushes of all, made from about the same version. False: each ends its own, as in Di-PS."""
    ahead: Annotated[float | None, Bounds(low=0, high=1)] = None
    """How many inner steps, as a part of a round's, a cluster takes while its push waits for the version with it; then
    it stands still until that is there. None: as many as it takes. 0: none, as in synchronous DiLoCo."""
    staleness_power: Annotated[float, Bounds(low=0, high=10)] = 0.0
    """A push weighs its tokens over this power of one more than the versions that were made since it began; 0 for its
    tokens alone."""
    compensation: Annotated[float, Bounds(low=0, high=1)] = 0.0
    """A push that began from an older version is corrected for what parameters did since, by at most this part of its
    own size; 0 for never. Shards then hold parameters of every version that a cluster began from."""
    lost_after_s: Annotated[float, Bounds(over=0)] = 10.0
    """Without a sign of life."""
    transfer_limit_s: Annotated[float, Bounds(over=0)] = 600.0
    """A push or a pull that takes longer is ended."""
    lease_s: Annotated[float, Bounds(over=0)] = 600.0
    """Of a chunk, from the last sign of life."""
    shard_slots: Annotated[int, Bounds(low=1, high=1024)] = 2
    """Layers that a shard takes, and gives, at once: one on its way, and one that follows it without a pause."""
    worker_slots: Annotated[int, Bounds(low=1, high=1024)] = 2
    """The same of a worker."""
    push_format: WireFormat = WireFormat.NATIVE
    """What pseudo-gradients are sent as; first parameters and pulls are always sent as they are, so that every cluster
    begins from exactly what the shards hold."""
    fragments: Annotated[int, Bounds(low=1, high=1000)] = 1
    """Of the layers, each with pushes, windows and versions of its own, at other steps; 1 for all layers at once."""
    guard: GuardSettings = field(default_factory=GuardSettings)


class ClusterRecord(Record):
    """What counted of one cluster."""

    tokens: int = 0
    """In updates that were decided, left out or not."""
    last_tokens: int = 0
    """Of the last push among them."""
    pushes: int = 0
    left_out: int = 0
    """Of its pushes, by the guard."""
    staleness: int = 0
    """Added up over its pushes: versions that were made between a push's start and the update with it."""
    version: int = 0
    """That the last of them went into: from an older one it has nothing new to push."""
    last_push: str = ""
    """Its ticket."""
    last_left_out: bool = False
    """Whether the guard left it out."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.last_tokens, self.pushes, self.left_out, self.staleness, self.version) < 0:
            raise ValueError(f"a cluster's counts must not be negative, got {self}")
        if self.last_push:
            Ticket.parse(self.last_push)


class MasterState(Record):
    """What outlives the master; can be written as JSON. Pushes that are under way do not: they are made again."""

    epoch: int = 0
    """Starts of the master."""
    version: int = 0
    """The newest that was decided; 0 before there was any."""
    seeded: bool = False
    """Whether the shards have parameters of that version; else the next push brings them."""
    next_version: int = 1
    """No version from here on was ever made, not even in an update that came to nothing."""
    updates: int = 0
    left_out: int = 0
    """Pushes that the guard refused."""
    clusters: Mapping[str, ClusterRecord] = field(default_factory=dict)
    guard: GuardState = field(default_factory=GuardState)
    chunks: ChunkState | None = None
    """None where the clusters bring their own data."""

    def __post_init__(self) -> None:
        counts = (self.epoch, self.updates, self.left_out, self.version)
        if min(counts) < 0 or self.next_version <= self.version:
            raise ValueError(f"a master's counts must not be negative, and next_version over version; got {self}")
