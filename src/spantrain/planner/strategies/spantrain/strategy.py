"""`spantrain`: the planner of the English SpanTrain paper (section 3.3): cost model, beam search, second level.

Kept: equation 1, T* = the largest over stages s of fill + B t_s^c + sum of t^l + AL; first-level groups by network
measurements (section 3.2.2); algorithm 1 for every micro-batch size (`ways.Beam`); inside a group the asymmetric
pipelines, data and tensors of figure 7, each evaluated, the best taken (`ways`); the store of past results.

What the paper leaves open is read as follows (`tables`). B counts micro-batches; t^c has F, I and W as they
were measured, and tensor sums, which delay every action. The fill is the way of the first activations there and of the
last gradients back: equation 1 as printed has no way back, equation 4 of the Chinese paper has. t^l, what of the
communication no compute hides, is by how much a link or port is busy for longer than what lies behind it computes;
summed over all predecessors, one wait would count several times. AL is the ring sum of gradients; a stage begins it
when its last gradient has come, so when those behind it are done (equation 4 again).

Added: memory as a hard limit; parameters that stages share; no stage is done before its last micro-batch has been
through all behind it and back; groups, and parts of groups, may be left out, but for those that are to be kept. Not
kept: the batch size as a dimension, which is the job's; the paper's own order of work, `compact`, in place of the
job's. `spantrain_paper` has that order and leaves no device out; what else is added stays. What no term counts is a W
in progress that holds up a gradient; it shows where micro-batches are few.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from spantrain.core.plan import Plan
from spantrain.core.quantities import format_seconds
from spantrain.core.records import Record
from spantrain.cost.span_tables import Array
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import ReplicaDevices, Row, infeasible, stages_between
from spantrain.planner.groups import DeviceGroup, group_levels
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.spantrain.tables import WayArrays, WayTables
from spantrain.planner.strategies.spantrain.ways import Arrangement, Beam, Slot, Way, ways_of


def build_plan(tables: WayTables, slots: Sequence[Slot], cuts: Sequence[int], size: int) -> Plan | None:
    """Return the plan of slots that begin at these units (and the end); None if a replica's samples do not fit."""

    def rows(number: int, timed: range) -> list[Row]:
        counts = tables.counts(slots[number], timed, size)
        return [(one.devices, n, one.tp_shares) for one, n in zip(slots[number].members, counts, strict=True)]

    stages = stages_between(cuts, size, tables.job, tables.memory, rows)
    return tables.job.plan_of(tables.profile, stages) if stages else None


_PROPOSED, _OF_EACH_SPACE = 6, 3
_PER_SIZE = 2
"""Arrangements of one micro-batch size among them."""
_DIVIDED = 3
"""Groups that the network is divided into at most where devices are to be kept, beside the first-level ones."""
_MAX_DEVICES = 128
_NEARLY = 1.5
"""Ways of a group that take so much longer alone are not looked at together with the others."""
_TOO_MUCH_S = 1e9
"""What each unit that does not fit where it is costs: more than any step."""
MayDivide = Callable[[Sequence[str]], bool]
"""Says whether the devices of a group may divide tensors among themselves."""


def spantrain(request: PlanRequest, may_divide: MayDivide = lambda _devices: True) -> tuple[Proposal, ...]:
    """Propose the best arrangements by equation 1, of several micro-batch sizes; `may_divide`: which groups tensors.

    Where `Constraints.second_level` is False (the paper's ablation, section 4.3.3), a first-level group is one stage
    whose devices share evenly.

    Raises:
        InfeasiblePlanError: nothing fits into memory; the numbers are in the message.
        ProfileError: the profile lacks a timing or a link.
    """
    # Where a group must take part, how the network is divided shapes what can be said: so other divisions are tried.
    return _proposals(request, may_divide, most_divisions=_DIVIDED if request.constraints.keep else 0)


