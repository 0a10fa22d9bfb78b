"""How fast layers go between clusters and shards, as the master sees it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from spantrain.core.outer.events import LayerTransfer, TransferWay
from spantrain.outer.master.status import LayerLinkStatus, TransferStatus

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
    >>> layer = Transfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard="s0", size_bytes=600)
    >>> clock = TransferClock()
    >>> clock.begun(1.0, Way.PUSH, layer); clock.arrived(4.0, Way.PUSH, layer)
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
