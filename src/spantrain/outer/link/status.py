"""What a master tells of itself: who is there, how far each is, how fast layers go, what was refused."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spantrain.core.outer.events import LayerTransfer, TransferWay
from spantrain.outer.link.codec import encode_value


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
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


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
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


@dataclass(frozen=True, kw_only=True)
class TransferStatus:
    """A layer on its way."""

    way: str
    cluster: str
    worker: str
    layer: int
    shard: str
    size_bytes: int
    since_s: float


@dataclass(frozen=True, kw_only=True)
class LayerLinkStatus:
    """What went between a cluster and a shard since the master started, as the master saw it: answers included."""

    cluster: str
    shard: str
    way: str
    layers: int
    size_bytes: int
    bytes_per_s: float
    """Of late; the last layers count most. Two at a time share the link, and each is counted as it was seen."""


@dataclass(frozen=True, kw_only=True)
class UpdateStatus:
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


@dataclass(frozen=True, kw_only=True)
class FragmentStatus:
    """One fragment of the layers, where there are several."""

    version: int
    updates: int
    left_out: int
    layers: int
    size_bytes: int
    last_update: UpdateStatus | None


@dataclass(frozen=True, kw_only=True)
class ChunksStatus:
    """The data that is leased."""

    chunks: int
    samples: int
    counted_samples: int
    """Over all passes."""
    passes: int | None
    leases: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class MasterStatus:
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

    def to_plain(self) -> dict[str, Any]:
        """Return it as objects, lists and plain values."""
        plain: dict[str, Any] = encode_value(self)
        return plain


_MEMORY = 0.8
"""What the past weighs against each new layer."""


@dataclass(kw_only=True)
class _LinkTotals:
    layers: int = 0
    size_bytes: int = 0
    weighed_bytes: float = 0.0
    weighed_s: float = 0.0


class TransferClock:
    """Notes when transfers begin and end.

    >>> from spantrain.core.outer.events import Ticket
    >>> layer = LayerTransfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard="s0", size_bytes=600)
    >>> clock = TransferClock()
    >>> clock.begun(1.0, TransferWay.PUSH, layer); clock.arrived(4.0, TransferWay.PUSH, layer)
    >>> clock.links[0].bytes_per_s
    200.0
    """

    def __init__(self) -> None:
        self._begun_s: dict[tuple[TransferWay, LayerTransfer], float] = {}
        self._links: dict[tuple[str, str, str], _LinkTotals] = {}

    def begun(self, now_s: float, way: TransferWay, transfer: LayerTransfer) -> None:
        """Note that both ends are told to move a layer."""
        self._begun_s[way, transfer] = now_s

    def arrived(self, now_s: float, way: TransferWay, transfer: LayerTransfer) -> None:
        """Note that its receiver has it."""
        begun_s = self._begun_s.pop((way, transfer), None)
        if begun_s is None:
            return
        link = self._links.setdefault((transfer.cluster, transfer.shard, way.value), _LinkTotals())
        link.layers += 1
        link.size_bytes += transfer.size_bytes
        link.weighed_bytes = _MEMORY * link.weighed_bytes + transfer.size_bytes
        link.weighed_s = _MEMORY * link.weighed_s + now_s - begun_s

    def keep(self, moving: Collection[tuple[TransferWay, LayerTransfer]]) -> None:
        """Forget those that have ended without arriving: all but these."""
        self._begun_s = {one: begun_s for one, begun_s in self._begun_s.items() if one in moving}

    def moving(self, now_s: float, layer_of: Callable[[LayerTransfer], int]) -> tuple[TransferStatus, ...]:
        """Return the layers on their way; `layer_of` says which of the model each is."""
        return tuple(
            TransferStatus(
                way=way.value,
                cluster=one.cluster,
                worker=one.worker,
                layer=layer_of(one),
                shard=one.shard,
                size_bytes=one.size_bytes,
                since_s=now_s - begun_s,
            )
            for (way, one), begun_s in self._begun_s.items()
        )

    @property
    def links(self) -> tuple[LayerLinkStatus, ...]:
        """What went over each link, by cluster, shard and way."""
        return tuple(
            LayerLinkStatus(
                cluster=cluster,
                shard=shard,
                way=way,
                layers=link.layers,
                size_bytes=link.size_bytes,
                bytes_per_s=link.weighed_bytes / link.weighed_s if link.weighed_s > 0 else 0.0,
            )
            for (cluster, shard, way), link in sorted(self._links.items())
        )
