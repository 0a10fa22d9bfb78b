"""Which layer goes next between which worker and which shard, so that no shard is crowded while another idles.

Di-PS, 3.1 and figure 5. Kept: the master orders transfers by the layer, within a cluster and over clusters, so that at
any time different workers talk to different shards; with more workers than shards the workers take turns (case a), with
fewer each goes round the shards, beginning at different ones (case b). Decided here, where the paper shows two
pictures: workers and shards have as many transfers at a time as they have slots. Whenever one of them becomes free,
pairs are matched anew: those with the most bytes still to move first, then as many others as can be. So no worker and
shard with a layer between them both wait, and with one slot each, layers of one size take no more turns than the
busiest worker or shard has layers (the colouring of a bipartite graph, by Koenig's theorem). Second slots are filled
only when no more first ones can be: a layer that waits at both ends hides the master's answer to the end of the one
before it. A layer that takes `_SLOW` times as long as layers of late keeps its worker's slot, and its shard's no
longer: it uses next to nothing of the shard's line, and whoever sends none of it would keep all others away. A cluster
whose last layer was slow or did not arrive comes after the others, for as long as that is so.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from spantrain.core.outer.events import LayerTransfer, Ticket

_Worker = tuple[str, str]
"""Cluster, and worker in it."""
_Slot = tuple[str, int]
_One = TypeVar("_One")
_Other = TypeVar("_Other")
_SLOW = 8
_LAST = 2**62
_ARRIVALS = 32
"""Layers that tell how fast layers are."""
_MEMORY = 0.8
"""What the past of a link weighs against each new layer."""


@dataclass(kw_only=True)
class LinkTotals:
    """What went between a cluster and a shard, as the master saw it: answers included.

    >>> link = LinkTotals()
    >>> link.add(600, 3.0)
    >>> link.bytes_per_s
    200.0
    """

    layers: int = 0
    size_bytes: int = 0
    weighed_bytes: float = 0.0
    weighed_s: float = 0.0

    def add(self, size_bytes: int, took_s: float) -> None:
        """Count a layer."""
        self.layers += 1
        self.size_bytes += size_bytes
        self.weighed_bytes = _MEMORY * self.weighed_bytes + size_bytes
        self.weighed_s = _MEMORY * self.weighed_s + took_s

    @property
    def bytes_per_s(self) -> float:
        """Of late: the last layers count most."""
        return self.weighed_bytes / self.weighed_s if self.weighed_s > 0 else 0.0


class TransferSchedule:
    """Transfers of one way that wait or are under way.

    >>> from spantrain.core.outer.events import Ticket, LayerTransfer
    >>> def layer(worker, number, shard):
    ...     return LayerTransfer(
    ...         ticket=Ticket(0, 0), cluster="a", worker=worker, layer=number, shard=shard, size_bytes=8)
    >>> schedule = TransferSchedule({"s0": 1, "s1": 1}, patience_s=10.0)
    >>> schedule.add([layer("w0", 0, "s0"), layer("w0", 2, "s1"), layer("w1", 1, "s0"), layer("w1", 3, "s1")])
    >>> begun = schedule.begin(0.0)
    >>> [(move.worker, move.shard) for move in begun]
    [('w0', 's1'), ('w1', 's0')]
    >>> for move in begun:
    ...     _ = schedule.end(1.0, move)
    >>> [(move.worker, move.shard) for move in schedule.begin(1.0)]
    [('w0', 's0'), ('w1', 's1')]
    """

    def __init__(self, slots: Mapping[str, int], worker_slots: int = 1, *, patience_s: float) -> None:
        """Begin with nothing to move; the slots say how many transfers each shard, and any worker, has at once.

        `patience_s`: after which a layer is slow, before any has arrived; none is in an eighth of it.
        """
        if any(count < 1 for count in (*slots.values(), worker_slots)):
            raise ValueError(f"each shard and worker needs a slot at least, got {dict(slots)} and {worker_slots}")
        self._slots = dict(slots)
        self._worker_slots = worker_slots
        self._waiting: dict[tuple[_Worker, str], deque[LayerTransfer]] = {}
        self.running: dict[LayerTransfer, float] = {}
        """Those under way, to look at, and when each began."""
        self.links: dict[tuple[str, str], LinkTotals] = defaultdict(LinkTotals)
        """What has arrived, by cluster and shard."""
        self._slow: set[LayerTransfer] = set()
        """Of these, whose shards others may use too."""
        self._unsure: set[str] = set()
        """Clusters whose last layer was slow or did not arrive."""
        self._patience_s = patience_s
        self._arrived: deque[tuple[float, int]] = deque(maxlen=_ARRIVALS)
        """Seconds and bytes of the last layers that were not slow."""

    @property
    def slow_s(self) -> float | None:
        """When the next transfer under way is slow, where that lets others begin."""
        awaited = {shard for _, shard in self._waiting}
        quick = (one for one in self.running if one.shard in awaited and one not in self._slow)
        return min((self.running[one] + self._limit_s(one.size_bytes) for one in quick), default=None)

    def _limit_s(self, size_bytes: int) -> float:
        """Return after how long a layer is slow."""
        if not self._arrived:
            return self._patience_s
        took_s = sum(seconds for seconds, _ in self._arrived)
        arrived_bytes = sum(arrived for _, arrived in self._arrived)
        usual = max(1.0, size_bytes * len(self._arrived) / arrived_bytes)
        return max(self._patience_s / _SLOW, _SLOW * usual * took_s / len(self._arrived))

    def add(self, transfers: Iterable[LayerTransfer]) -> None:
        """Put transfers in line; between a worker and a shard they go in this order."""
        for transfer in transfers:
            self._waiting.setdefault((_worker(transfer), transfer.shard), deque()).append(transfer)

    def end(self, now_s: float, transfer: LayerTransfer) -> bool:
        """Note that one has arrived; return whether it was under way."""
        if transfer not in self.running:
            return False
        self._note_slow(now_s)
        took_s, size_bytes = now_s - self.running.pop(transfer), transfer.size_bytes
        self.links[transfer.cluster, transfer.shard].add(size_bytes, took_s)
        if transfer not in self._slow:
            self._arrived.append((took_s, size_bytes))
            self._unsure.discard(transfer.cluster)
        self._slow.discard(transfer)
        return True

    def _note_slow(self, now_s: float) -> None:
        late = {one for one, begun_s in self.running.items() if now_s - begun_s >= self._limit_s(one.size_bytes)}
        self._slow |= late
        self._unsure |= {one.cluster for one in late}

    def drop(self, ticket: Ticket) -> None:
        """Take out all of a push or a pull, whether waiting or under way."""
        self._unsure |= {one.cluster for one in self.running if one.ticket == ticket}
        self.running = {one: begun_s for one, begun_s in self.running.items() if one.ticket != ticket}
        self._slow &= self.running.keys()
        kept = {pair: deque(one for one in line if one.ticket != ticket) for pair, line in self._waiting.items()}
        self._waiting = {pair: line for pair, line in kept.items() if line}

    def begin(self, now_s: float) -> tuple[LayerTransfer, ...]:
        """Return the transfers to begin now, first slots first, then by worker; they are under way from here on."""
        self._note_slow(now_s)
        begun: list[LayerTransfer] = []
        for level in range(1, max(self._worker_slots, *self._slots.values()) + 1):
            while more := self._match(now_s, level):
                begun += more
        return tuple(begun)

    def _match(self, now_s: float, level: int) -> tuple[LayerTransfer, ...]:
        """Begin what can be where workers and shards have no more than `level` slots; one for each worker."""
        left_of_workers, left_of_shards = Counter[_Worker](), Counter[str]()
        for (worker, shard), line in self._waiting.items():
            size_bytes = sum(transfer.size_bytes for transfer in line)
            left_of_workers[worker] += size_bytes
            left_of_shards[shard] += size_bytes
        busy_workers = Counter(_worker(transfer) for transfer in self.running)
        busy_slots = Counter(transfer.shard for transfer in self.running if transfer not in self._slow)
        pairs: dict[_Worker, list[_Slot]] = defaultdict(list)
        for worker, shard in self._waiting:
            if busy_workers[worker] < min(level, self._worker_slots):
                pairs[worker] += [(shard, k) for k in range(busy_slots[shard], min(level, self._slots[shard]))]
        weights = {slot: left_of_shards[slot[0]] for slots in pairs.values() for slot in slots}
        ranks = {worker: left_of_workers[worker] - _LAST * (worker[0] in self._unsure) for worker in pairs}
        chosen = matched(pairs, left_weights=ranks, right_weights=weights)
        begun = tuple(self._waiting[worker, shard].popleft() for worker, (shard, _) in sorted(chosen.items()))
        self._waiting = {pair: line for pair, line in self._waiting.items() if line}
        self.running.update(dict.fromkeys(begun, now_s))
        return begun


def _worker(transfer: LayerTransfer) -> _Worker:
    return transfer.cluster, transfer.worker


def matched(
    pairs: Mapping[_Worker, list[_Slot]], *, left_weights: Mapping[_Worker, float], right_weights: Mapping[_Slot, float]
) -> dict[_Worker, _Slot]:
    """Return a matching with as many pairs as can be; on both sides the heaviest that can be matched together are.

    >>> matched({("a", "w"): [("s", 0), ("t", 0)], ("b", "w"): [("s", 0)]},
    ...     left_weights={("a", "w"): 2.0, ("b", "w"): 1.0}, right_weights={("s", 0): 1.0, ("t", 0): 1.0})
    {('a', 'w'): ('t', 0), ('b', 'w'): ('s', 0)}
    """
    slot_of: dict[_Worker, _Slot] = {}
    worker_of: dict[_Slot, _Worker] = {}
    workers: dict[_Slot, list[_Worker]] = defaultdict(list)
    for worker, slots in pairs.items():
        for slot in slots:
            workers[slot].append(worker)
    for worker in sorted(pairs, key=lambda worker: (-left_weights[worker], worker)):
        _cover(worker, pairs, slot_of, worker_of, settled=pairs.keys(), seen=set())
    settled: set[_Slot] = set()
    for slot in sorted(right_weights, key=lambda slot: (-right_weights[slot], slot)):
        if slot not in worker_of:
            _cover(slot, workers, worker_of, slot_of, settled=settled, seen=set())
        settled.add(slot)
    return dict(sorted(slot_of.items()))


def _cover(
    one: _One, others: Mapping[_One, list[_Other]], matches: dict[_One, _Other], back: dict[_Other, _One], *,
    settled: Collection[_One], seen: set[_Other],
) -> bool:  # fmt: skip
    """Match one by an alternating path, if need be in the place of one that is not settled.

    The same of the other side stay matched, if perhaps with another. Return whether it is matched; `others`: that each
    can be matched with, `seen`: those of them tried so far.
    """
    for other in others[one]:
        if other in seen:
            continue
        seen.add(other)
        before = back.get(other)
        if before is None or before not in settled or _cover(before, others, matches, back, settled=settled, seen=seen):
            if before is not None and matches.get(before) == other:
                del matches[before]
            matches[one], back[other] = other, one
            return True
    return False