def spantrain_paper(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose arrangements of all devices in the paper's own order of work, `compact`, whatever the job's is.

    The paper's adapter is `spantrain train --adapter paper`.

    Raises:
        InfeasiblePlanError: no arrangement of all devices fits into memory.
        ProfileError: the profile lacks a timing or a link.
    """
    everyone = replace(request.constraints, keep=request.devices_within_quotas)
    job = replace(request.job, schedule="compact")
    return _proposals(replace(request, job=job, constraints=everyone), lambda _devices: True, most_divisions=0)


def _proposals(request: PlanRequest, may_divide: MayDivide, *, most_divisions: int) -> tuple[Proposal, ...]:
    """Return the best arrangements; the network may be divided into so many groups beside the first-level ones."""
    devices = request.devices_within_quotas
    if len(devices) > _MAX_DEVICES:
        raise InfeasiblePlanError(f"groups devices by pairs, {_MAX_DEVICES} devices at most, got {len(devices)}")
    tables = WayTables(request.profile, request.job)
    keep = frozenset(request.constraints.keep)
    divisions = group_levels(request.profile, devices, most=most_divisions)
    groups = divisions[0]
    # Whole groups as one stage are among the ways with the second level, but its search may end elsewhere.
    levels = dict.fromkeys((request.constraints.second_level, False))
    every = [_GroupSpace(tables, own, keep, may_divide, second_level=level) for own in divisions for level in levels]
    spaces = [space for number, space in enumerate(every) if all(space.ways != one.ways for one in every[:number])]
    rows = [_ranked(space, request.job.micro_batch_sizes()) for space in spaces]
    ranked = [
        found
        for part in (slice(_OF_EACH_SPACE), slice(_OF_EACH_SPACE, None))
        for found in sorted((found for row in rows for found in row[part]), key=attrgetter("value_s"))
    ]
    least_with_s = [min(values) for values in zip(*(one.least_with_s for one in every[: len(levels)]), strict=True)]
    proposals: list[Proposal] = []
    for found in ranked:
        plan = build_plan(tables, found.slots, found.cuts, found.size)
        if plan is not None:
            reasons = tuple(_reasons(plan, found, groups, least_with_s))
            proposals.append(Proposal(plan=plan, own_estimate_s=found.value_s, reasons=reasons))
        if len(proposals) == max(_PROPOSED, _OF_EACH_SPACE * len(spaces)):
            break
    if not proposals:
        raise infeasible(request.profile, request.job, devices)
    return tuple(proposals)


def _ranked(space: "_GroupSpace", sizes: Sequence[int]) -> list["_SolvedArrangement"]:
    """Return the best arrangements of all micro-batch sizes, best first."""
    first = dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    ranked = [found for size in first for found in space.best(size)]
    space.narrow()
    ranked += [found for size in sizes if size not in first for found in space.best(size)]
    return sorted(ranked, key=attrgetter("value_s"))


class _SolvedArrangement(Record):
    """What algorithm 1 came to for one micro-batch size."""

    size: int
    value_s: float
    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]


class _Piece(NamedTuple):
    """A first-level group with units."""

    group: int
    first: int
    end: int


class _PieceSeconds(NamedTuple):
    """A first-level group with units in one of its ways: the figures of `WayArrays`."""

    way: WayArrays
    key: tuple[int, int]
    """Of the way: its group, and its number there."""
    first: int
    end: int
    drained: float
    tail: float
    back: float
    turn: float
    pace: float
    refills: float
    holders: tuple[tuple[str, ...], ...]
    """By parameter that stages share: the leaders of those of its slots that hold it."""


class _GroupSpace:
    """First-level groups with their ways, and what arrangements of them take."""

    def __init__(
        self, tables: WayTables, groups: Sequence[DeviceGroup], keep: frozenset[str], may_divide: MayDivide, *,
        second_level: bool,
    ) -> None:  # fmt: skip
        self._tables = tables
        profile = tables.profile
        capacity = cache(tables.capacity)
        tensors = any(unit.tensor_sums for unit in profile.graph.units)
        site = {device.name: device.site for device in profile.cluster.devices}
        self.ways: list[tuple[Way, ...]] = []
        self._kept: list[bool] = []
        self._best_somewhere: list[set[Way]] = [set() for _ in groups]
        for group in groups:
            divides = tensors and may_divide(group.devices)
            ways = ways_of(group, profile, capacity, second_level=second_level, tensors=divides)
            wanted = {name for device in group.devices for name in (device, site[device]) if name in keep}
            kept = (way for way in ways if wanted <= {n for slot in way for d in slot.devices for n in (d, site[d])})
            self.ways.append(tuple(kept) or ways)
            self._kept.append(bool(wanted))
        self.least_with_s = [float("inf")] * len(groups)
        """By group: the least seconds of any arrangement with it."""
        self._capacities = [sum(map(capacity, group.devices)) for group in groups]
        fastest = max((name for group in groups for name in group.devices), key=capacity)
        alone = ReplicaDevices(devices=(fastest,), tp_shares=(1.0,))
        self._work = [tables.seconds(alone, range(unit, unit + 1), 1) for unit in range(tables.units)]

    def best(self, size: int) -> Iterator[_SolvedArrangement]:
        """Yield the best arrangements for a micro-batch size, the best first."""
        costs = _SizeCosts(self._tables, self.ways, self._kept, size)
        beam = Beam(units=self._tables.units, capacities=self._capacities, work=self._work)
        seen: set[tuple[_Piece, ...]] = set()
        for value_s, arrangement in beam.run(lambda entry: costs.value_s(_pieces(entry))):
            pieces = _pieces(arrangement)
            if value_s >= _TOO_MUCH_S or pieces in seen or len(seen) == _PER_SIZE:
                continue
            seen.add(pieces)
            yield costs.refined(pieces)
        self.least_with_s = list(map(min, self.least_with_s, costs.least_with_s(len(self.ways))))
        for known, ways in zip(self._best_somewhere, costs.best_somewhere(), strict=True):
            known |= ways

    def narrow(self) -> None:
        """Look from now on only at ways that were a group's best for some span of units, at some size."""
        pairs = zip(self.ways, self._best_somewhere, strict=True)
        self.ways = [tuple(way for way in ways if way in best) or ways for ways, best in pairs]


def _pieces(arrangement: Arrangement) -> tuple[_Piece, ...]:
    found, first = [], 0
    for group, count in arrangement:
        if count:
            found.append(_Piece(group, first, first + count))
        first += count
    return tuple(found)


class _SizeCosts:
    """Equation 1 of arrangements for one micro-batch size."""

    def __init__(self, tables: WayTables, ways: Sequence[Sequence[Way]], kept: Sequence[bool], size: int) -> None:
        self._tables, self._size = tables, size
        self._kept = [number for number, wanted in enumerate(kept) if wanted]
        arrays = [[tables.way(way, size) for way in group] for group in ways]
        self._ways = [[entry for entry in group if entry is not None] for group in arrays]
        nothing = np.full(tables.spans.above.shape, np.inf)
        rows = ([entry.drained + entry.tail + entry.tied for entry in group] for group in self._ways)
        stacks = [np.array(row or [nothing]) for row in rows]
        self._chosen = [stack.argmin(axis=0) for stack in stacks]
        self._least = [stack.min(axis=0) for stack in stacks]
        self._reach = list(map(_reach, self._least))
        self._known: dict[tuple[_Piece, ...], float] = {}
        self._shared_bytes = tables.profile.graph.trained_shared_bytes
        self._seconds, self._hop_seconds = cache(self._seconds_of), cache(self._hop_seconds_of)
        self._exchange_s = cache(tables.spans.network.exchange_s)

    def value_s(self, pieces: tuple[_Piece, ...]) -> float:
        """Return T* with each group's own best way; if something does not fit, more the more of it does not."""
        found = self._known.get(pieces)
        if found is None:
            over = sum(map(self._over, pieces))
            over += sum(all(piece.group != number for piece in pieces) for number in self._kept)
            found = over * _TOO_MUCH_S if over else self._step_s(list(map(self._best_way, pieces)))
            self._known[pieces] = found
        return found

    def refined(self, pieces: tuple[_Piece, ...]) -> _SolvedArrangement:
        """Choose each group's way anew in the place that it has, and return what comes of it."""
        rows = list(map(self._best_way, pieces))
        best_s = self._step_s(rows)
        for place, piece in enumerate(pieces):
            for number in range(len(self._ways[piece.group])):
                row = self._seconds(piece, number)
                if row.drained + row.tail > _NEARLY * float(self._least[piece.group][piece.first, piece.end]):
                    continue
                tried = [*rows[:place], row, *rows[place + 1 :]]
                tried_s = self._step_s(tried)
                if tried_s < best_s:
                    best_s, rows = tried_s, tried
        cuts = [row.way.cuts(row.first, row.end)[:-1] for row in rows]
        return _SolvedArrangement(
            size=self._size,
            value_s=best_s,
            slots=tuple(slot for row in rows for slot in row.way.way),
            cuts=(*(cut for entry in cuts for cut in entry), pieces[-1].end),
        )

    def best_somewhere(self) -> Iterator[set[Way]]:
        """Yield, by group, the ways that are best for some span of units."""
        for ways, chosen, least in zip(self._ways, self._chosen, self._least, strict=True):
            yield {ways[number].way for number in np.unique(chosen[np.isfinite(least)]).tolist()}

    def least_with_s(self, groups: int) -> list[float]:
        """Return the least seconds that were met with each group in it."""
        found = [float("inf")] * groups
        for pieces, value_s in self._known.items():
            for piece in pieces:
                found[piece.group] = min(found[piece.group], value_s)
        return found

    def _over(self, piece: _Piece) -> int:
        """Return how many of a group's units do not fit into it."""
        return piece.end - self._reach[piece.group][piece.first][piece.end]

    def _best_way(self, piece: _Piece) -> _PieceSeconds:
        return self._seconds(piece, int(self._chosen[piece.group][piece.first, piece.end]))

    def _seconds_of(self, piece: _Piece, number: int) -> _PieceSeconds:
        way, at = self._ways[piece.group][number], (piece.first, piece.end)
        units, cuts = self._tables.profile.graph.units, way.cuts(*at)
        slots = list(zip(way.way, cuts[:-1], cuts[1:], strict=True))
        arrays = (way.drained, way.tail, way.back, way.turn, way.pace, way.refills)
        drained, tail, back, turn, pace, refills = (float(one[at]) for one in arrays)
        holders = tuple(
            tuple(slot.devices[0] for slot, i, j in slots if any(name in unit.shared for unit in units[i:j]))
            for name in self._shared_bytes
        )
        return _PieceSeconds(way, (piece.group, number), *at, drained, tail, back, turn, pace, refills, holders)

    def _hop_seconds_of(self, lower: tuple[int, int], upper: tuple[int, int], unit: int) -> tuple[float, float, float]:
        """Return the turn, busy and back seconds of the cut in front of a unit between two groups' ways."""
        (below, one), (above, other) = lower, upper
        slots = self._ways[below][one].way[-1], self._ways[above][other].way[0]
        hop = self._tables.hop(*slots, self._size)
        return float(hop.turn[unit]), float(hop.busy[unit]), float(hop.back[unit])

    def _step_s(self, rows: Sequence[_PieceSeconds]) -> float:
        """Return T*: the largest over all slots and links, and the exchange of parameters that slots share."""
        behind_it = rows[-1]
        drained, tail, turn = behind_it.drained, behind_it.tail, behind_it.turn
        for row in reversed(rows[:-1]):
            hop_turn, hop_busy, hop_back = self._hop_seconds(row.key, behind_it.key, row.end)
            refilled = row.refills * (turn + hop_turn) - hop_turn
            behind = max(drained, hop_busy, turn + row.pace, refilled)
            own_turn = row.turn + hop_turn
            drained, turn = max(row.drained, own_turn + behind), turn + own_turn
            tail = max(row.tail, tail - row.back - hop_back)
            behind_it = row
        value = drained + tail
        return value + self._tied_s(rows) if value < _TOO_MUCH_S else float("inf")

    def _tied_s(self, rows: Sequence[_PieceSeconds]) -> float:
        total = 0.0
        for number, size_bytes in enumerate(self._shared_bytes.values()):
            total += self._exchange_s(tuple(leader for row in rows for leader in row.holders[number]), size_bytes)
        return total


def _reach(least: Array) -> list[list[int]]:
    """Return, as [i][j], up to where a group can hold units from i on, j at most."""
    points = np.arange(len(least))
    held = np.where(np.isfinite(least), points[None, :], points[:, None])
    ends: list[list[int]] = np.maximum.accumulate(held, axis=1).tolist()
    return ends


def _reasons(
    plan: Plan, found: _SolvedArrangement, groups: Sequence[DeviceGroup], least_with_s: Sequence[float]
) -> Iterator[str]:
    yield f"By equation 1, the step takes {format_seconds(found.value_s)} with micro-batches of {found.size}."
    used = set(plan.devices)
    for group, with_s in zip(groups, least_with_s, strict=True):
        missing = [name for name in group.devices if name not in used]
        if len(missing) == len(group.devices):
            fits = f"the best arrangement with it takes {format_seconds(with_s)}"
            why = fits if with_s < _TOO_MUCH_S else "no arrangement with it that was tried fits"
            yield f"Group {group.name} is left out: by equation 1, {why}."
        elif missing:
            yield f"{', '.join(missing)} of {group.name} left out: by equation 1, its others do better without."
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            if len(replica.devices) > 1:
                shares = ":".join(f"{share:g}" for share in replica.tp_shares)
                yield f"Stage {index} divides tensors among {', '.join(replica.devices)} as {shares}."
