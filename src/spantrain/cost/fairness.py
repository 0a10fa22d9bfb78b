"""Fair shares of links among flows that take several of them."""

from collections.abc import Mapping, Sequence

Uses = tuple[tuple[str, float], ...]
"""Links, each with the part of it that a flow takes when it goes at full speed."""
Demand = tuple[float, Uses]
"""Bytes per second at full speed, and what that takes."""


def fair_parts(demands: Sequence[Demand], capacity: Mapping[str, float]) -> list[float]:
    """Return the part of its full speed that each flow gets: max-min fair in bytes per second.

    No flow can get more without one that has less, or as much, getting less (Bertsekas and Gallager, Data Networks,
    1992, section 6.5.2: all flows rise together until a link is full; those on it stay, the others rise on).
    `capacity` is how much of each link is there, usually 1; where there is more, full speed is more.

    >>> fair_parts([(10.0, (("port", 1.0),)), (2.0, (("port", 0.2), ("far", 1.0)))], {"port": 1.0, "far": 1.0})
    [0.8, 1.0]
    """
    parts = [0.0] * len(demands)
    is_whole = min(capacity.values(), default=1.0) == max(capacity.values(), default=1.0) == 1.0
    most = [1.0] * len(demands) if is_whole else [part_alone(uses, capacity) for _, uses in demands]
    left = dict(capacity)
    rising = list(range(len(demands)))
    while rising:
        weight: dict[str, float] = {}
        for flow in rising:
            bandwidth, uses = demands[flow]
            for link, part in uses:
                weight[link] = weight.get(link, 0.0) + part / bandwidth
        level, narrowest = min((max(0.0, left[link]) / wanted, link) for link, wanted in weight.items())
        full = [flow for flow in rising if most[flow] * demands[flow][0] <= level]
        stay = full or [flow for flow in rising if any(link == narrowest for link, _ in demands[flow][1])]
        for flow in stay:
            bandwidth, uses = demands[flow]
            parts[flow] = most[flow] if full else level / bandwidth
            for link, part in uses:
                left[link] -= part * parts[flow]
        rising = [flow for flow in rising if flow not in stay]
    return parts


def part_alone(uses: Uses, capacity: Mapping[str, float]) -> float:
    """Return the part of its full speed that a flow has alone: what its narrowest link has of its capacity."""
    return max(part for _, part in uses) * min(capacity[link] / part for link, part in uses)
