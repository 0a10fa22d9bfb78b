"""Starts of the search: chains of blocks cut into stages and units at once, by dynamic programme.

A chain has the blocks of some groups (a kind in a site), group by group. A stage takes consecutive blocks of it and
consecutive units, as in PipeDream's programme, and the last blocks may be left out; what fills and drains the pipeline
is counted as in `planner.assembly.assemble`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from spantrain.cost.span_tables import Array
from spantrain.planner.groups import orders_to_try
from spantrain.planner.strategies.auto.cuts import Parts
from spantrain.planner.strategies.auto.hops import PipelinePart
from spantrain.planner.strategies.auto.moves import Moves
from spantrain.planner.strategies.auto.parts import PartCosts

Chain = tuple[int, ...]
"""Numbers of blocks."""
_ALL_GROUPS_UP_TO, _ALL_SITES_UP_TO = 4, 4
_MIXED_UP_TO = 8
"""In chains of more blocks no stage of a start has two sites."""
_LONGEST, _MANY_SITES = 32, 16
"""Blocks of a chain that its programme looks at, for it takes by their square; and sites from which on chains begin at
so many, the fastest, only, and go on over 2, 4, 8, ... or all."""
_INPUT_SHARE = 0.5


def chains(
    groups: Sequence[Sequence[int]],
    site_by_group: Sequence[str],
    near: Mapping[tuple[str, str], float],
    *,
    many_devices: bool,
) -> tuple[Chain, ...]:
    """Return chains over every ordered subset of few groups; of more, those along few orders of sites.

    Groups are by falling speed. Of many groups, each site has all of them, fastest first or last, or the fastest
    (alone, every order of every few); the orders of sites are all of few, of more those that go on to the nearest site
    (`near`: how far), from each, cut at any length. On many devices each set of sites comes in one order only.
    """
    if len(groups) <= _ALL_GROUPS_UP_TO and not many_devices:
        orders = [order for count in range(1, len(groups) + 1) for order in permutations(range(len(groups)), count)]
        return tuple(tuple(block for group in order for block in groups[group]) for order in orders)
    sites = tuple(dict.fromkeys(site_by_group))
    places = list(orders_to_try(sites, lambda a, b: near[a, b], all_up_to=_ALL_SITES_UP_TO))
    if many_devices:
        places = list({frozenset(order): order for order in reversed(places)}.values())[::-1]
    if many_devices and len(sites) > _MANY_SITES:
        firsts = set(sites[:_MANY_SITES])
        places = [way for way in places if way[0] in firsts and (len(way).bit_count() == 1 or len(way) == len(sites))]
    found: dict[Chain, None] = {}
    for order in places:
        for sign, fastest_only in ((1, False), (1, True)) if many_devices else ((1, False), (-1, False), (1, True)):
            rows = [[g for g, site in enumerate(site_by_group) if site == place][::sign] for place in order]
            chosen = [g for row in rows for g in (row[:1] if fastest_only else row)]
            found[tuple(block for group in chosen for block in groups[group])] = None
    if not many_devices:
        found |= dict.fromkeys(_inside(groups, site_by_group))
    return tuple(found)


def _inside(groups: Sequence[Sequence[int]], site_by_group: Sequence[str]) -> Iterator[Chain]:
    """Yield chains over every ordered subset of the few groups of each site."""
    for site in dict.fromkeys(site_by_group):
        own = [group for group, place in enumerate(site_by_group) if place == site]
        if len(own) <= _ALL_GROUPS_UP_TO:
            for count in range(1, len(own) + 1):
                for order in permutations(own, count):
                    yield tuple(block for group in order for block in groups[group])


def divided(costs: PartCosts, moves: Moves, rows: Sequence[Chain], size: int) -> list[Parts]:
    """Return the best pipeline along each chain for a micro-batch size, as far as there is one."""
    by_length: dict[int, list[Chain]] = {}
    for chain in dict.fromkeys(row[:_LONGEST] for row in rows):
        by_length.setdefault(len(chain), []).append(chain)
    found = []
    for alike in by_length.values():
        for chain, ends in zip(alike, _ChainProgramme(costs, moves, alike, size).ends(), strict=True):
            if ends is not None:
                parts = moves.parts([frozenset(chain[a:b]) for a, b in ends], size)
                if parts is not None:
                    found.append(parts)
    return found


def evened(moves: Moves, rows: Sequence[Chain], size: int) -> list[Parts]:
    """Return pipelines of 1, 2, 4, ... stages of equally many blocks along each chain.

    On many devices they hand over evenly: no host's port has more to carry than another, which bounds do not see.
    """
    found: dict[Parts, None] = {}
    for chain in rows:
        count = 1
        while count <= len(chain):
            ends = [len(chain) * k // count for k in range(count + 1)]
            parts = moves.parts([frozenset(chain[a:b]) for a, b in pairwise(ends)], size)
            if parts is not None:
                found[parts] = None
            count *= 2
    return list(found)


def undivided(moves: Moves, rows: Sequence[Chain], size: int) -> list[Parts]:
    """Return each chain as a single stage: bounds flatter pipelines more, so the programme seldom ends with one."""
    sets = dict.fromkeys(frozenset(chain) for chain in rows)
    return [parts for blocks in sets if (parts := moves.parts([blocks], size)) is not None]


def separate(moves: Moves, rows: Sequence[Chain], size: int) -> list[Parts]:
    """Return each chain with every block as a stage: with few micro-batches the programme merges blocks too readily."""
    found = (moves.parts([frozenset({block}) for block in chain], size) for chain in rows)
    return list(dict.fromkeys(parts for parts in found if parts is not None))


class _ChainProgramme:
    """The programme for chains of one length, all at once: value[p][row, i] is that of blocks p.. and units i.. ."""

    def __init__(self, costs: PartCosts, moves: Moves, rows: Sequence[Chain], size: int) -> None:
        self._costs, self._moves, self._rows, self._size = costs, moves, rows, size
        self._batch = costs.batch(size)
        self._points = len(costs.grid)
        self._index: dict[Chain, int] = {}
        self._alike: dict[int, int] = {}
        """Tables by identity of the fields (which the costs keep): parts that look alike share theirs."""
        nothing = np.full((self._points, self._points), np.inf)
        self._tables: list[tuple[Array, Array]] = [(nothing, nothing)]

    def ends(self) -> list[tuple[tuple[int, int], ...] | None]:
        """Return, for each chain, where each stage's blocks begin and end in it; None if nothing fits."""
        length, count = len(self._rows[0]), len(self._rows)
        stages = {(p, q): self._stage(p, q) for p in range(length) for q in range(p + 1, length + 1)}
        run, turn = (np.array(tables) for tables in zip(*self._tables, strict=True))
        beyond: dict[int, Array] = {}
        taken = np.zeros((length, count, self._points), dtype=np.int64)
        place = np.zeros((length, count, self._points), dtype=np.int64)
        value = np.full((count, self._points), np.inf)
        for p in range(length - 1, -1, -1):
            value = np.full((count, self._points), np.inf)
            for q in range(p + 1, length + 1):
                which = stages[p, q]
                if not which.any():
                    continue
                best, at = self._best(run[which], turn[which], beyond.get(q))
                better = best < value
                value = np.where(better, best, value)
                taken[p] = np.where(better, q, taken[p])
                place[p] = np.where(better, at, place[p])
            if p > 0:
                beyond[p] = self._beyond(p, value)
        return [self._followed(row, value, taken, place) for row in range(count)]

    def _best(self, run: Array, turn: Array, beyond: Array | None) -> tuple[Array, NDArray[np.int64]]:
        """Return by chain and first unit the least value with a stage, and where that ends."""
        last, end = run[:, :, -1], self._points - 1
        if beyond is None:
            return last, np.full(last.shape, end)
        table = np.maximum(run, turn + beyond[:, None, :])
        at = table.argmin(axis=2)
        best = table[np.arange(len(table))[:, None], np.arange(end + 1), at]
        return np.minimum(last, best), np.where(last <= best, end, at)

    def _followed(
        self, row: int, value: Array, taken: NDArray[np.int64], place: NDArray[np.int64]
    ) -> tuple[tuple[int, int], ...] | None:
        if not np.isfinite(value[row, 0]):
            return None
        stages, p, unit = [], 0, 0
        while unit < self._points - 1:
            q, unit = int(taken[p, row, unit]), int(place[p, row, unit])
            stages.append((p, q))
            p = q
        return tuple(stages)

    def _beyond(self, q: int, value: Array) -> Array:
        """Return the value of the rest, and the way to it, from the last block before to the first one behind."""
        ends = [[PipelinePart(self._moves.leader(row[k]), (self._size,)) for k in (q - 1, q)] for row in self._rows]
        hops = np.array([self._costs.hop(lower, upper, self._batch) for lower, upper in ends])
        beyond: Array = hops[:, 0] + _INPUT_SHARE * hops[:, 1] + np.maximum(value, np.maximum(hops[:, 2], hops[:, 3]))
        return beyond

    def _stage(self, p: int, q: int) -> NDArray[np.int64]:
        """Return by chain which table is that of blocks p to q-1; 0 where they cannot be one stage."""
        found = []
        for row in self._rows:
            blocks = row[p:q]
            index = self._index.get(blocks)
            if index is None:
                index = self._index[blocks] = self._add(blocks)
            found.append(index)
        return np.array(found)

    def _add(self, blocks: Chain) -> int:
        if len(self._rows[0]) > _MIXED_UP_TO and self._moves.crosses_sites(blocks):
            return 0
        parts = self._moves.parts((frozenset(blocks),), self._size)
        if parts is None:
            return 0
        fields = self._costs.part(parts[0], self._batch)
        index = self._alike.get(id(fields))
        if index is None:
            index = self._alike[id(fields)] = len(self._tables)
            self._tables.append((fields[3] + fields[13], fields[0] + _INPUT_SHARE * fields[1]))
        return index
