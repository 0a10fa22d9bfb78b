"""What came of a simulated run over clusters."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClusterFigures:
    """Of one cluster, over all its lives."""

    tokens: int
    """Of all its inner steps."""
    tokens_counted: int
    """In updates that were decided."""
    tokens_lost: int
    """Of steps that nobody had pushed when the cluster was killed."""
    inner_steps: int
    outer_rounds: int
    """Its exchanges that ended in a new start."""
    mean_staleness: float
    """Of its pushes: versions between a round's start and the update that it went into."""
    comm_s: float
    """In which parameters went to it or came from it."""
    train_s: float
    """In which it took inner steps."""
    stood_still_s: float
    """In which it did neither and waited, or copied, from its first step to the last of all."""


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """Of all clusters."""

    method: str
    clusters: Mapping[str, ClusterFigures]
    versions: int
    """Of the shared parameters that were made; of `async-diloco` the outer steps of all."""
    rejected_updates: int
    """Pushes that the guard left out."""
    span_s: float
    """From the first inner step to the end of the last."""
    end_s: float
    """When all that was learned was in a version."""
    ideal_tokens_per_s: float
    """If each cluster trained alone all the time."""

    @property
    def tokens(self) -> int:
        """Of all inner steps."""
        return sum(one.tokens for one in self.clusters.values())

    @property
    def tokens_counted(self) -> int:
        """In updates."""
        return sum(one.tokens_counted for one in self.clusters.values())

    @property
    def tokens_per_s(self) -> float:
        """While they took steps."""
        return self.tokens / self.span_s

    @property
    def throughput_vs_ideal(self) -> float:
        """What part of the ideal that is."""
        return self.tokens_per_s / self.ideal_tokens_per_s

    @property
    def comm_s(self) -> float:
        """Of all clusters together."""
        return sum(one.comm_s for one in self.clusters.values())
