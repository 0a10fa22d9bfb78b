"""Places the cuts of many pipelines at once, and bounds them: what the search of `auto` looks at plans with."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spantrain.planner.strategies.auto_bound import pipeline_bounds_s, values
from spantrain.planner.strategies.auto_hops import Array, Part
from spantrain.planner.strategies.auto_parts import PartCosts
from spantrain.planner.strategies.auto_shape import Shape

__all__ = ["Bounded", "Cutter", "Parts"]

Parts = tuple[Part, ...]
_INPUT_SHARE = 0.5
"""Part of the way down that counts as filling: of the terms of the bound one has none of it, the other all."""


class Bounded(NamedTuple):
    """A shape with lower bounds on its step and on the objective; both are infinite where it does not fit."""

    value: float
    step_s: float
    shape: Shape


class Cutter:
    """Finds cuts by dynamic programme and bounds what comes out, for many pipelines at once."""

    def __init__(self, costs: PartCosts) -> None:
        self._costs = costs
        self._end = len(costs.grid) - 1
        self._position = {unit: index for index, unit in enumerate(costs.grid)}
        self._barriers: dict[frozenset[str], float] = {}

    def solved(self, size: int, pipelines: Sequence[Parts]) -> list[Bounded]:
        """Return each pipeline with its best cuts; those that do not fit are left out."""
        by_length: dict[int, list[Parts]] = {}
        for parts in pipelines:
            if len(parts) <= self._end:
                by_length.setdefault(len(parts), []).append(parts)
        found = []
        for rows in by_length.values():
            found += self._bounded(size, rows, self._solve(size, rows))
        return found

    def bounded(self, shapes: Sequence[Shape]) -> list[Bounded]:
        """Return shapes of one micro-batch size with their bounds; those that do not fit are left out."""
        by_length: dict[int, list[Shape]] = {}
        for shape in shapes:
            by_length.setdefault(len(shape.parts), []).append(shape)
        found = []
        for rows in by_length.values():
            cuts = np.array([[self._position[unit] for unit in shape.begins] for shape in rows])
            found += self._bounded(rows[0].size, [shape.parts for shape in rows], cuts)
        return found

    def _solve(self, size: int, rows: Sequence[Parts]) -> NDArray[np.int64]:
        """Place cuts so that the largest of what precedes a stage and its work is least (as in `planner.cuts`).

        The work of a stage whose memory is short is what its spans wait for: so often the way to the end and back. A
        busy link comes on top of the way from there to the end and back.
        """
        batch = self._costs.batch(size)
        end, count = self._end, len(rows[0])
        columns = [np.array([self._costs.part(parts[k], batch) for parts in rows]) for k in range(count)]
        last = columns[-1][:, :, :, end]
        back = last[:, 0] + last[:, 1]
        value = np.maximum(last[:, 3] + last[:, 7], last[:, 8] * (back + last[:, 2]))
        choices: list[NDArray[np.int64]] = []
        for k in range(count - 2, -1, -1):
            part = columns[k]
            hops = np.array([self._costs.hop(parts[k], parts[k + 1], batch) for parts in rows])
            busy = np.maximum(hops[:, 2], hops[:, 3]) + back
            beyond = hops[:, 0] + _INPUT_SHARE * hops[:, 1] + np.maximum(value, busy)
            round_s = part[:, 0] + part[:, 1] + (hops[:, 0] + hops[:, 1] + back)[:, None, :]
            run = np.maximum(part[:, 3] + part[:, 7], part[:, 8] * (round_s + part[:, 2]))
            table = np.maximum(run, part[:, 0] + _INPUT_SHARE * part[:, 1] + beyond[:, None, :])
            choice = table.argmin(axis=2)[:, :, None]
            value = np.take_along_axis(table, choice, axis=2)[:, :, 0]
            back = np.take_along_axis(round_s, choice, axis=2)[:, :, 0]
            choices.append(choice[:, :, 0])
        begins = [np.zeros(len(rows), dtype=np.int64)]
        everyone = np.arange(len(rows))
        for choice in reversed(choices):
            begins.append(choice[everyone, begins[-1]])
        begins.append(np.full(len(rows), end))
        return np.stack(begins, axis=1)

    def _bounded(self, size: int, rows: Sequence[Parts], cuts: NDArray[np.int64]) -> list[Bounded]:
        batch = self._costs.batch(size)
        parts: list[Array] = []
        hops: list[Array] = []
        for k in range(len(rows[0])):
            begin_end = zip(rows, cuts[:, k], cuts[:, k + 1], strict=True)
            parts.append(np.array([self._costs.part(row[k], batch)[:, i, j] for row, i, j in begin_end]).T)
        for k in range(len(rows[0]) - 1):
            at = zip(rows, cuts[:, k + 1], strict=True)
            hops.append(np.array([self._costs.hop(row[k], row[k + 1], batch)[:, j] for row, j in at]).T)
        devices = [[name for part in row for name in part.devices] for row in rows]
        tied = np.array([self._tied_s(row) for row in rows])
        step_s = pipeline_bounds_s(parts, hops, tied) + np.array([self._barrier_s(names) for names in devices])
        weights = self._costs.weights
        per_second = np.array([weights.per_second(names) for names in devices])
        value = values(parts, hops, per_second, step_s, counts_more=weights.counts_more)
        units = np.array(self._costs.grid)[cuts]
        return [
            Bounded(float(value[n]), float(step_s[n]), Shape(size=size, parts=row, begins=tuple(map(int, units[n]))))
            for n, row in enumerate(rows)
            if np.isfinite(step_s[n])
        ]

    def _tied_s(self, parts: Parts) -> float:
        return 0.0 if len(parts) == 1 else self._costs.tied_s(parts[0].devices[0], parts[-1].devices[0])

    def _barrier_s(self, devices: Sequence[str]) -> float:
        key = frozenset(devices)
        found = self._barriers.get(key)
        if found is None:
            found = self._barriers[key] = self._costs.barrier_s(devices)
        return found
