"""What it costs to divide a stage's state among its replicas, for every span of units, as `cost.replicas` has it."""

from collections.abc import Callable, Sequence

import numpy as np

from spantrain.core.plan import StateSharding
from spantrain.core.precision import is_low
from spantrain.core.units import UnitGraph
from spantrain.cost.memory import Division, MemoryCost
from spantrain.planner.strategies.auto.hops import Array, Batch

Gather = Callable[[tuple[str, ...], Array], Array]
"""Returns the seconds in which devices that hold a part each get all of so many bytes, for many sizes at once."""


class ShardCosts:
    """Bytes and seconds of one way to divide state, as arrays over positions in a grid of units."""

    def __init__(
        self,
        graph: UnitGraph,
        memory: MemoryCost,
        grid: Sequence[int],
        sharding: StateSharding,
        *,
        dtype: str,
        gather: Gather,
    ) -> None:
        self.sharding = sharding
        self._graph, self._memory, self._grid, self._gather = graph, memory, tuple(grid), gather
        self._gathered_ratio = 0.5 if is_low(dtype) else 1.0
        self._state: dict[int, Array] = {}
        self._gathers: dict[tuple[tuple[str, ...], float], Array] = {}

    def division(self, replicas: int) -> Division:
        """Return what a replica has of a stage's state; there is nothing to divide where it is alone."""
        return Division(state_sharding=self.sharding if replicas > 1 else StateSharding.NONE, replicas=replicas)

    def state_bytes(self, replicas: int) -> Array:
        """Return the bytes of state of one of so many replicas, by first and last position."""
        found = self._state.get(replicas)
        if found is None:
            division, grid = self.division(replicas), self._grid
            found = np.zeros((len(grid), len(grid)))
            for i, first in enumerate(grid):
                for j in range(i + 1, len(grid)):
                    found[i, j] = self._memory.state_bytes(range(first, grid[j]), division)
            self._state[replicas] = found
        return found

    def beside(self, devices: tuple[str, ...], batch: Batch) -> Array:
        """Return the seconds of what goes on beside each F, I and W, as [operation, begin, end]."""
        count = batch.whole + bool(batch.rest)
        summed = self._gathered_s(devices, 1.0)
        if self.sharding is StateSharding.ZERO2:
            return np.stack([np.zeros(summed.shape), np.zeros(summed.shape), summed * (count - 1) / count])
        gathered = self._gathered_s(devices, self._gathered_ratio)
        return np.stack([gathered, gathered, np.maximum(summed - self._first_s(devices, 1.0) / count, 0.0)])

    def behind_s(self, devices: tuple[str, ...], parameter_bytes: Array) -> Array:
        """Return the seconds of what comes behind all work besides sums in buckets, by begin and end."""
        if self.sharding is StateSharding.ZERO2:
            return self._gather(devices, parameter_bytes)
        return self._first_s(devices, 1.0) + self._first_s(devices, self._gathered_ratio)

    def _first_s(self, devices: tuple[str, ...], ratio: float) -> Array:
        """Return the seconds in which the first unit's parameters go half round a ring, by begin."""
        sizes = np.array([self._held(first)[0] if self._held(first) else 0 for first in self._grid], dtype=np.float64)
        found: Array = self._gather(devices, sizes * ratio)[:, None]
        return found

    def _gathered_s(self, devices: tuple[str, ...], ratio: float) -> Array:
        """Return the seconds in which the parameters go half round a ring, unit by unit, by begin and end."""
        found = self._gathers.get((devices, ratio))
        if found is None:
            grid = np.array(self._grid)
            found = np.zeros((len(grid), len(grid)))
            for i, first in enumerate(self._grid[:-1]):
                seconds = self._gather(devices, ratio * np.array(self._held(first), dtype=np.float64))
                sums = np.concatenate([[0.0], np.cumsum(seconds)])
                found[i, i:] = sums[grid[i:] - first]
            self._gathers[devices, ratio] = found
        return found

    def _held(self, first: int) -> tuple[int, ...]:
        return self._graph.held_parameter_bytes(range(first, len(self._graph.units)))


def hidden(compute: Array, beside: Array) -> Array:
    """Return the least seconds of F, I and W of which each takes the longer of its compute and what goes on beside it.

    Where I and W are one action, they may hide more: so much is taken off W.
    """
    forward, inputs = np.maximum(compute[:2], beside[:2])
    both = np.maximum(compute[1] + compute[2], beside[1] + beside[2])
    return np.stack([forward, inputs, both - inputs])
