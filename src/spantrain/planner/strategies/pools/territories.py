"""Sets of sites that are searched one after the other: single ones first, then growing ones.

Sites that look alike (as many devices of the same kinds in hosts of one size, a network inside as fast) stand for each
other, so what is listed are sorts of sites and not names: one site of each sort that no other is better than in
everything; and from the fastest of a few sorts its nearest sites, and the fastest ones wherever they are, so many at
once. The order of a cluster's file plays no part.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from spantrain.core.records import Record
from spantrain.planner.strategies.pools.costs import PoolCosts, PoolReplica

_STARTS = 4
"""Sorts of sites, the fastest ones, around which sets of sites grow."""
_EVERY_PAIR_UP_TO = 64
"""Sites up to which each next one is the nearest to any that is in; of more, to the first one."""
_DIGITS = 2
"""To which ways are compared."""

Looks = tuple[object, ...]


class Family(NamedTuple):
    """What devices of one site must have in common to stand for those of another."""

    kind: str
    host_size: int
    memory_bytes: int


class Territory(Record):
    """Sites in the order in which they are filled, as pools by family."""

    sites: tuple[str, ...]
    members: dict[int, tuple[int, ...]]
    """Pools by the first of them, which stands for the family."""
    available: dict[int, int]
    ends: tuple[int, int] | None
    """Pools of its first and its last site; None if there is only one."""


class Territories:
    """The sets of sites of one search."""

    def __init__(self, costs: PoolCosts) -> None:
        self._costs = costs
        self._pools: dict[str, list[int]] = {}
        for index, pool in enumerate(costs.pools):
            self._pools.setdefault(pool.site, []).append(index)
        speeds = {self._family(index): self._speed_of(index) for index in reversed(range(len(costs.pools)))}
        self._speed = {
            site: sum(costs.pools[index].count * speeds[self._family(index)] for index in indices)
            for site, indices in self._pools.items()
        }
        self._looks = {site: self._looks_of(site) for site in self._pools}

    def _speed_of(self, index: int) -> float:
        """Return the samples per second of a device, about."""
        sizes = self._costs.sizes()
        size = sizes[len(sizes) // 2]
        degree = min(self._costs.degrees(index, size), default=0)
        if not degree:
            return 0.0
        member = PoolReplica(index, degree)
        return size / float(self._costs.forward_s(member, size)[-1] + self._costs.backward_s(member, size)[-1]) / degree

    def __iter__(self) -> Iterator[Territory]:
        """Yield single sites, the fastest first, then sets of more and more sites."""
        for site in self._singles:
            yield self._territory((site,))
        seen: set[Looks] = set()
        rows = [row for start in self._singles[:_STARTS] for row in (self._nearest(start), self._fastest(start))]
        for length in _lengths(len(self._pools)):
            for row in rows:
                looks = self._looks_together(row[:length])
                if looks not in seen:
                    seen.add(looks)
                    yield self._territory(row[:length])

    @cached_property
    def _singles(self) -> tuple[str, ...]:
        """One site of each sort that no other one has at least as much of everything as, the fastest first."""
        firsts: dict[Looks, str] = {}
        for site in sorted(self._pools, key=self._rank):
            firsts.setdefault(self._looks[site], site)
        found: list[str] = []
        for site in firsts.values():
            if not any(self._is_no_less(other, site) for other in found):
                found.append(site)
        return tuple(found)

    def _rank(self, site: str) -> tuple[object, ...]:
        """Return the fastest first, of equally fast ones the one that is joined best."""
        return -self._speed[site], str(self._looks[site]), self._distance_to_all(site)

    def _distance_to_all(self, site: str) -> float:
        if len(self._pools) > _EVERY_PAIR_UP_TO:
            return 0.0
        return sum(sorted(self._distance_s(site, other) for other in self._pools if other != site))

    def _looks_of(self, site: str) -> Looks:
        rows = sorted((*self._family(index), self._costs.pools[index].count) for index in self._pools[site])
        return *rows, *(_roughly(seconds) for _, seconds in sorted(self._ways(site).items()))

    def _ways(self, site: str) -> dict[tuple[Family, Family], float]:
        """Return the seconds of a message between hosts of each two families of a site."""
        return {
            (self._family(a), self._family(b)): self._costs.site_distance_s(a, b)
            for a, b in product(self._pools[site], repeat=2)
        }

    def _family(self, index: int) -> Family:
        pool = self._costs.pools[index]
        return Family(pool.kind, pool.host_size, self._costs.memory_bytes(index))

    def _is_no_less(self, one: str, other: str) -> bool:
        """Whether a site has as many devices of every family as another, and as fast a network."""
        wanted = {self._family(index): self._costs.pools[index].count for index in self._pools[other]}
        have = {self._family(index): self._costs.pools[index].count for index in self._pools[one]}
        if any(have.get(family, 0) < count for family, count in wanted.items()):
            return False
        # What is in one host has its network in any host.
        inside = {(family, family) for family in wanted if wanted[family] <= family.host_size}
        ways = self._ways(one)
        return all(way in inside or ways[way] <= seconds for way, seconds in self._ways(other).items())

    def _distance_s(self, a: str, b: str) -> float:
        return self._costs.site_distance_s(self._pools[a][0], self._pools[b][0])

    def _nearest(self, first: str) -> list[str]:
        """Return the sites in an order in which each next one is the nearest to any before, of equal ones the fastest.

        Of many sites, the nearest to the first.
        """
        places = sorted((site for site in self._pools if site != first), key=self._rank)
        near = {site: self._distance_s(first, site) for site in places}
        if len(self._pools) > _EVERY_PAIR_UP_TO:
            return [first, *sorted(places, key=lambda site: _roughly(near[site]))]
        row = [first]
        while near:
            site = min(near, key=lambda name: _roughly(near[name]))
            del near[site]
            row.append(site)
            for other in near:
                near[other] = min(near[other], self._distance_s(site, other))
        return row

    def _fastest(self, first: str) -> list[str]:
        """Return the sites, the fastest first, of equal ones the nearest to the first."""
        rest = [site for site in self._pools if site != first]
        near = {site: _roughly(self._distance_s(first, site)) for site in rest}
        return [first, *sorted(rest, key=lambda site: (-self._speed[site], near[site], self._rank(site)))]

    def _looks_together(self, row: Sequence[str]) -> Looks:
        farthest = max((self._distance_s(row[0], site) for site in row[1:]), default=0.0)
        return (*sorted(map(str, (self._looks[site] for site in row))), _roughly(farthest))

    def _territory(self, row: Sequence[str]) -> Territory:
        families: dict[Family, list[int]] = {}
        for site in row:
            for index in self._pools[site]:
                families.setdefault(self._family(index), []).append(index)
        pools: Mapping[int, tuple[int, ...]] = {own[0]: tuple(own) for own in families.values()}
        return Territory(
            sites=tuple(row),
            members=dict(pools),
            ends=(self._pools[row[0]][0], self._pools[row[-1]][0]) if len(row) > 1 else None,
            available={first: sum(self._costs.pools[index].count for index in own) for first, own in pools.items()},
        )


def _roughly(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _lengths(most: int) -> list[int]:
    """Return numbers of sites to look at together, each about a third more than the one before.

    >>> _lengths(20)
    [2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = sorted({size for power in range(1, most.bit_length() + 1) for size in (2**power, 3 * 2 ** (power - 1))})
    return [*(size for size in found if size < most), *([most] if most > 1 else [])]
