"""How much the gradient sums of several stages slow each other down while they run at once.

Each stage sums over its own rings when its own work is done, whatever the others do; where rings cross the same link
(a line between sites, a host's port), they share it. In a ring all neighbours send in every turn, so a ring that runs
beside others takes the turn of its slowest hop with what the others leave of the links.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spantrain.cost.network import NetworkCost

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class StageRings:
    """What a stage sums over."""

    rings: tuple[tuple[str, ...], ...]
    """Devices of each ring in their order; all rings of a stage run at once."""
    bucket_bytes: float
    """That are summed at once on each ring."""

    @property
    def hops(self) -> list[tuple[Pair, float]]:
        """Return who sends whom in a turn, and how many bytes."""
        return [
            (pair, self.bucket_bytes / len(ring))
            for ring in self.rings
            for pair in zip(ring, (*ring[1:], ring[0]), strict=True)
        ]


def sum_slowdowns(network: NetworkCost, sums: Mapping[int, StageRings], at_once: Collection[int]) -> dict[int, float]:
    """Return by stage how many times as long its sum takes while those of all these stages run; 1: undisturbed."""
    stages = sorted(at_once)
    hops = [hop for stage in stages for hop in sums[stage].hops]
    together = iter(network.parts_together([pair for pair, _ in hops]))
    found = {}
    for stage in stages:
        own = sums[stage].hops
        alone = network.parts_together([pair for pair, _ in own])
        beside = [next(together) for _ in own]
        found[stage] = max(1.0, _turn_s(network, own, beside) / _turn_s(network, own, alone))
    return found


def _turn_s(network: NetworkCost, hops: Sequence[tuple[Pair, float]], parts: Sequence[float]) -> float:
    """Return the seconds of a turn in which each pair has a part of its full speed."""
    return max(
        network.latency_s(*pair) + network.occupancy_seconds(*pair, size_bytes) / part
        for (pair, size_bytes), part in zip(hops, parts, strict=True)
    )
