"""Which of the links on their routes pairs of devices can make scarce for each other, and how much each pair takes.

A route has the way between two places, the ports of two hosts, and the lines that two sites have to all others
(`NetworkCost.route`). Most of them never bind: a fast port carries all that the slow lines behind it can take. A link
is dropped where all that can be on it at once is no more than it carries, or where every pair on it is also on a
narrower one that is kept; but the way between two sites and their lines always stay, since their bandwidth may be said
to change. What is left is exact, and a simulator that has one link to think of instead of three is fast.
"""

from collections.abc import Collection, Mapping, Sequence

from spantrain.cost.fairness import Uses
from spantrain.cost.network import SAME_RATIO, NetworkCost

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
