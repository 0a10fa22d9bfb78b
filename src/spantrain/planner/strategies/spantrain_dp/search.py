"""Domains, orders, layouts and micro-batch sizes: the candidates, bounded cheaply, solved, best first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from spantrain.planner.assembly.cuts import best_cuts
from spantrain.planner.assembly.layouts import Layout, Slot, domain_layouts, domain_orders
from spantrain.planner.assembly.tables import Tables
from spantrain.planner.groups import Group, Groups

_CONFIGURATIONS = 6000
_LEAST_PER_ORDER = 12
_SOLVED_AT_MOST = 3000
_KEEP_WITHIN = 1.15
_BOUND_SLACK = 0.9
"""The bound adds rates of slots over the whole model; units that suit a kind better can beat it a little."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Domains in order, their slots, a micro-batch size, and (once solved) where the cuts are."""

    order: tuple[str, ...]
    slots: tuple[Slot, ...]
    size: int
    bound_s: float
    value_s: float = float("inf")
    begins: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in use."""
        return tuple(device for slot in self.slots for device in slot)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found."""

    solved: tuple[Candidate, ...]
    """Best first."""
    least_bound_s: dict[str, float] = field(default_factory=dict)
    """By device: the smallest bound of any candidate with it."""


@dataclass(frozen=True)
class _Sketch:
    """What a layout adds to a bound, for one micro-batch size."""

    rate: float
    busy: float
    latency: float


def search(tables: Tables, groups: Groups) -> SearchResult:
    """Enumerate the candidates, then solve them by rising bound until the rest cannot be near the best."""
    waiting = sorted(_enumerate(tables, groups), key=lambda candidate: candidate.bound_s)
    least: dict[str, float] = {}
    for candidate in waiting:
        for device in candidate.devices:
            least.setdefault(device, candidate.bound_s)
    solved: list[Candidate] = []
    best = float("inf")
    for candidate in waiting[:_SOLVED_AT_MOST]:
        if candidate.bound_s * _BOUND_SLACK > best * _KEEP_WITHIN:
            break
        done = _solve(tables, candidate)
        if done is not None:
            solved.append(done)
            best = min(best, done.value_s)
    solved.sort(key=lambda candidate: candidate.value_s)
    return SearchResult(solved=tuple(solved), least_bound_s=least)


def _solve(tables: Tables, candidate: Candidate) -> Candidate | None:
    slots = [tables.slot(slot, candidate.size) for slot in candidate.slots]
    hops = [tables.hop(a, b, candidate.size) for a, b in zip(candidate.slots[:-1], candidate.slots[1:], strict=True)]
    value_s, begins = best_cuts([slot for slot in slots if slot is not None], hops)
    if value_s == float("inf"):
        return None
    return Candidate(
        order=candidate.order,
        slots=candidate.slots,
        size=candidate.size,
        bound_s=candidate.bound_s,
        value_s=value_s,
        begins=begins,
    )


def _enumerate(tables: Tables, groups: Groups) -> Iterator[Candidate]:
    orders = domain_orders(groups, tables.profile)
    alone = {group.name: domain_layouts(group, tables.profile, 4) for group in groups.first_level}
    among = {group.name: domain_layouts(group, tables.profile, 2) for group in groups.first_level}
    allowance = max(_CONFIGURATIONS // len(orders), _LEAST_PER_ORDER)
    sketches: dict[tuple[Layout, int], _Sketch | None] = {}
    for order in orders:
        choices = [alone[order[0].name]] if len(order) == 1 else _trimmed([among[g.name] for g in order], allowance)
        for layouts in product(*choices):
            yield from _sized(tables, order, layouts, sketches)


def _trimmed(choices: list[tuple[Layout, ...]], allowance: int) -> list[tuple[Layout, ...]]:
    """Shorten the longest lists (their ends: fewest devices) until the product is within the allowance."""

    def combinations() -> int:
        total = 1
        for layouts in choices:
            total *= len(layouts)
        return total

    while combinations() > allowance and max(map(len, choices)) > 1:
        longest = max(range(len(choices)), key=lambda index: len(choices[index]))
        choices[longest] = choices[longest][:-1]
    return choices


def _sized(
    tables: Tables,
    order: tuple[Group, ...],
    layouts: tuple[Layout, ...],
    sketches: dict[tuple[Layout, int], _Sketch | None],
) -> Iterator[Candidate]:
    slots = tuple(slot for layout in layouts for slot in layout)
    if len(slots) > tables.units:
        return
    names = tuple(group.name for group in order)
    for size in tables.job.micro_batch_sizes():
        parts = []
        for layout in layouts:
            if (layout, size) not in sketches:
                sketches[layout, size] = _sketch(tables, layout, size)
            parts.append(sketches[layout, size])
        whole = [part for part in parts if part is not None]
        if len(whole) == len(parts):
            bound_s = _bound(tables, layouts, whole, size)
            yield Candidate(order=names, slots=slots, size=size, bound_s=bound_s)


def _sketch(tables: Tables, layout: Layout, size: int) -> _Sketch | None:
    rate = busy = latency = 0.0
    for slot in layout:
        table = tables.slot(slot, size)
        if table is None:
            return None
        rate += table.rate
    for a, b in pairwise(layout):
        hop = tables.hop(a, b, size)
        busy, latency = max(busy, hop.least_busy), latency + hop.latency_s
    return _Sketch(rate, busy, latency)


def _bound(tables: Tables, layouts: Sequence[Layout], parts: Sequence[_Sketch], size: int) -> float:
    rate, busy, latency = sum(p.rate for p in parts), max(p.busy for p in parts), sum(p.latency for p in parts)
    for a, b in pairwise(layouts):
        hop = tables.hop(a[-1], b[0], size)
        busy, latency = max(busy, hop.least_busy), latency + hop.latency_s
    return max(1 / rate, busy) + latency
