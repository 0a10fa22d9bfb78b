"""Small changes of a pipeline: what the local search of `auto` tries next; of each class one device is moved.

Blocks of devices move together: single devices in small clusters, parts of a class in large ones.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.planner.strategies.auto.cuts import Parts
from spantrain.planner.strategies.auto.hops import PipelinePart
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.shape import PlanShape

_WIDE_UP_TO = 8
"""With more blocks than that they are moved and exchanged between neighbouring stages only."""

Block = tuple[str, ...]
"""Devices that move together: alike and in one place; one device in small clusters."""
Sets = tuple[frozenset[int], ...]
"""By stage: the blocks of its devices, by number."""


class Moves:
    """Neighbours of pipelines that are made of blocks."""

    def __init__(
        self,
        costs: PartCosts,
        blocks: Sequence[Block],
        classes: Sequence[object],
        sizes: Sequence[int],
        *,
        named: bool = False,
        stay: bool = False,
    ) -> None:
        """Take the blocks, with equal classes for those that stand for each other, and the micro-batches' sizes.

        `named`: every block stays itself all the same, twins do not take each other's places; `stay`: no block leaves
        its stage, so that what changes are cuts, samples of replicas and sizes.
        """
        self._costs = costs
        self._blocks = tuple(blocks)
        self._classes = tuple(classes)
        self._sizes = tuple(sizes)
        self._block_of = {name: number for number, block in enumerate(blocks) for name in block}
        self._order = {name: index for index, name in enumerate(costs.devices)}
        self._site_of = [costs.devices[block[0]].site for block in blocks]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(classes))}
        self._class_of = [numbers[name] for name in classes]
        self._members = [[k for k, own in enumerate(classes) if own == name] for name in numbers]
        self._stay, self._all_differ = stay, named or all(len(members) == 1 for members in self._members)
        self._wide = len(blocks) <= _WIDE_UP_TO
        self._parts: dict[tuple[frozenset[int], int], PipelinePart | None] = {}

    def structures(self, parts: Parts, size: int) -> list[Parts]:
        """Return pipelines with one block moved, added, taken away or exchanged, or with stages merged or reordered."""
        sets = None if self._stay else self._sets_of(parts)
        if sets is None:
            return []
        changed = dict.fromkeys(map(self._canonical, self._changed(sets)))
        changed.pop(sets, None)
        changed.pop((), None)
        return [made for other in changed if (made := self._named(other, size)) is not None]

    def sizes(self, parts: Parts, size: int) -> Iterator[tuple[int, Parts]]:
        """Yield the pipeline with the next smaller and the next larger micro-batches, with shares for them."""
        at = self._sizes.index(size) if size in self._sizes else -1
        sets = self._sets_of(parts)
        if sets is None:
            return
        near = self._sizes if at < 0 else (*self._sizes[max(at - 1, 0) : at], *self._sizes[at + 1 : at + 2])
        for other in near:
            made = self.parts(sets, other)
            if made is not None:
                yield other, made

    def _sets_of(self, parts: Parts) -> Sets | None:
        """Return the blocks of each stage; None where two stages share one, as plans of other strategies may."""
        sets = tuple(frozenset(self._block_of[name] for name in part.devices) for part in parts)
        return sets if sum(map(len, sets)) == len(frozenset().union(*sets)) else None

    def parts(self, sets: Sequence[frozenset[int]], size: int) -> Parts | None:
        """Return the parts of sets of blocks with shares by capacity; None if a device would get no sample."""
        return self._named(self._canonical(sets), size)

    def _named(self, sets: Sets, size: int) -> Parts | None:
        found = []
        for chosen in sets:
            key = (chosen, size)
            if key not in self._parts:
                self._parts[key] = self._part(chosen, size)
            part = self._parts[key]
            if part is None:
                return None
            found.append(part)
        return tuple(found)

    def _part(self, chosen: frozenset[int], size: int) -> PipelinePart | None:
        names = (name for number in chosen for name in self._blocks[number])
        devices = tuple(sorted(names, key=self._order.__getitem__))
        if len(devices) > size:
            return None
        shares = self._costs.shares(devices, size)
        return None if min(shares) == 0 else PipelinePart(devices, shares)

    def _canonical(self, sets: Sequence[frozenset[int]]) -> Sets:
        """Return the sets with the blocks of each class used in their order, so that twins make no other plan."""
        if self._all_differ:
            return tuple(sets)
        used = [0] * len(self._members)
        found = []
        for chosen in sets:
            named = []
            for block in chosen:
                number = self._class_of[block]
                named.append(self._members[number][used[number]])
                used[number] += 1
            found.append(frozenset(named))
        return tuple(found)

    def leader(self, block: int) -> tuple[str, ...]:
        """Return the first device of a block, alone."""
        return self._blocks[block][:1]

    def crosses_sites(self, blocks: Sequence[int]) -> bool:
        """Whether blocks lie in different sites."""
        return any(self._site_of[block] != self._site_of[blocks[0]] for block in blocks)

    def cuts(self, shape: PlanShape) -> Iterator[PlanShape]:
        """Yield shapes with one cut, or two neighbouring ones, moved by one place of the grid."""
        grid = self._costs.grid
        at = [grid.index(unit) for unit in shape.begins]
        for first, last in (*((k, k) for k in range(1, len(at) - 1)), *((k, k + 1) for k in range(1, len(at) - 2))):
            for by in (-1, 1):
                moved = [*at[:first], *(place + by for place in at[first : last + 1]), *at[last + 1 :]]
                if all(a < b for a, b in pairwise(moved)):
                    yield PlanShape(size=shape.size, parts=shape.parts, begins=tuple(grid[place] for place in moved))

    def shares(self, shape: PlanShape) -> Iterator[PlanShape]:
        """Yield shapes in which one device of a stage takes a sample more and another one less."""
        for k, part in enumerate(shape.parts):
            kinds: dict[tuple[object, int], int] = {}
            for index, (name, count) in enumerate(zip(part.devices, part.samples, strict=True)):
                kinds.setdefault((self._classes[self._block_of[name]], count), index)
            for giver in kinds.values():
                for taker in kinds.values():
                    if giver == taker or part.samples[giver] < 2:
                        continue
                    samples = list(part.samples)
                    samples[giver] -= 1
                    samples[taker] += 1
                    parts = (*shape.parts[:k], PipelinePart(part.devices, tuple(samples)), *shape.parts[k + 1 :])
                    yield PlanShape(size=shape.size, parts=parts, begins=shape.begins)

    def _changed(self, sets: Sets) -> Iterator[Sets]:
        used = frozenset().union(*sets)
        spare = self._one_of_each(frozenset(range(len(self._blocks))) - used)
        for k, own in enumerate(sets):
            for block in self._one_of_each(own):
                rest = (*sets[:k], *([own - {block}] if len(own) > 1 else []), *sets[k + 1 :])
                yield rest
                first, last = (0, len(rest)) if self._wide else (max(0, k - 1), min(len(rest), k + 2))
                yield from _placed(rest, block, first, last)
                for other in spare:
                    yield (*sets[:k], own - {block} | {other}, *sets[k + 1 :])
        for block in spare:
            yield from _placed(sets, block, 0, len(sets))
        for pair in combinations(spare, 2) if self._wide else ():
            for k in range(len(sets) + 1):
                yield (*sets[:k], frozenset(pair), *sets[k:])
        yield from self._exchanged(sets)
        yield from _rearranged(sets, len(sets) if self._wide else 2)

    def _exchanged(self, sets: Sets) -> Iterator[Sets]:
        for k, m in combinations(range(len(sets)), 2):
            for a in self._one_of_each(sets[k]):
                for b in self._one_of_each(sets[m]):
                    if self._classes[a] != self._classes[b]:
                        changed = list(sets)
                        changed[k], changed[m] = sets[k] - {a} | {b}, sets[m] - {b} | {a}
                        yield tuple(changed)

    def _one_of_each(self, blocks: frozenset[int]) -> list[int]:
        """Return the first block of each class."""
        first: dict[object, int] = {}
        for block in sorted(blocks):
            first.setdefault(self._classes[block], block)
        return list(first.values())


def _placed(sets: Sets, block: int, first: int, last: int) -> Iterator[Sets]:
    """Yield the sets with a block in any of those from `first` to before `last`, or alone beside one of them."""
    for k in range(first, last):
        yield (*sets[:k], sets[k] | {block}, *sets[k + 1 :])
    for k in range(first, last + 1):
        yield (*sets[:k], frozenset({block}), *sets[k:])


def _rearranged(sets: Sets, reach: int) -> Iterator[Sets]:
    """Yield the sets with two neighbours merged, two less than `reach` apart exchanged, one moved, all reversed."""
    for k in range(len(sets) - 1):
        yield (*sets[:k], sets[k] | sets[k + 1], *sets[k + 2 :])
    for k, m in combinations(range(len(sets)), 2):
        if m - k < reach:
            changed = list(sets)
            changed[k], changed[m] = sets[m], sets[k]
            yield tuple(changed)
            yield (*sets[:k], *sets[k + 1 : m + 1], sets[k], *sets[m + 1 :])
            yield (*sets[:k], sets[m], *sets[k:m], *sets[m + 1 :])
    yield tuple(reversed(sets))


_MAX_BLOCKS = 24
_MAX_POINTS = 40
_BY_HOST_UP_TO = 8
_SPEED_AT = 4
"""Samples at which kinds are compared."""


class Blocks(Record):
    """Blocks with what the search asks of each."""

    blocks: tuple[Block, ...]
    classes: tuple[object, ...]
    """Equal for blocks that stand for each other."""
    groups: tuple[tuple[int, ...], ...]
    """Blocks of one kind in one site, by falling speed."""
    sites: tuple[str, ...]
    """By block."""


def blocks_of(profile: Profile, devices: tuple[str, ...], costs: PartCosts) -> Blocks:
    """Return the blocks of devices; no block has devices of two kinds, memories or sites."""
    table = profile.cluster.device_by_name
    members: dict[tuple[object, ...], list[str]] = {}
    for name in devices:
        device = table[name]
        shared = len(profile.cluster.host_by_name[device.host].devices) > 1
        host = device.host if shared and len(devices) <= _BY_HOST_UP_TO else ""
        # Where each is a block of its own, two numbers do not stand for each other: more changes are looked at.
        backend = device.backend if len(devices) <= _MAX_BLOCKS else ""
        members.setdefault((device.site, *device.make, backend, host), []).append(name)
    blocks: list[Block] = []
    classes: list[object] = []
    # Powers of two: hosts mostly hold as many, and stages of such widths hand over without many small pieces.
    width = 1
    while len(devices) > width * _MAX_BLOCKS:
        width *= 2
    for key, names in members.items():
        for first in range(0, len(names), width):
            block = tuple(names[first : first + width])
            blocks.append(block)
            classes.append((key, len(block)))
    groups: dict[tuple[str, str], list[int]] = {}
    for number, block in enumerate(blocks):
        device = table[block[0]]
        groups.setdefault((device.site, device.kind), []).append(number)

    def seconds(number: int) -> float:
        return costs.replica_seconds(blocks[number][0], _SPEED_AT)

    return Blocks(
        blocks=tuple(blocks),
        classes=tuple(classes),
        groups=tuple(sorted(map(tuple, groups.values()), key=lambda group: seconds(group[0]))),
        sites=tuple(table[block[0]].site for block in blocks),
    )


def grid_of(units: int) -> tuple[int, ...]:
    """Return the units at which cuts may lie: all of them, or evenly spread ones."""
    if units <= _MAX_POINTS:
        return tuple(range(units + 1))
    return tuple(sorted({round(k * units / _MAX_POINTS) for k in range(_MAX_POINTS + 1)}))


def site_distances(profile: Profile, blocks: Blocks) -> dict[tuple[str, str], float]:
    """Return the seconds of a message of a mebibyte between sites, of one device each."""
    first = {site: block[0] for site, block in reversed(list(zip(blocks.sites, blocks.blocks, strict=True)))}
    found = {}
    for a, b in permutations(first, 2):
        link = profile.link(first[a], first[b])
        found[a, b] = float("inf") if link is None else link.latency_s + link.busy_seconds(2**20)
    return found
