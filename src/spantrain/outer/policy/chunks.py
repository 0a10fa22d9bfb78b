"""Who trains on which chunk of the data: leases that are renewed, run out, are given to others; what a cluster holds.

Di-PS, 4.2: the data set is cut into many more chunks than there are clusters. Kept: that. Decided here: a cluster has a
chunk on lease; its samples count when an update with the cluster's push is decided, as far as the push says. When a
lease runs out or its cluster is lost, the rest of the chunk, from the first sample that was not counted, is leased to
another, before chunks that nobody began. So every sample counts once in a pass over the data, whoever trained on it;
what a lost cluster trained on and never pushed is trained again. So is what is left of a chunk in which its cluster
came no further for long, where another has nothing to train on: a sign of life alone keeps no data from the others.
A cluster asks for its next chunk before it needs it; what it trained on is told with its pushes, and a chunk is done
when a push with all of it is counted.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from spantrain.core.outer.events import ChunkProgress, Lease
from spantrain.core.records import Record


class ChunkState(Record):
    """What is kept over a restart of the master; can be written as JSON.

    Nearly even chunks, and how far each is counted: as little as is on lease, however many chunks there are.
    """

    samples: int
    chunks: int
    runs: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    """Chunks that are counted alike: the first of them, whole passes, samples of the next."""
    leases: tuple[Lease, ...] = ()
    next_lease: int = 0
    passes: int | None = None
    """Over the data; None for no end."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= self.samples:
            raise ValueError(f"chunks must be from 1 to the number of samples {self.samples}, got {self.chunks}")
        wrong = any(k >= end or whole < 0 or not 0 <= more < self.size(k) for k, end, whole, more in self.spans)
        if not self.runs or self.runs[0][0] or wrong:
            raise ValueError(f"runs must rise from chunk 0, and count whole passes and a part of one, got {self.runs}")
        leased = {lease.chunk for lease in self.leases}
        if len(leased) < len(self.leases) or max(leased, default=0) >= self.chunks:
            raise ValueError(f"leases must be of the {self.chunks} chunks, each on one at most, got {self.leases}")
        if self.passes is not None and self.passes < 1:
            raise ValueError(f"passes must be at least 1 or null, got {self.passes}")

    def size(self, first: int, end: int = 0) -> int:
        """Return the samples of a chunk, or of those before `end`."""
        return self.samples * (end or first + 1) // self.chunks - self.samples * first // self.chunks

    @property
    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Each run: its first chunk, the one after its last, whole passes, samples of the next."""
        for (first, whole, more), (end, _, _) in pairwise([*self.runs, (self.chunks, 0, 0)]):
            yield first, end, whole, more

    @property
    def counted(self) -> int:
        """Samples, over all passes."""
        return sum(whole * self.size(first, end) + more * (end - first) for first, end, whole, more in self.spans)

    @property
    def finished(self) -> bool:
        """Whether all passes are counted."""
        return self.passes is not None and all(whole >= self.passes for _, whole, _ in self.runs)

    def at(self, chunk: int) -> tuple[int, int]:
        """Return how far a chunk is counted: whole passes, and samples of the next."""
        return next((whole, more) for first, whole, more in reversed(self.runs) if first <= chunk)

    def with_counted(self, chunk: int, upto: tuple[int, int]) -> "ChunkState":
        """Return the same with a chunk counted so far, as `at` tells it."""
        after = {chunk + 1: self.at(chunk + 1)} if chunk + 1 < self.chunks else {}
        marks = {first: (whole, more) for first, whole, more in self.runs} | after | {chunk: upto}
        runs = tuple((k, *marks[k]) for before, k in pairwise([-1, *sorted(marks)]) if marks.get(before) != marks[k])
        return replace(self, runs=runs)

    def with_passes(self, passes: int | None) -> "ChunkState":
        """Return the same with so many passes.

        Raises:
            ValueError: more have begun: something is counted or on lease of them.
        """
        begun = max(
            [*(whole + (more > 0) for _, whole, more in self.runs), *(one.data_pass + 1 for one in self.leases)]
        )
        if passes is not None and passes < begun:
            raise ValueError(f"{begun} passes over the data have begun, more than `passes: {passes}`")
        return replace(self, passes=passes)


class ChunkLedger:
    """Leases chunks and counts their samples.

    >>> ledger = ChunkLedger(ChunkState(samples=100, chunks=4, passes=1), lease_s=60.0, now_s=0.0)
    >>> first = ledger.lease(0.0, "a")
    >>> first.chunk, first.begin, first.end
    (0, 0, 25)
    >>> ledger.report(1.0, "a", first.number, 10)
    10
    >>> _ = ledger.end(ledger.of("a"))
    >>> again = ledger.lease(2.0, "b")
    >>> again.chunk, again.begin
    (0, 10)
    """

    def __init__(self, state: ChunkState, *, lease_s: float, now_s: float) -> None:
        """Go on from a state; leases in it are renewed, since its clock was another's."""
        self.state = state
        """What to keep."""
        self._lease_s = lease_s
        self._ends_s = {lease.number: now_s + lease_s for lease in state.leases}
        self._came_s = {lease.number: now_s for lease in state.leases}
        """When something of each was counted last, or since when it is on lease."""

    @property
    def next_end_s(self) -> float | None:
        """When the next lease runs out."""
        return min(self._ends_s.values(), default=None)

    def lease(self, now_s: float, cluster: str) -> Lease | None:
        """Lease the next chunk: of the earliest pass, begun ones first; None if all that is left is on lease."""
        state = self.state
        taken = {lease.chunk for lease in state.leases}
        free = [
            (whole, not more, chunk)
            for first, end, whole, more in state.spans
            for chunk in islice((one for one in range(first, end) if one not in taken), 1)
            if state.passes is None or whole < state.passes
        ]
        if not free:
            return None
        data_pass, _, chunk = min(free)
        lease = Lease(
            number=state.next_lease,
            cluster=cluster,
            chunk=chunk,
            data_pass=data_pass,
            begin=state.at(chunk)[1],
            end=state.size(chunk),
        )
        self.state = replace(state, leases=(*state.leases, lease), next_lease=lease.number + 1)
        self._ends_s[lease.number], self._came_s[lease.number] = now_s + self._lease_s, now_s
        return lease

    def take_back(
        self, now_s: float, patience_s: Callable[[str], float], *, but: Collection[int] = ()
    ) -> tuple[Lease, ...]:
        """End the lease in which its cluster came no further for the longest time; return it, if that is too long.

        `patience_s`: for how long a cluster may push nothing; no less than a lease lasts.
        """
        state, came_s = self.state, self._came_s
        late = [
            one for one in state.leases
            if one.number not in but and now_s - came_s[one.number] >= max(self._lease_s, patience_s(one.cluster))
        ]  # fmt: skip
        return self.end([min(late, key=lambda one: (came_s[one.number], one.number)).number]) if late else ()

    def renew(self, now_s: float, cluster: str) -> None:
        """Renew all that a cluster has on lease."""
        for number in self.of(cluster):
            self._ends_s[number] = now_s + self._lease_s

    def report(self, now_s: float, cluster: str, number: int, upto: int) -> int:
        """Count a chunk's samples before `upto`, and return how many that were.

        Those that were counted before do not count again; nothing does of a lease that is another's or no longer there,
        or where `upto` is not in it.
        """
        lease = next((lease for lease in self.state.leases if lease.number == number), None)
        if lease is None or lease.cluster != cluster or not lease.begin <= upto <= lease.end:
            return 0
        before = self.state.at(lease.chunk)
        told = (lease.data_pass, upto) if upto < lease.end else (lease.data_pass + 1, 0)
        self._ends_s[number] = now_s + self._lease_s
        if told > before:
            self.state = self.state.with_counted(lease.chunk, told)
            self._came_s[number] = now_s
        if upto == lease.end:
            self.end([number])
        return max(0, (told[0] - before[0]) * lease.end + told[1] - before[1])

    def of(self, cluster: str) -> frozenset[int]:
        """Return the numbers of a cluster's leases."""
        return frozenset(lease.number for lease in self.state.leases if lease.cluster == cluster)

    def end(self, numbers: Collection[int]) -> tuple[Lease, ...]:
        """End leases; return those of them that were there. What is left of their chunks is free."""
        ended = tuple(lease for lease in self.state.leases if lease.number in numbers)
        for lease in ended:
            del self._ends_s[lease.number], self._came_s[lease.number]
        self.state = replace(self.state, leases=tuple(one for one in self.state.leases if one.number not in numbers))
        return ended

    def expire(self, now_s: float, *, but: Collection[int] = ()) -> tuple[Lease, ...]:
        """End leases that were not renewed in time, but for some; return them."""
        late = [number for number, end_s in self._ends_s.items() if end_s <= now_s and number not in but]
        return self.end(late)


_AHEAD = 2
"""Chunks of which something is left, that a cluster has on lease where it can."""
_AGAIN_S = 1.0
"""After which it asks again, where no chunk was free."""


class ChunkSpan(Record):
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
    """What a cluster has on lease, handed out to its loop, and trained on; not for several threads at once.

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
        self.wanted = 1
        """Samples to have at hand, in however many chunks."""

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
        if self.asked or self.finished or now_s < self._again_s or (fresh >= _AHEAD and self.left >= self.wanted):
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
        left = self.untrained if samples is None else samples
        for one in self._held.values():
            taken = min(left, one.handed - one.trained)
            one.trained += taken
            left -= taken

    def count(self, progress: Iterable[ChunkProgress]) -> None:
        """Note that a push with this progress was counted: what is done is no longer on lease."""
        for told in progress:
            one = self._held.get(told.lease)
            if one and told.upto == one.lease.end:
                del self._held[told.lease]
