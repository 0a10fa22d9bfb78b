"""Seconds and bytes of Metis's device groups for all ranges of units, over their tensor-parallel degrees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from spantrain.core.quantities import format_bytes
from spantrain.core.shares import even_share
from spantrain.core.span import apportion
from spantrain.cost.span_tables import Array, over_spans
from spantrain.planner.assembly.assemble import Assembler, StageShape

Run = tuple[str, int]
"""A kind, and how many of its devices follow each other on one host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupTable:
    """A device group with a micro-batch, for units i to j-1 as [i, j]."""

    seconds: Array
    """Of the degree that is fastest among those that fit; infinite where none does."""
    choice: NDArray[np.intp]
    """Which of the degrees."""
    degrees: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    """By degree: of each replica."""


class GroupCosts:
    """Tables of device groups; groups that are alike have one."""

    def __init__(self, assembler: Assembler, devices: Sequence[str]) -> None:
        self._assembler, self._spans = assembler, assembler.spans
        self._cluster = assembler.profile.cluster
        self._by_kind: dict[str, tuple[str, ...]] = {}
        for _, members in groupby(
            devices, key=lambda name: (self._kind(name), self._cluster.device_by_name[name].host)
        ):
            row = tuple(members)
            if len(row) > len(self._by_kind.get(self._kind(row[0]), ())):
                self._by_kind[self._kind(row[0])] = row
        self.table = cache(self._table)
        """By (runs, samples of a micro-batch, micro-batches held)."""

    def _kind(self, name: str) -> str:
        return self._cluster.device_by_name[name].kind

    @property
    def divides(self) -> bool:
        """Whether tensor parallelism is of any use: a unit can be divided."""
        return any(unit.tensor_sums for unit in self._assembler.profile.graph.units)

    def speed(self, kind: str) -> float:
        """Return the samples per second of the whole model on one device of a kind."""
        return 1 / max(float(self._prefix(kind, 1, 1)[-1]), 1e-12)

    def runs(self, devices: Sequence[str]) -> tuple[Run, ...]:
        """Return the runs that a group of devices, in its order, is made of."""
        found = groupby(devices, key=lambda name: (self._kind(name), self._cluster.device_by_name[name].host))
        return tuple((kind, len(list(members))) for (kind, _), members in found)

    def shape(self, table: GroupTable, units: range, devices: tuple[str, ...]) -> StageShape:
        """Return a group as a stage of some units."""
        index = int(table.choice[units.start, units.stop])
        samples = table.samples[index]
        return StageShape(units=units, devices=devices, shares=samples, degrees=(table.degrees[index],) * len(samples))

    def _table(self, runs: tuple[Run, ...], size: int, held: int) -> GroupTable | None:
        """Return the table of a group; None if it has more replicas than a micro-batch has samples."""
        degrees, samples, tables = [], [], []
        for degree in self._degrees(runs):
            kinds = [kind for kind, count in runs for _ in range(count // degree)]
            parts = self._parts(kinds, degree, size)
            if min(parts) > 0:
                degrees.append(degree)
                samples.append(parts)
                tables.append(self._seconds(frozenset(zip(kinds, parts, strict=True)), degree, held))
        if not tables:
            return None
        stacked = np.stack(tables)
        choice = stacked.argmin(axis=0)
        return GroupTable(seconds=stacked.min(axis=0), choice=choice, degrees=tuple(degrees), samples=tuple(samples))

    def _degrees(self, runs: tuple[Run, ...]) -> list[int]:
        most = min(count for _, count in runs) if self.divides else 1
        powers = (1 << power for power in range(most.bit_length()))
        return [degree for degree in powers if all(count % degree == 0 for _, count in runs)]

    def _parts(self, kinds: Sequence[str], degree: int, size: int) -> tuple[int, ...]:
        """Divide a micro-batch by what the replicas get done (the balance of data)."""
        even = max(1, size // len(kinds))
        return apportion(size, [1 / max(float(self._prefix(kind, degree, even)[-1]), 1e-12) for kind in kinds])

    def _seconds(self, replicas: frozenset[tuple[str, int]], degree: int, held: int) -> Array:
        """Return the slowest replica's seconds, infinite where a device has no room."""
        seconds, fits = np.zeros(self._spans.above.shape), self._spans.above
        for kind, samples in replicas:
            sums = self._prefix(kind, degree, samples)
            seconds = np.maximum(seconds, over_spans(sums))
            device = self._cluster.device_by_name[self._by_kind[kind][0]]
            fits = fits & (self._need(kind, degree, samples, held) <= device.memory_bytes)
        return np.where(fits, seconds, np.inf)

    def _need(self, kind: str, degree: int, samples: int, held: int) -> Array:
        return self._spans.need(self._by_kind[kind][0], samples * held, samples, even_share(degree))

    def _prefix(self, kind: str, degree: int, samples: int) -> Array:
        return self._spans.work(self._by_kind[kind][:degree], (1.0,) * degree, samples)

    def closest_miss(self) -> str:
        """Return what the largest device would need for the unit that needs the most."""
        units = self._assembler.units
        kind = max(self._by_kind, key=lambda name: self._cluster.device_by_name[self._by_kind[name][0]].memory_bytes)
        need = self._need(kind, 1, 1, 1)
        unit = max(range(units), key=lambda index: float(need[index, index + 1]))
        have = self._cluster.device_by_name[self._by_kind[kind][0]].memory_bytes
        return (
            f"a {kind} needs {format_bytes(need[unit, unit + 1])} for unit {unit} with one sample, has "
            f"{format_bytes(have)}"
        )
