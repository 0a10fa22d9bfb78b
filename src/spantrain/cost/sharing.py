"""Which of the links on their routes pairs of devices can make scarce for each other, and how much each pair takes.

A route has the way between two places, the ports of two hosts, and the lines that two sites have to all others
(`NetworkCost.route`). Most of them never bind: a fast port carries all that the slow lines behind it can take. A link
is dropped where all that can be on it at once is no more than it carries, or where every pair on it is also on a
narrower one that is kept; but the way between two sites and their lines always stay, since their bandwidth may be said
to change. What is left is exact, and a simulator that has one link to think of instead of three is fast.

Gradient sums of several stages slow each other down while they run at once (`sum_slowdowns`). Each stage sums over its
own rings when its own work is done, whatever the others do; where rings cross the same link (a line between sites, a
host's port), they share it. In a ring all neighbours send in every turn, so a ring that runs beside others takes the
turn of its slowest hop with what the others leave of the links.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spantrain.cost.network import SAME_RATIO, NetworkCost, Uses

Pair = tuple[str, str]


def scarce_links(network: NetworkCost, pairs: Collection[Pair]) -> Mapping[Pair, Uses]:
    """Return for each pair the links that it has to share when all of these pairs may send at once.

    A pair that shares nothing scarce has the way between its places.

    Raises:
        ProfileError: a pair was not measured.
    """
    own = {pair: network.link(*pair).bandwidth_bytes_per_s for pair in pairs}
    routes = {pair: network.route(*pair) for pair in own}
    carries = {shared.name: shared.bandwidth_bytes_per_s for route in routes.values() for shared in route}
    members: dict[str, set[Pair]] = {}
    for pair, route in routes.items():
        for shared in route:
            members.setdefault(shared.name, set()).add(pair)
    way = {pair: route[0].name for pair, route in routes.items()}
    kept = _without_doubles(
        [name for name in carries if _most_load(members[name], own, way, carries, name) > carries[name]],
        carries,
        members,
    )
    found = {}
    for pair, route in routes.items():
        names = [shared.name for shared in route if shared.name in kept or shared.between_sites]
        names = names or [way[pair]]
        alone = names == [way[pair]] and len(members[way[pair]]) == 1
        found[pair] = tuple((name, 1.0 if alone else _part(own[pair] / carries[name])) for name in names)
    return found


def _part(ratio: float) -> float:
    return 1.0 if ratio > SAME_RATIO else ratio


def _most_load(
    pairs: Collection[Pair],
    own: Mapping[Pair, float],
    way: Mapping[Pair, str],
    carries: Mapping[str, float],
    name: str,
) -> float:
    """Return the most bytes per second that these pairs can bring to a link, through the ways between places."""
    by_way: dict[str, float] = {}
    for pair in pairs:
        # What differs by no more than measurements do must not hide that two of them need twice as much.
        by_way[way[pair]] = by_way.get(way[pair], 0.0) + own[pair]
    return sum(load if line == name else min(load, carries[line]) for line, load in by_way.items())


def _without_doubles(
    names: Sequence[str], carries: Mapping[str, float], members: Mapping[str, set[Pair]]
) -> frozenset[str]:
    """Return the names without those whose pairs are all on one that is kept and carries no more than they do."""
    kept: list[str] = []
    for name in sorted(names, key=lambda link: (-len(members[link]), carries[link])):
        if not any(carries[other] <= carries[name] / SAME_RATIO and members[name] <= members[other] for other in kept):
            kept.append(name)
    return frozenset(kept)


_Link = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class StageRings:
    """What a stage sums over."""

    rings: tuple[tuple[str, ...], ...]
    """Devices of each ring in their order; all rings of a stage run at once."""
    bucket_bytes: float
    """Bytes that are summed at once on each ring."""

    @property
    def hops(self) -> list[tuple[_Link, float]]:
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


def _turn_s(network: NetworkCost, hops: Sequence[tuple[_Link, float]], parts: Sequence[float]) -> float:
    """Return the seconds of a turn in which each pair has a part of its full speed."""
    return max(
        network.latency_s(*pair) + network.occupancy_seconds(*pair, size_bytes) / part
        for (pair, size_bytes), part in zip(hops, parts, strict=True)
    )
