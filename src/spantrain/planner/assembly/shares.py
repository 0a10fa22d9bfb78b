"""How many samples of a micro-batch each device of a stage takes."""

import heapq
from collections.abc import Sequence

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster
from spantrain.core.span import apportion
from spantrain.cost.compute import ComputeCost

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_GREEDY_UP_TO = 64


class SampleShares:
    """Divides samples by measured times, so that the slowest device ends soonest."""

    def __init__(self, cluster: Cluster, compute: ComputeCost) -> None:
        self._cluster, self._compute = cluster, compute
        self._found: dict[tuple[tuple[str, ...], range, int], tuple[int, ...]] = {}

    def divide(self, devices: Sequence[str], units: range, size: int) -> tuple[int, ...]:
        """Return the samples of each device for these units; some may get none."""
        kinds = tuple(self._cluster.device_by_name[name].kind for name in devices)
        key = (kinds, units, size)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._divide(kinds, units, size)
        return found

    def seconds(self, kind: str, units: range, samples: int) -> float:
        """Return the seconds of F, I and W of so many samples on a kind of device."""
        return sum(self._compute.kind_seconds(units, kind, op, samples) for op in _OPS)

    def _divide(self, kinds: tuple[str, ...], units: range, size: int) -> tuple[int, ...]:
        if len(kinds) == 1:
            return (size,)
        if size > _GREEDY_UP_TO:
            even = max(size // len(kinds), 1)
            return apportion(size, [1 / max(self.seconds(kind, units, even), 1e-12) for kind in kinds])
        parts = [0] * len(kinds)
        heap = [(self.seconds(kind, units, 1), index) for index, kind in enumerate(kinds)]
        heapq.heapify(heap)
        for _ in range(size):
            _, index = heapq.heappop(heap)
            parts[index] += 1
            heapq.heappush(heap, (self.seconds(kinds[index], units, parts[index] + 1), index))
        return tuple(parts)
