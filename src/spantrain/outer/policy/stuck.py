"""Which shards answer the master and move no layers: their process is to be ended, and started again.

Di-PS, 4.2, takes a server that gives signs of life for one that works. Decided here: signs of life come by one thread
and layers by another, so a shard is judged by its layers. A cluster speaks against a shard from the first layer that
did not get through to the next one that did; but not where another shard's layers do not get through to it either, and
none did meanwhile: then its own line may be what is broken. A shard is stuck when more than half of the clusters that
have tried, and two of them where two train, have spoken against it for as long as a member may be silent.
"""

from collections.abc import Collection

from spantrain.core.outer.events import LayerTransfer


class StuckShards:
    """Hears of layers that got through, and of those that did not.

    >>> stuck = StuckShards(["s0", "s1"], patience_s=10.0)
    >>> from spantrain.core.outer.events import Ticket
    >>> def layer(shard):
    ...     return Transfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard=shard, size_bytes=8)
    >>> stuck.failed(0.0, layer("s1")); stuck.moved(layer("s0"))
    >>> stuck.at(9.0, ["a"], 1), [name for name, _ in stuck.at(10.0, ["a"], 1)]
    ([], ['s1'])
    """

    def __init__(self, shards: Collection[str], *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._tried: dict[str, dict[str, float | None]] = {shard: {} for shard in shards}
        """By shard and cluster: since when no layer got through; None where the last one did."""
        self._elsewhere: set[tuple[str, str]] = set()
        """Shards and clusters whose layers got through at another shard since then."""

    def moved(self, transfer: LayerTransfer) -> None:
        """Note a layer that got through, wanted or not."""
        cluster = transfer.cluster
        if transfer.shard not in self._tried:
            return
        self._tried[transfer.shard][cluster] = None
        self._elsewhere.discard((transfer.shard, cluster))
        self._elsewhere |= {(shard, cluster) for shard, tried in self._tried.items() if tried.get(cluster) is not None}

    def failed(self, now_s: float, transfer: LayerTransfer) -> None:
        """Note a layer that did not."""
        tried = self._tried[transfer.shard]
        if tried.get(transfer.cluster) is None:
            tried[transfer.cluster] = now_s

    def forget(self, shard: str) -> None:
        """Begin anew with a shard that is lost."""
        self._tried[shard].clear()
        self._elsewhere = {one for one in self._elsewhere if one[0] != shard}

    def at(self, now_s: float, clusters: Collection[str], trains: int) -> list[tuple[str, str]]:
        """Return the shards that are stuck, each with the reason.

        `clusters`: those that are registered; `trains`: how many of them do.
        """
        found = ((shard, self._why(now_s, shard, clusters, trains)) for shard in self._tried)
        return [(shard, why) for shard, why in found if why]

    def _why(self, now_s: float, shard: str, clusters: Collection[str], trains: int) -> str:
        tried = {name: since_s for name, since_s in self._tried[shard].items() if name in clusters}
        against = sorted(
            (since_s, name) for name, since_s in tried.items()
            if since_s is not None and self._counts(shard, name)
        )  # fmt: skip
        needed = max(min(2, trains), len(tried) // 2 + 1)
        if len(against) < needed:
            return ""
        waited_s = now_s - against[needed - 1][0]
        who = ", ".join(sorted(name for _, name in against))
        told = f"it answers, but for {waited_s:.3g} s no layer got through between it and {who}"
        return told if waited_s >= self._patience_s else ""

    def _counts(self, shard: str, cluster: str) -> bool:
        others = (tried.get(cluster) for name, tried in self._tried.items() if name != shard)
        return (shard, cluster) in self._elsewhere or all(since_s is None for since_s in others)
