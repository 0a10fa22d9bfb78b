"""What is simulated of training over clusters: clusters, lines, shards, faults; and what came of it.

A line belongs to one member. A message between two members takes the sender's line up and the receiver's line down at
once, and goes as fast as the one that leaves it least; it is under way as long as both lines' latencies together.
Between the lines nothing is slow, and the master is there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, divide, fragment_layouts
from spantrain.outer.policy.settings import OuterSettings

MASTER = "master"
"""In a fault: the master."""


@dataclass(frozen=True, kw_only=True)
class MemberLine:
    """How a member is joined to all others; both directions are alike and do not share."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth_bytes_per_s > 0 and math.isfinite(self.bandwidth_bytes_per_s)):
            raise ValueError(f"bandwidth_bytes_per_s must be positive and finite, got {self.bandwidth_bytes_per_s}")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"latency_s must be 0 or more and finite, got {self.latency_s}")


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster:
    """A cluster that trains a whole copy."""

    name: str
    step_s: float
    """Of an inner step, at least."""
    line: MemberLine
    gap: float = 0.0
    """A step takes up to this part of `step_s` longer, by chance."""
    begins_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.name or not self.step_s > 0 or self.gap < 0 or self.begins_s < 0:
            raise ValueError(f"a cluster needs a name, step_s over 0, gap and begins_s of 0 or more, got {self}")

    @property
    def mean_step_s(self) -> float:
        """Of an inner step, in the mean."""
        return self.step_s * (1 + self.gap / 2)


@dataclass(frozen=True, kw_only=True)
class SimulatedShard:
    """A shard, as the outer optimizer alone has it."""

    name: str
    line: MemberLine
    command_s: float = 0.0
    """What it computes for each of the four commands of an update."""

    def __post_init__(self) -> None:
        if not self.name or self.command_s < 0:
            raise ValueError(f"a shard needs a name and command_s of 0 or more, got {self}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A member is killed, and started again."""

    member: str
    """A cluster, a shard, or `master`."""
    at_s: float
    down_s: float

    def __post_init__(self) -> None:
        if self.at_s < 0 or not (self.down_s > 0 and math.isfinite(self.down_s)):
            raise ValueError(f"a fault needs at_s of 0 or more and a positive, finite down_s, got {self}")


@dataclass(frozen=True, kw_only=True)
class OuterCase:
    """Who trains what over which lines, how long, and what happens meanwhile."""

    clusters: tuple[SimulatedCluster, ...]
    shards: tuple[SimulatedShard, ...]
    layers: tuple[Layer, ...]
    inner_steps: int
    """Of a round, at least: H."""
    tokens_per_step: int = 1
    steps: int | None = None
    """Inner steps that all clusters take together; then what is left is pushed, and all ends."""
    seconds: float | None = None
    """Or: how long they take steps."""
    settings: OuterSettings = field(default_factory=OuterSettings)
    copy_s: float = 0.0
    """That a cluster stands still to keep what it pushes, and to take in a version."""
    snapshot_every: int = 1
    """A shard keeps each version whose number this divides for when it is started again."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        names = [MASTER, *self.lines]
        if not self.clusters or len(names) < 1 + len(self.clusters) + len(self.shards) or MASTER in self.lines:
            raise ValueError(f"clusters and shards need names of their own, and one cluster at least, got {names[1:]}")
        strangers = sorted({fault.member for fault in self.faults} - set(names))
        if strangers:
            raise ValueError(f"faults are of nobody that is there: {', '.join(strangers)}; there are {names}")
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"give either steps or seconds, got {self.steps} and {self.seconds}")
        if min(self.inner_steps, self.tokens_per_step, self.snapshot_every, self.steps or 1) < 1:
            raise ValueError(f"inner_steps, tokens_per_step, snapshot_every and steps must be at least 1, got {self}")
        if self.copy_s < 0 or not (self.seconds is None or 0 < self.seconds < math.inf):
            raise ValueError(f"copy_s must not be negative, seconds be over 0 and finite, got {self}")
        _ = self.layout

    @cached_property
    def layout(self) -> ShardLayout:
        """Which shard holds which layers."""
        return divide(self.layers, [shard.name for shard in self.shards], fragments=self.settings.fragments)

    @cached_property
    def fragments(self) -> tuple[ShardLayout, ...]:
        """The same for each fragment."""
        return fragment_layouts(self.layout, self.settings.fragments)

    @cached_property
    def model_bytes(self) -> int:
        """Of all layers."""
        return sum(layer.size_bytes for layer in self.layers)

    @cached_property
    def lines(self) -> Mapping[str, MemberLine]:
        """Of each cluster and shard."""
        return {**{one.name: one.line for one in self.clusters}, **{one.name: one.line for one in self.shards}}


def equal_layers(count: int, model_bytes: int) -> tuple[Layer, ...]:
    """Return layers of one float32 parameter each that are together as large as a model.

    >>> [layer.size_bytes for layer in equal_layers(3, 48)]
    [16, 16, 16]
    """
    numbers = max(1, model_bytes // 4 // count)
    return tuple(
        Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.weight", shape=(numbers,)),)) for k in range(count)
    )


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
