"""What the outer optimizer's master hears: registration, pushes, updates, pulls, chunks of data.

A cluster here is what Di-PS calls one: devices that train a whole copy of the model by themselves. A push brings its
pseudo-gradient to the shards, an update makes a new version of the parameters of several pushes, a pull takes a
version to a cluster. Each push, pull and update has a ticket that no other has, also over restarts of the master: what
belongs to an ended one is known by its ticket, dropped and counted. A registration begins a connection: what either
side sent over an earlier one no longer arrives, and what one sends arrives in order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from spantrain.core.records import Record
from spantrain.formats.registry import WireFormat

_TICKET = re.compile(r"(\d+)\.(\d+)", re.ASCII)
_END = 2**63


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The number of a push, a pull or an update: start of the master, and a count since then.

    >>> str(Ticket(2, 17)), Ticket.parse("2.17") == Ticket(2, 17)
    ('2.17', True)
    """

    epoch: int
    number: int

    def __post_init__(self) -> None:
        if not (0 <= self.epoch < _END and 0 <= self.number < _END):
            raise ValueError(f"a ticket's numbers are 0 to {_END - 1}, got {self.epoch} and {self.number}")

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """Read the text form, `epoch.number`."""
        match = _TICKET.fullmatch(text)
        if match is None:
            raise ValueError(f"not a ticket: {text!r}; write epoch.number, e.g. 2.17")
        return cls(int(match[1]), int(match[2]))


class TransferWay(Enum):
    """Which way a layer goes."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, kw_only=True, order=True)
class LayerTransfer:
    """One layer between a worker of a cluster and the shard that holds it."""

    ticket: Ticket
    cluster: str
    worker: str
    """Of its cluster: the process that holds the layer."""
    layer: int
    shard: str
    size_bytes: int
    """As it is sent."""
    wire_format: WireFormat = WireFormat.NATIVE
    """What its tensors are sent as."""

    def __post_init__(self) -> None:
        if self.layer < 0 or self.size_bytes < 0:
            raise ValueError(
                f"a transfer's layer and bytes must not be negative, got {self.layer} and {self.size_bytes}"
            )


MAX_LEASES = 1024
"""Chunks that a cluster may have at once."""
_MAX_TOKENS = 2**48
"""Of a push: far more than any cluster trains on in a round."""


class Lease(Record):
    """A chunk of the data that a cluster trains on now."""

    number: int
    cluster: str
    chunk: int
    data_pass: int
    """How often the chunk was counted whole before."""
    begin: int
    """The first sample of the chunk that was not counted."""
    end: int
    """Samples of the chunk."""

    def __post_init__(self) -> None:
        if min(self.number, self.chunk, self.data_pass, self.begin) < 0 or self.begin >= self.end:
            raise ValueError(f"a lease needs numbers from 0 and 0 <= begin < end, got {self}")


class ChunkProgress(Record):
    """How far a cluster came in a chunk: trained on, and in this push."""

    lease: int
    upto: int


class PushOutcome(Enum):
    """What became of a push that a cluster sent, and heard no more of."""

    PENDING = "pending"
    """It waits for an update: a pull or a skipped round will follow."""
    COUNTED = "counted"
    """It is in a version, or was left out of one: begin anew from a pull."""
    SKIPPED = "skipped"
    """It is in no version and will be in none: train on from the same start."""


class OuterMessage(Record):
    """What the master and a member say to each other."""

    fragment: int = 0
    """Of the layers that it is of; 0 also where it is of all."""


M = TypeVar("M", bound=OuterMessage)
Speaker = tuple[str, str]
"""A kind of member (`cluster`, `worker` or `shard`), and a name."""


def of_fragment(fragment: int, message: M) -> M:
    """Return a message as one of a fragment."""
    return replace(message, fragment=fragment) if fragment else message


class ClusterEvent(OuterMessage):
    """What a cluster says of itself."""

    cluster: str

    @property
    def speakers(self) -> frozenset[Speaker]:
        """Who may say it."""
        return frozenset({("cluster", self.cluster)})


class ShardEvent(OuterMessage):
    """What a shard says of itself."""

    shard: str

    @property
    def speakers(self) -> frozenset[Speaker]:
        """Who may say it."""
        return frozenset({("shard", self.shard)})


# What the master hears of clusters.


class ClusterRegistered(ClusterEvent):
    """A cluster has come, or come back; nothing of an earlier life of it goes on."""

    workers: Mapping[str, tuple[int, ...]]
    """By worker: the layers that it sends and gets. All together each layer once."""
    unresolved: Ticket | None = None
    """A push that it sent and does not know the fate of; None for a cluster that begins from a pull."""
    leases: tuple[int, ...] = ()
    """Chunks that it still works on; none for a cluster that was started again."""


class ClusterBeat(ClusterEvent):
    """A cluster lives."""


class ClusterLeft(ClusterEvent):
    """A cluster goes, and said so."""


class TrainingBegun(ClusterEvent):
    """A cluster has taken its first inner step on this connection; pushes will follow. Who evaluates takes none."""


class PushAsked(ClusterEvent):
    """A cluster has inner steps to give."""

    base_version: int
    """The version that it started from."""
    tokens: int
    """Trained on since then: its weight. 0 only for first parameters."""
    progress: tuple[ChunkProgress, ...] = ()
    ends_round: bool = False
    """Whether it took all steps of a round, so that the other clusters may push too."""

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= _MAX_TOKENS or self.base_version < 0:
            raise ValueError(f"{self.cluster}: tokens must be 0 to 2^48, a version not negative, got {self}"[:300])
        if len(self.progress) > MAX_LEASES:
            raise ValueError(f"{self.cluster}: tells of {len(self.progress)} chunks, it may have {MAX_LEASES}")


class RoundKept(ClusterEvent):
    """A cluster has too few new steps for a push, though the round of all was ended: nobody need wait for it."""


class PushSent(ClusterEvent):
    """A cluster has sent all layers of a push."""

    push: Ticket


class PullAsked(ClusterEvent):
    """A cluster wants the newest version."""


class ChunkAsked(ClusterEvent):
    """A cluster wants data."""


# What it hears of transfers: the receiver tells.


class Moved(OuterMessage):
    """A layer has arrived whole."""

    way: TransferWay
    transfer: LayerTransfer

    @property
    def speakers(self) -> frozenset[Speaker]:
        """Who may say it: a push's shard, a pull's worker or its cluster's leader."""
        one = self.transfer
        if self.way is TransferWay.PUSH:
            return frozenset({("shard", one.shard)})
        return frozenset({("cluster", one.cluster), ("worker", one.worker)})


