"""What a cluster's outer optimizer did, and where its time went."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

_REASONS = 50
"""Different reasons that are counted; further ones count as `other reasons`."""


@dataclass(frozen=True, kw_only=True)
class OuterMetrics:
    """Counts and seconds since the start; of a cluster of several processes, the first knows all of them."""

    tokens: int = 0
    """Trained on here, by all processes as far as they were pushed."""
    inner_steps: int = 0
    outer_rounds: int = 0
    """Pushes that were taken into an update; of a model in fragments those of each."""
    mean_staleness: float = 0.0
    """Over these: versions that others made between a push's start and the update with it."""
    version: int = 0
    """That the parameters began from; 0 before there was any. Of a model in fragments that of the first."""
    train_s: float = 0.0
    """Outside of calls of the outer optimizer: the loop's own."""
    blocked_s: float = 0.0
    """In calls: copying, and waiting where waiting was asked for."""
    comm_s: float = 0.0
    """With a push or a pull under way, beside training or not."""
    data_wait_s: float = 0.0
    """Of the blocked ones: for a chunk of data."""
    uncounted_samples: int = 0
    """That were trained on without a lease, while the master was away."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Pushes that came to nothing, or were left out of an update, by the reason."""


class ClientMeter:
    """Counts for `OuterMetrics`; who calls holds a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = clock()
        self._busy: set[tuple[str, int]] = set()
        """Pushes and pulls under way, by fragment."""
        self._busy_since_s = self._comm_s = 0.0
        self._staleness = 0
        self.tokens = self.inner_steps = self.outer_rounds = self.version = self.uncounted_samples = 0
        self.train_s = self.blocked_s = self.data_wait_s = 0.0
        self.skipped: Counter[str] = Counter()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Note that the loop calls, until the call ends."""
        entered_s = self._clock()
        self.train_s += entered_s - self._left_s
        try:
            yield
        finally:
            self._left_s = self._clock()
            self.blocked_s += self._left_s - entered_s

    def begin(self, what: str, fragment: int) -> None:
        """Note that a push or a pull is under way."""
        if not self._busy:
            self._busy_since_s = self._clock()
        self._busy.add((what, fragment))

    def end(self, what: str, fragment: int) -> None:
        """Note that it is no more."""
        if self._busy == {(what, fragment)}:
            self._comm_s += self._clock() - self._busy_since_s
        self._busy.discard((what, fragment))

    def skip(self, reason: str) -> None:
        """Count a push that came to nothing."""
        known = reason in self.skipped or len(self.skipped) < _REASONS
        self.skipped[reason if known else "other reasons"] += 1

    def count(self, *, base_version: int, version: int) -> None:
        """Count a push that is part of a version."""
        self.outer_rounds += 1
        self._staleness += max(0, version - 1 - base_version)

    def read(self) -> OuterMetrics:
        """Return all of it."""
        under_way_s = self._clock() - self._busy_since_s if self._busy else 0.0
        return OuterMetrics(
            tokens=self.tokens,
            inner_steps=self.inner_steps,
            outer_rounds=self.outer_rounds,
            mean_staleness=self._staleness / self.outer_rounds if self.outer_rounds else 0.0,
            version=self.version,
            train_s=self.train_s,
            blocked_s=self.blocked_s,
            comm_s=self._comm_s + under_way_s,
            data_wait_s=self.data_wait_s,
            uncounted_samples=self.uncounted_samples,
            skipped=dict(self.skipped),
        )
