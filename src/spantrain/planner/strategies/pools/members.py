"""Devices that stand for each other, and plans in terms of them."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices of one kind, in hosts of one size, in one site."""

    kind: str
    site: str
    count: int
    host_size: int
    """Devices in one host, which is as many as a tensor-parallel group may have."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.host_size < 1:
            raise ValueError(f"pool {self.kind} in {self.site}: counts must be positive, got {self}")


class Member(NamedTuple):
    """One replica of a stage."""

    pool: int
    """Index of its pool."""
    tp_degree: int


@dataclass(frozen=True, kw_only=True)
class PoolStage:
    """Consecutive units and who runs them; the k-th replicas of all stages are one pipeline."""

    units: range
    members: tuple[Member, ...]


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """What runs where, by pool: 1F1B, one micro-batch size, as many replicas in every stage."""

    micro_batch: int
    """Samples of one replica at a time."""
    micro_batches: int
    """Of each replica in a step."""
    stages: tuple[PoolStage, ...]
    estimate_s: float = 0.0
    """What the search expects of it."""

    @property
    def width(self) -> int:
        """Replicas of each stage."""
        return len(self.stages[0].members)

    @property
    def devices_by_pool(self) -> Counter[int]:
        """How many devices of each pool it uses."""
        found: Counter[int] = Counter()
        for stage in self.stages:
            for member in stage.members:
                found[member.pool] += member.tp_degree
        return found

    def pipelines(self) -> dict[tuple[Member, ...], int]:
        """Return the different pipelines, each with how many are like it."""
        return dict(Counter(zip(*(stage.members for stage in self.stages), strict=True)))

    def hosts(self, pools: tuple[Pool, ...]) -> tuple[tuple[int, ...], ...]:
        """Return a host for every replica of every stage, no two pools in one.

        The widest groups of a pool come first, then stages in order, so that no group spans two hosts as long as
        widths divide each other and the size of a host.
        """
        order = sorted(
            (member.pool, -member.tp_degree, stage_index, number)
            for stage_index, stage in enumerate(self.stages)
            for number, member in enumerate(stage.members)
        )
        rows = [[0] * self.width for _ in self.stages]
        taken: Counter[int] = Counter()
        names: dict[tuple[int, int], int] = {}
        for pool, negative, stage_index, number in order:
            key = (pool, taken[pool] // pools[pool].host_size)
            taken[pool] -= negative
            rows[stage_index][number] = names.setdefault(key, len(names))
        return tuple(map(tuple, rows))
