"""What a master tells of itself: who is there, how far each is, how fast layers go, what was refused."""

from collections.abc import Mapping

from spantrain.core.records import Record


class ClusterStatus(Record):
    """One cluster, also one that has gone, as long as something of it counted."""

    name: str
    state: str
    """`training`, `waiting` (for the update with its accepted push), `idle` (it is there and gives no pushes),
    `joining` or `away`."""
    workers: tuple[str, ...]
    tokens: int
    """In updates that were decided, left out or not; of a model in fragments as the first counts them."""
    pushes: int
    """Of whichever fragment, here and below."""
    left_out: int
    mean_staleness: float
    """Versions made between a push's start and the update with it, on the average over its pushes."""
    version: int
    """That its last push went into; of the first fragment, as what follows."""
    got_version: int | None
    """That it has got last on this connection; None before that."""
    got_ago_s: float | None
    usual_norm: float | None
    """Of its pushes; None while it is new to the guard."""
    norm_limit: float | None
    """Over which a push is left out, by its own norms; others' may set a lower one."""
    refused_in_row: int
    """Pushes left out since one was let in."""
    leases: int
    """Chunks of data that it has."""
    heard_ago_s: float | None
    """None for one that is away."""


class ShardStatus(Record):
    """One shard."""

    name: str
    state: str
    """`ready`, `restoring`, `joining` or `away`."""
    endpoint: str
    versions: tuple[int, ...]
    """That it can restore; of the first fragment."""
    layers: int
    size_bytes: int
    """Of the parameters that it holds."""
    heard_ago_s: float | None
    """None for one that is away."""


class TransferStatus(Record):
    """A layer on its way."""

    way: str
    cluster: str
    worker: str
    layer: int
    shard: str
    size_bytes: int
    since_s: float


class LayerLinkStatus(Record):
    """What went between a cluster and a shard since the master started, as the master saw it: answers included."""

    cluster: str
    shard: str
    way: str
    layers: int
    size_bytes: int
    bytes_per_s: float
    """Of late; the last layers count most. Two at a time share the link, and each is counted as it was seen."""


class UpdateStatus(Record):
    """What the last update came to, since the master started."""

    version: int | None
    """None where all pushes were left out."""
    norm: float
    """Of the mean, before it was clipped."""
    scale: float
    """What it was multiplied by, to clip it."""
    part: float
    """Of a step of all clusters."""
    verdicts: Mapping[str, str]
    """By cluster: whether it took part, and why."""


class FragmentStatus(Record):
    """One fragment of the layers, where there are several."""

    version: int
    updates: int
    left_out: int
    layers: int
    size_bytes: int
    last_update: UpdateStatus | None


class ChunksStatus(Record):
    """The data that is leased."""

    chunks: int
    samples: int
    counted_samples: int
    """Over all passes."""
    passes: int | None
    leases: int
    finished: bool


class MasterStatus(Record):
    """All of it, at one moment."""

    address: str
    epoch: int
    """Starts of the master."""
    version: int
    """Of the first fragment; a model that is not in fragments is one."""
    seeded: bool
    """Whether there are parameters."""
    late_s: float | None
    """For how long there was no new version, where that is longer than by the last ones was to be expected."""
    waits_for: str
    """What keeps it; empty where none is late."""
    updates: int
    """Of whichever fragment."""
    left_out: int
    layers: int
    size_bytes: int
    """Of all parameters; 0 before a cluster has described the model."""
    clusters: tuple[ClusterStatus, ...]
    shards: tuple[ShardStatus, ...]
    transfers: tuple[TransferStatus, ...]
    links: tuple[LayerLinkStatus, ...]
    last_update: UpdateStatus | None
    """Of the first fragment."""
    fragments: tuple[FragmentStatus, ...]
    """Empty where all layers are exchanged at once."""
    chunks: ChunksStatus | None
    refusals: Mapping[str, int]
    """By reason, since the master started."""
    dropped: Mapping[str, int]
    """Events of what had ended, by sort, and commands for members that were not there."""
