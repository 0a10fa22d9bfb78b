"""What planners for alike devices are told: mean times, one network, bytes unit by unit."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from spantrain.core.action import SPLIT_OPS
from spantrain.cost.span_tables import Array
from spantrain.planner.assembly.assemble import Assembler


class PaperAssembler(Assembler):
    """Makes plans as its base does, and knows the figures that the papers' planners go by."""

    @cached_property
    def cut_bytes(self) -> Array:
        """Bytes of one sample over the cut in front of unit j, there and back, as [j]; 0 at both ends."""
        up, down = self.spans.cut_bytes()
        return up + down

    @cached_property
    def trained_sums(self) -> Array:
        """Running sums of the bytes that units train; entry j is those of units 0 to j-1."""
        return np.cumsum([0.0, *(unit.trained_bytes for unit in self.profile.graph.units)])

    def work_sums(self, kinds: Sequence[str], samples: int) -> Array:
        """Return running sums over units of the seconds of F, I and W, the mean over devices of these kinds."""
        rows = [[self.spans.compute.prefix_seconds(kind, op, samples) for op in SPLIT_OPS] for kind in kinds]
        return np.asarray(np.array(rows).sum(axis=1).mean(axis=0), dtype=np.float64)

    def kinds(self, devices: Iterable[str]) -> list[str]:
        """Return the kinds of devices."""
        return [self.profile.cluster.device_by_name[name].kind for name in devices]

    def mean_bandwidth_bytes_per_s(self, devices: Sequence[str]) -> float:
        """Return the mean rate between neighbours in this order: what planners for one network are told."""
        pairs = list(pairwise(devices))
        if not pairs:
            return float("inf")
        return len(pairs) / sum(1 / self.spans.network.link(a, b).bandwidth_bytes_per_s for a, b in pairs)
