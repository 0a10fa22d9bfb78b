"""A cluster's chunks of data: what it has on lease, what it handed out to its loop, and what it has trained on.

Di-PS, 4.2 (see `outer.policy.chunks`). Kept: chunks are leased by the master. Decided here: a cluster asks for its next
chunk before it needs it; what it trained on is told with its pushes, and a chunk is done when a push with all of it is
counted. Within a chunk samples come in an order drawn anew in each pass, the same in every cluster, so that another can
go on where one was lost.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from spantrain.core.outer.events import ChunkProgress, Lease

_AHEAD = 2
"""Chunks of which something is left, that a cluster has on lease where it can."""
_AGAIN_S = 1.0
"""After which it asks again, where no chunk was free."""
_SEEDS = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ChunkSpan:
    """Some of a chunk's samples, by their place in its order."""

    chunk: int
    data_pass: int
    begin: int
    end: int


@dataclass(kw_only=True)
class _HeldChunk:
    lease: Lease
    handed: int
    trained: int


class LeasedChunks:
    """What is on lease; not for several threads at once.

    >>> chunks = LeasedChunks()
    >>> chunks.hold(Lease(number=7, cluster="a", chunk=3, data_pass=0, begin=10, end=25))
    >>> chunks.hand_out(10), len(chunks.hand_out(10)), chunks.hand_out(10)
    ((ChunkSpan(chunk=3, data_pass=0, begin=10, end=20),), 1, ())
    >>> chunks.train(12)
    >>> chunks.progress
    (ChunkProgress(lease=7, upto=22),)
    """

    def __init__(self) -> None:
        self._held: dict[int, _HeldChunk] = {}
        self._asked_s: float | None = None
        self._again_s = 0.0
        self.finished = False
        """Whether all data is counted."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the leases, to register with."""
        return tuple(self._held)

    @property
    def asked(self) -> bool:
        """Whether an answer is to come."""
        return self._asked_s is not None

    def unanswered_s(self, now_s: float) -> float:
        """Return for how long an answer has been to come; 0 if none is."""
        return 0.0 if self._asked_s is None else now_s - self._asked_s

    @property
    def left(self) -> int:
        """Samples that can be handed out."""
        return sum(one.lease.end - one.handed for one in self._held.values())

    @property
    def untrained(self) -> int:
        """Samples that were handed out and not trained on."""
        return sum(one.handed - one.trained for one in self._held.values())

    @property
    def progress(self) -> tuple[ChunkProgress, ...]:
        """How far each chunk is trained on; none for one that nobody began."""
        begun = [one for one in self._held.values() if one.trained > one.lease.begin]
        return tuple(ChunkProgress(lease=one.lease.number, upto=one.trained) for one in begun)

    def ask(self, now_s: float) -> bool:
        """Whether to ask for a chunk now; an answer must come before the next."""
        fresh = sum(one.handed < one.lease.end for one in self._held.values())
        if self.asked or self.finished or fresh >= _AHEAD or now_s < self._again_s:
            return False
        self._asked_s = now_s
        return True

    def hold(self, lease: Lease) -> None:
        """Take a chunk that the master leased."""
        self._asked_s, self.finished = None, False
        self._held.setdefault(lease.number, _HeldChunk(lease=lease, handed=lease.begin, trained=lease.begin))

    def nothing(self, now_s: float, *, finished: bool) -> None:
        """Note that no chunk is free."""
        self._asked_s, self.finished = None, finished
        self._again_s = now_s + _AGAIN_S

    def connect(self) -> None:
        """Forget a question that an earlier connection may have lost."""
        self._asked_s, self._again_s = None, 0.0

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all leases but these: they are others' by now."""
        self._held = {number: one for number, one in self._held.items() if number in numbers}

    def hand_out(self, count: int) -> tuple[ChunkSpan, ...]:
        """Return up to so many samples, in the order of the leases."""
        spans: list[ChunkSpan] = []
        for one in self._held.values():
            taken = min(count, one.lease.end - one.handed)
            if taken:
                lease, begin = one.lease, one.handed
                spans.append(ChunkSpan(chunk=lease.chunk, data_pass=lease.data_pass, begin=begin, end=begin + taken))
                one.handed += taken
                count -= taken
        return tuple(spans)

    def train(self, samples: int | None) -> None:
        """Note that the next samples of those handed out were trained on; None for all of them."""
        for one in self._held.values():
            taken = one.handed - one.trained if samples is None else min(samples, one.handed - one.trained)
            one.trained += taken
            samples = samples if samples is None else samples - taken

    def count(self, progress: Iterable[ChunkProgress]) -> None:
        """Note that a push with this progress was counted: what is done is no longer on lease."""
        for told in progress:
            one = self._held.get(told.lease)
            if one and told.upto == one.lease.end:
                del self._held[told.lease]


class ChunkOrder:
    """Which samples of the data set a chunk's places are.

    >>> ChunkOrder(100, 4, seed=None).indices((ChunkSpan(chunk=1, data_pass=0, begin=20, end=25),))
    [45, 46, 47, 48, 49]
    >>> shuffled = ChunkOrder(100, 4, seed=0).indices((ChunkSpan(chunk=1, data_pass=0, begin=0, end=25),))
    >>> shuffled == sorted(shuffled), sorted(shuffled) == list(range(25, 50))
    (False, True)
    """

    def __init__(self, samples: int, chunks: int, *, seed: int | None) -> None:
        """Cut as the master does (`ChunkState.of`); without a seed samples come as they stand."""
        self._samples, self._chunks, self._seed = samples, chunks, seed
        self._orders: dict[tuple[int, int], list[int]] = {}

    def indices(self, spans: Iterable[ChunkSpan]) -> list[int]:
        """Return samples of the data set."""
        return [index for span in spans for index in self._order(span.chunk, span.data_pass)[span.begin : span.end]]

    def _order(self, chunk: int, data_pass: int) -> list[int]:
        if (chunk, data_pass) not in self._orders:
            while len(self._orders) > _AHEAD:
                del self._orders[next(iter(self._orders))]
            self._orders[chunk, data_pass] = self._drawn(chunk, data_pass)
        return self._orders[chunk, data_pass]

    def _drawn(self, chunk: int, data_pass: int) -> list[int]:
        first, end = (self._samples * k // self._chunks for k in (chunk, chunk + 1))
        if self._seed is None:
            return list(range(first, end))
        chance = torch.Generator().manual_seed(((self._seed << 20) + data_pass << 24) + chunk & _SEEDS)
        return [first + place for place in torch.randperm(end - first, generator=chance).tolist()]
