"""Places the cuts of many pipelines at once, and bounds them: what the search of `auto` looks at plans with.

The bounds are seconds that no order of work can beat. The terms are those of DESIGN section 5 for unequal stages.
Signs: stages s = 0 .. P-1; F, I, W are the least seconds of one span on any replica of a stage; `up` and `down` those
of the messages of one span; run, run_fi, run_f, run_i the seconds of a whole step on the busiest replica. Whatever the
order of work:

- arrival_s = sum over t < s of F_t + up_t: nothing is at stage s before;
- way_s = sum over t < s of down_t + I_t: what follows the end of an I of stage s until the last I of stage 0 that
  needs it; then comes its W, what is left of the gradient sum of stage 0, and that of what it shares with the last
  stage (`tied`), together `end`;
- after_s: what follows the end of an F of stage s, through the last stage, until that last I;
- gradient_s: the first gradient at stage s.

A replica does one action at a time, so the step takes at least: arrival_s + run + sum_s (what is left of the gradient
sum of s behind its last action, beside which it begins at the earliest); arrival_s + run_fi + way_s + end (some I is
last, its way down follows); arrival_s + run_f + after_s + end; gradient_s + run_i + way_s + end. A link that is busy
for so long, in the same way. A span is held by its replica from F to W, for at least round_s = gradient_s - arrival_s
+ I + W; n samples of which at most K are held at once need n * round_s / K seconds from arrival_s on, and if they come
in m equal spans of which k fit, ceil(m / k) * round_s. Afterwards comes the barrier.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spantrain.cost.span_tables import Array
from spantrain.planner.strategies.auto.hops import Batch, PipelinePart
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.shape import PlanShape


def pipeline_bounds_s(parts: Sequence[Array], hops: Sequence[Array], tied_s: Array | float) -> Array:
    """Return the least seconds until all gradients are summed; `tied_s` those of what first and last stage share.

    `parts[s][field]` and `hops[s][field]` (one fewer) are arrays of one shape, one entry for each plan; fields as in
    `parts`. Infinite where a part does not fit.
    """
    count = len(parts)
    arrival: list[Array] = [np.zeros_like(parts[0][0])]
    way: list[Array] = [arrival[0]]
    for part, hop in zip(parts[:-1], hops, strict=True):
        arrival.append(arrival[-1] + part[0] + hop[0])
        way.append(way[-1] + hop[1] + part[1])
    end = parts[0][2] + parts[0][7] + tied_s
    best = arrival[0]
    gradient = arrival[-1] + parts[-1][0]
    after = parts[-1][1] + way[-1]
    for s in range(count - 1, -1, -1):
        part = parts[s]
        if s < count - 1:
            upper, hop = parts[s + 1], hops[s]
            first_input = gradient + upper[1]
            best = np.maximum(best, arrival[s] + part[0] + hop[2] + hop[4] + upper[0] + after + end)
            best = np.maximum(best, first_input + hop[3] + hop[5] + part[1] + way[s] + end)
            gradient = first_input + hop[1]
            after = np.maximum(hop[0] + upper[0] + after, part[1] + way[s])
        summed = part[7] if 0 < s < count - 1 else part[7] + tied_s
        best = np.maximum(best, arrival[s] + part[3] + summed)
        tail = np.maximum(part[4] + way[s], part[5] + after)
        best = np.maximum(best, arrival[s] + tail + end)
        best = np.maximum(best, gradient + part[6] + way[s] + end)
        round_s = gradient - arrival[s] + part[1] + part[2]
        best = np.maximum(best, arrival[s] + part[8] * round_s)
    return best


def values(
    parts: Sequence[Array], hops: Sequence[Array], per_second: Array | float, step_s: Array, *, counts_more: bool
) -> Array:
    """Return the least value of the objective of plans whose steps take at least so long."""
    found: Array = per_second * step_s
    if counts_more:
        found = found + sum(part[9] for part in parts) + sum(hop[6] for hop in hops)
    return found


Parts = tuple[PipelinePart, ...]
_INPUT_SHARE = 0.5
"""Part of the way down that counts as filling: of the terms of the bound one has none of it, the other all."""
_ALL_CUTS = 130
"""Where there are at most so many ways to cut a pipeline, all are tried: the programme sees but part of the bound."""
_FEW = 8
"""The step of up to so many micro-batches is mostly the way up and down: then cuts for all of it are tried too."""


class Bounded(NamedTuple):
    """A shape with lower bounds on its step and on the objective, and what both may come to."""

    value: float
    step_s: float
    shape: PlanShape
    expected_value: float
    expected_s: float
    """The same terms, of the slowest replicas: unlike ones seldom wait for each other as little as bounds must take."""


class _ProgrammeTables(NamedTuple):
    """What the programme reads of a part, by first and last unit."""

    run: Array
    turn: Array
    """What of one span counts as filling."""
    way: Array
    """F and I of one span."""
    round_s: Array
    """F, I and W of one span."""
    crowd: Array | None
    """None where nothing waits for memory."""


class Cutter:
    """Finds cuts by dynamic programme and bounds what comes out, for many pipelines at once."""

    def __init__(self, costs: PartCosts) -> None:
        self._costs = costs
        self._end = len(costs.grid) - 1
        self._position = {unit: index for index, unit in enumerate(costs.grid)}
        self._barriers: dict[frozenset[str], float] = {}
        self._tied_s, self._all_cuts = cache(costs.tied_s), cache(self._cuts_into)
        self._steps: dict[tuple[int, float], tuple[Array, _ProgrammeTables]] = {}
        """By identity of a part's fields, which are kept beside so that it stays theirs."""

    def solved(self, size: int, pipelines: Sequence[Parts]) -> list[Bounded]:
        """Return each pipeline with its best cuts; those that do not fit are left out."""
        by_length: dict[int, list[Parts]] = {}
        for parts in pipelines:
            if len(parts) <= self._end:
                by_length.setdefault(len(parts), []).append(parts)
        found = []
        for count, rows in by_length.items():
            if count > 1 and comb(self._end - 1, count - 1) <= _ALL_CUTS:
                found += self._bounded(size, rows, self._best_of_all(size, rows))
                continue
            cuts = self._solve(size, rows, _INPUT_SHARE)
            found += self._bounded(size, rows, cuts)
            if count > 1 and self._costs.batch(size).whole <= _FEW:
                others = self._solve(size, rows, 1.0)
                new = np.flatnonzero((others != cuts).any(axis=1))
                if len(new):
                    found += self._bounded(size, [rows[n] for n in new], others[new])
        return found

    def _best_of_all(self, size: int, rows: Sequence[Parts]) -> NDArray[np.int64]:
        """Return for each pipeline the cuts from which the least is expected, of all that there are."""
        cuts, batch, count = self._all_cuts(len(rows[0])), self._costs.batch(size), len(rows[0])
        columns, parts, hops = len(rows) * len(cuts), list[Array](), list[Array]()
        for k in range(count):
            tables = np.array([self._costs.part(row[k], batch) for row in rows])
            fields = tables[:, :, cuts[:, k], cuts[:, k + 1]].swapaxes(0, 1).reshape(-1, columns)
            parts.append(_likely(fields))
        for k in range(count - 1):
            tables = np.array([self._costs.hop(row[k], row[k + 1], batch) for row in rows])
            hops.append(tables[:, :, cuts[:, k + 1]].swapaxes(0, 1).reshape(-1, columns))
        # What all cuts of a pipeline have in common does not matter here.
        step_s = pipeline_bounds_s(parts, hops, 0.0)
        weights = self._costs.weights
        per_second = np.repeat(
            [weights.per_second([name for part in row for name in part.devices]) for row in rows], len(cuts)
        )
        value = values(parts, hops, per_second, step_s, counts_more=weights.counts_more)
        best: NDArray[np.int64] = cuts[value.reshape(len(rows), len(cuts)).argmin(axis=1)]
        return best

    def _cuts_into(self, count: int) -> NDArray[np.int64]:
        """Return all cuts into so many parts."""
        places = combinations(range(1, self._end), count - 1)
        return np.array([(0, *middle, self._end) for middle in places], dtype=np.int64)

    def bounded(self, shapes: Sequence[PlanShape]) -> list[Bounded]:
        """Return shapes with their bounds; those that do not fit are left out."""
        alike: dict[tuple[int, int], list[PlanShape]] = {}
        for shape in dict.fromkeys(shapes):
            alike.setdefault((shape.size, len(shape.parts)), []).append(shape)
        found = []
        for (size, _), rows in alike.items():
            cuts = np.array([[self._position[unit] for unit in shape.begins] for shape in rows])
            found += self._bounded(size, [shape.parts for shape in rows], cuts)
        return found

    def _solve(self, size: int, rows: Sequence[Parts], input_share: float) -> NDArray[np.int64]:
        """Place cuts so that the most of what precedes a stage and its work is least (as in `spantrain-dp`).

        The work of a stage whose memory is short is what its spans wait for: so often the way to the end and back. A
        busy link comes on top of the way from there to the end and back.
        """
        batch = self._costs.batch(size)
        end, count = self._end, len(rows[0])
        everyone, places = np.arange(len(rows)), np.arange(end + 1)
        last = np.array([self._costs.part(parts[-1], batch)[:, :, end] for parts in rows])
        back = last[:, 10] + last[:, 11]
        value = np.maximum(_work(last.swapaxes(0, 1), input_share), last[:, 8] * (back + last[:, 12]))
        choices: list[NDArray[np.int64]] = []
        for k in range(count - 2, -1, -1):
            hops = np.array([self._costs.hop(parts[k], parts[k + 1], batch) for parts in rows])
            busy = np.maximum(hops[:, 2], hops[:, 3]) + back
            beyond = hops[:, 0] + input_share * hops[:, 1] + np.maximum(value, busy)
            further = hops[:, 0] + hops[:, 1] + back
            table = np.empty((len(rows), end + 1, end + 1))
            steps = [self._step(parts[k], batch, input_share) for parts in rows]
            for row, step in enumerate(steps):
                np.add(step.turn, beyond[row], out=table[row])
                np.maximum(table[row], step.run, out=table[row])
                if step.crowd is not None:
                    np.maximum(table[row], step.crowd * (step.round_s + further[row]), out=table[row])
            choice = table.argmin(axis=2)
            value = table[everyone[:, None], places, choice]
            own = np.array([step.way[places, choice[row]] for row, step in enumerate(steps)])
            back = own + further[everyone[:, None], choice]
            choices.append(choice)
        begins = [np.zeros(len(rows), dtype=np.int64)]
        for choice in reversed(choices):
            begins.append(choice[everyone, begins[-1]])
        begins.append(np.full(len(rows), end))
        return np.stack(begins, axis=1)

    def _step(self, part: PipelinePart, batch: Batch, input_share: float) -> _ProgrammeTables:
        fields = self._costs.part(part, batch)
        found = self._steps.get((id(fields), input_share))
        if found is None:
            way = fields[10] + fields[11]
            step = _ProgrammeTables(
                run=_work(fields, input_share),
                turn=fields[10] + input_share * fields[11],
                way=way,
                round_s=way + fields[12],
                crowd=fields[8] if fields[8].any() else None,
            )
            found = self._steps[id(fields), input_share] = (fields, step)
        return found[1]

    def _bounded(self, size: int, rows: Sequence[Parts], cuts: NDArray[np.int64]) -> list[Bounded]:
        batch, weights = self._costs.batch(size), self._costs.weights
        parts: list[Array] = []
        hops: list[Array] = []
        for k in range(len(rows[0])):
            begin_end = zip(rows, cuts[:, k], cuts[:, k + 1], strict=True)
            parts.append(np.array([self._costs.part(row[k], batch)[:, i, j] for row, i, j in begin_end]).T)
        for k in range(len(rows[0]) - 1):
            at = zip(rows, cuts[:, k + 1], strict=True)
            hops.append(np.array([self._costs.hop(row[k], row[k + 1], batch)[:, j] for row, j in at]).T)
        devices = [[name for part in row for name in part.devices] for row in rows]
        ends = ((row[0].devices[0], row[-1].devices[0]) for row in rows)
        tied = np.array([self._tied_s(*pair) if len(parts) > 1 else 0.0 for pair in ends])
        barrier = np.array([self._barrier_s(names) for names in devices])
        step_s, expected_s = (seconds + barrier for seconds in _steps_s(parts, hops, tied))
        per_second, more = np.array([weights.per_second(names) for names in devices]), weights.counts_more
        value, expected = (values(parts, hops, per_second, s, counts_more=more) for s in (step_s, expected_s))
        units = np.array(self._costs.grid)[cuts].tolist()
        columns = zip(value.tolist(), step_s.tolist(), rows, units, expected.tolist(), expected_s.tolist(), strict=True)
        return [
            Bounded(bound, bound_s, PlanShape(size=size, parts=row, begins=tuple(begins)), likely, likely_s)
            for bound, bound_s, row, begins, likely, likely_s in columns
            if bound_s < float("inf")
        ]

    def _barrier_s(self, devices: Sequence[str]) -> float:
        key = frozenset(devices)
        found = self._barriers.get(key)
        if found is None:
            found = self._barriers[key] = self._costs.barrier_s(devices)
        return found


def _steps_s(parts: list[Array], hops: list[Array], tied_s: Array) -> tuple[Array, Array]:
    """Return the bound of each plan, and the same of the slowest replicas' spans; by one call, which is cheaper."""
    count = len(tied_s)
    if all(np.array_equal(part[:10], _likely(part)) for part in parts):
        seconds = pipeline_bounds_s(parts, hops, tied_s)
        return seconds, seconds
    both = [np.hstack([part[:10], _likely(part)]) for part in parts]
    seconds = pipeline_bounds_s(both, [np.hstack([hop, hop]) for hop in hops], np.hstack([tied_s, tied_s]))
    return seconds[:count], seconds[count:]


def _likely(fields: Array) -> Array:
    """Return a part's fields with what is likely of its spans and its gradient sum in the places of the least."""
    return np.vstack([fields[10:13], fields[3:7], fields[13:14], fields[8:10]])


def _work(fields: Array, input_share: float) -> Array:
    """Return what a part has to do, by field first; between a span's ways up and down there is no W."""
    run = fields[3] if input_share < 1 else np.where(np.isfinite(fields[3]), fields[4], np.inf)
    work: Array = run + fields[13]
    return work
