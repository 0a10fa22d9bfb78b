"""Batches of samples from chunks that the master leases: each process of a cluster gets its part of each batch.

Di-PS, 4.2. Kept: data comes in leased chunks. Decided here: a cluster that has nothing on lease because the master is
away trains on samples drawn from all of the data, which do not count: its steps never stop. One that waits for data
while others have the rest gives what it has learned first, so that nobody waits for it in turn. Within a chunk samples
come in an order drawn anew in each pass, the same in every cluster, so that another can go on where one was lost.
"""

import time
from collections.abc import Iterable, Iterator
from enum import IntEnum

import torch

from spantrain.errors import UsageError
from spantrain.outer.client.rounds import FragmentRounds
from spantrain.outer.policy.chunks import ChunkSpan

_POLL_S = 0.1
_SEEDS = 2**63 - 1
_KEPT_ORDERS = 3
"""Of chunks: those that a cluster has on lease, and one that goes on from another."""


class ChunkOrder:
    """Which samples of the data set a chunk's places are.

    >>> ChunkOrder(100, 4, seed=None).indices((ChunkSpan(chunk=1, data_pass=0, begin=20, end=25),))
    [45, 46, 47, 48, 49]
    >>> shuffled = ChunkOrder(100, 4, seed=0).indices((ChunkSpan(chunk=1, data_pass=0, begin=0, end=25),))
    >>> shuffled == sorted(shuffled), sorted(shuffled) == list(range(25, 50))
    (False, True)
    """

    def __init__(self, samples: int, chunks: int, *, seed: int | None) -> None:
        """Cut as the master does (`ChunkState`); without a seed samples come as they stand."""
        self._samples, self._chunks, self._seed = samples, chunks, seed
        self._orders: dict[tuple[int, int], list[int]] = {}

    def indices(self, spans: Iterable[ChunkSpan]) -> list[int]:
        """Return samples of the data set."""
        return [index for span in spans for index in self._order(span.chunk, span.data_pass)[span.begin : span.end]]

    def _order(self, chunk: int, data_pass: int) -> list[int]:
        if (chunk, data_pass) not in self._orders:
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            first, end = (self._samples * k // self._chunks for k in (chunk, chunk + 1))
            order = list(range(first, end))
            if self._seed is not None:
                chance = torch.Generator().manual_seed(((self._seed << 20) + data_pass << 24) + chunk & _SEEDS)
                order = [first + place for place in torch.randperm(end - first, generator=chance).tolist()]
            self._orders[chunk, data_pass] = order
        return self._orders[chunk, data_pass]


class _Next(IntEnum):
    LEASED = 0
    UNCOUNTED = 1
    WAIT = 2
    END = 3
    NO_DATA = 4


class LeasedBatches:
    """Iterate over lists of indices into the data set; ends when all passes over the data are counted.

    Of several processes each gets as many; a batch that does not divide is filled up from its own beginning. A loader
    that fetches ahead also comes to an end where the rest of the data is leased to others: what it fetched must be
    trained on first. It may begin again, until `finished`.
    """

    def __init__(
        self, samples: int, batch_samples: int, *, seed: int | None, rounds: FragmentRounds, patience_s: float
    ) -> None:
        """Lease nothing yet; `patience_s`: for how long a master must be away until a cluster with no data goes on.

        Raises:
            UsageError: there are no samples.
        """
        if samples < 1 or batch_samples < 1:
            raise UsageError(f"samples and batch_samples must be at least 1, got {samples} and {batch_samples}")
        self._rounds, self._ranks, self._session, self._meter = rounds, rounds.ranks, rounds.session, rounds.meter
        self._samples, self._batch, self._seed = samples, batch_samples * rounds.ranks.size, seed
        self._patience_s = patience_s
        self._order: ChunkOrder | None = None
        self._chance = torch.Generator().manual_seed(seed or 0)

    def __iter__(self) -> Iterator[list[int]]:
        """Return batches, until the data is counted.

        Raises:
            UsageError: the master leases no data, or of another length.
        """
        while True:
            with self._meter.blocked():
                batch = self._next()
            if batch is None:
                return
            yield batch

    @property
    def finished(self) -> bool:
        """Whether all data is counted, as far as the first process knows."""
        return self._session is not None and self._session.chunks.finished

    def _next(self) -> list[int] | None:
        while True:
            what, count = self._ranks.agree(self._decide() if self._session else (0, 0))
            if what in (_Next.LEASED, _Next.UNCOUNTED):
                return self._shared(what, count)
            if what == _Next.END:
                return None
            if what == _Next.NO_DATA:
                raise UsageError(
                    f"the master does not lease data of {self._samples} samples; give its configuration as many, or "
                    "bring batches of your own"
                )
            self._wait()

    def _decide(self) -> tuple[int, int]:
        assert self._session
        leading = self._session.sessions[0]
        leading.chunks.wanted = 2 * self._batch
        leading.ask_for_chunks()
        with self._session.changed:
            welcome, chunks, here = leading.data, leading.chunks, leading.registered
            if welcome and welcome.samples != self._samples:
                return _Next.NO_DATA, 0
            if chunks.left >= self._batch or (chunks.left and not (here and chunks.asked)):
                return _Next.LEASED, min(chunks.left, self._batch)
            # Whoever fetches ahead trains on what it has only when it need not wait here.
            nothing_free = here and not chunks.asked and chunks.untrained > 0
            if chunks.finished or nothing_free:
                return _Next.END, 0
            return (_Next.UNCOUNTED, self._batch) if leading.missed_s >= self._patience_s else (_Next.WAIT, 0)

    def _shared(self, what: int, count: int) -> list[int]:
        """Return this process's part of a batch that the first process makes."""
        if self._session is None:
            batch = torch.empty(count, dtype=torch.int64)
        elif what == _Next.LEASED:
            batch = torch.tensor(self._leased(count))
        else:
            self._meter.uncounted_samples += count
            batch = torch.randint(self._samples, (count,), generator=self._chance)
        self._ranks.share(batch)
        indices = batch.tolist()
        indices = (indices * self._ranks.size)[: -(-len(indices) // self._ranks.size) * self._ranks.size]
        return indices[self._ranks.rank :: self._ranks.size]

    def _leased(self, count: int) -> list[int]:
        assert self._session
        with self._session.changed:
            spans, welcome = self._session.chunks.hand_out(count), self._session.sessions[0].data
            assert welcome
            chunks = welcome.chunks
        if self._order is None:
            self._order = ChunkOrder(self._samples, chunks, seed=self._seed)
        return self._order.indices(spans)

    def _wait(self) -> None:
        begun_s = time.monotonic()
        heard = self._session.heard if self._session else 0
        self._rounds.look(everything=True)
        if self._session:
            self._session.wait(heard, _POLL_S)
        self._meter.data_wait_s += time.monotonic() - begun_s