class TransferLost(OuterMessage):
    """A layer did not arrive, or was refused; the push or pull cannot end."""

    way: TransferWay
    transfer: LayerTransfer
    reason: str

    @property
    def speakers(self) -> frozenset[Speaker]:
        """Who may say it: either end."""
        one = self.transfer
        return frozenset({("shard", one.shard), ("cluster", one.cluster), ("worker", one.worker)})


# What it hears of shards.


class ShardRegistered(ShardEvent):
    """A shard has come, or come back."""

    versions: tuple[int, ...]
    """That it can restore: committed, staged, or in a snapshot. Empty for a new one."""


class ShardBeat(ShardEvent):
    """A shard lives."""

    versions: tuple[int, ...]


class ShardLost(ShardEvent):
    """A shard's end was seen before its heartbeats were missed."""

    reason: str


class PushChecked(ShardEvent):
    """Whether a shard has all of its layers of a push, and keeps them until told otherwise."""

    push: Ticket
    complete: bool


class NormsMeasured(ShardEvent):
    """Sums of squares of pushes on one shard."""

    update: Ticket
    squares: Mapping[Ticket, tuple[float, ...]]
    """By push: of each of the shard's layers."""


class MeanCombined(ShardEvent):
    """The weighted mean is there on one shard."""

    update: Ticket
    squares: tuple[float, ...]
    """Its sum of squares, of each of the shard's layers."""


class Staged(ShardEvent):
    """A new version is ready on one shard, beside the present one."""

    update: Ticket


class Committed(ShardEvent):
    """A shard serves a version."""

    version: int
    versions: tuple[int, ...]
    """All that it can restore now."""


class Restored(ShardEvent):
    """A shard has gone to what it was told to restore. One that does not have that registers again."""

    version: int
    versions: tuple[int, ...]
    """All that it can restore now."""


class Ticked(OuterMessage):
    """Nothing but time has passed: nobody says it, it is the master's own."""


OuterEvent = (
    ClusterRegistered | ClusterBeat | ClusterLeft | TrainingBegun | PushAsked | RoundKept | PushSent | PullAsked
    | ChunkAsked | Moved | TransferLost | ShardRegistered | ShardBeat | ShardLost | PushChecked | NormsMeasured
    | MeanCombined | Staged | Committed | Restored | Ticked
)  # fmt: skip
