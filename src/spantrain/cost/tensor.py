"""Seconds of F, I and W on tensor-parallel groups, of equal and of unequal shares.

What was measured at a group's degree is taken where the group divides evenly and each of its kinds was. Else it is
reckoned: the slowest member's share of what the unit takes it alone (of whole pieces, as the runtime divides:
`Unit.work_share`), and the sums of Megatron-LM (Shoeybi et al., 2019,
section 3): `Unit.tensor_sums` all-reduces of the unit's output in F, as many of its input's gradient in I, none in W.
A unit that cannot be divided is computed whole by every member. Unequal shares are those of SpanTrain (Chinese paper,
second-level groups: devices of unlike capacity divide a layer by it).

Sums are taken as the fastest of `cost.collectives` and alone on their links. They are not hidden behind compute, and a
share of a unit is taken to run as well as the whole does: both hold for large layers only. Against transformer blocks
that others measured at degrees 2 to 8 (`benchmarks/tensor_parallel_accuracy.py`) it is 3-4 % low in the median; by kind
of device from 13 % low to 7 % high on data-centre cards, and 1 % to two thirds low on consumer cards, which have no
links of their own: measure those.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from spantrain.core.action import Op
from spantrain.core.plan import Replica
from spantrain.core.profile import Profile
from spantrain.core.shares import shares_of
from spantrain.cost.compute import ComputeCost
from spantrain.cost.network import NetworkCost

_EVEN = 1e-6
"""Tensor shares that differ by less than this part count as equal."""

Group = tuple[str, ...]


def normalised(shares: Sequence[float]) -> tuple[float, ...]:
    """Return shares as parts of their sum.

    >>> normalised((2, 1, 1))
    (0.5, 0.25, 0.25)
    """
    total = sum(shares)
    return tuple(share / total for share in shares)


class GroupCost:
    """Seconds of work of units on the devices of a tensor-parallel group; a device alone is a group of one.

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype; later, one of a kind or a link that is needed.
    """

    def __init__(self, profile: Profile, dtype: str | None = None) -> None:
        self.compute = ComputeCost(profile, dtype)
        self.network = NetworkCost(profile)
        self._units = profile.graph.units
        self._devices = profile.cluster.device_by_name
        self.prefix_seconds = cache(self._prefix_seconds)
        """Running sums over units, by (devices, tp_shares, op, samples); entry j is the seconds of units 0 to j-1."""
        self._sum_s = cache(self._sum_of)
        self._largest = cache(self._largest_of)

    def seconds(self, units: range, devices: Group, tp_shares: tuple[float, ...], op: Op, samples: int) -> float:
        """Return the seconds of one action of consecutive units on a group."""
        sums = self.prefix_seconds(devices, tp_shares, op, samples)
        return sums[units.stop] - sums[units.start]

    def replica_seconds(self, units: range, replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of one action of a stage's units on all devices of a replica."""
        return self.seconds(units, replica.devices, replica.tp_shares, op, samples)

    def kinds(self, replica: Replica) -> tuple[str, ...]:
        """Return the kinds of a replica's devices."""
        return tuple(self._devices[name].kind for name in replica.devices)

    def units_seconds(self, units: Iterable[int], replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of one operation of units that need not follow each other, on a replica's devices."""
        sums = self.prefix_seconds(replica.devices, replica.tp_shares, op, samples)
        return sum(sums[unit + 1] - sums[unit] for unit in units)

    def _prefix_seconds(self, devices: Group, tp_shares: tuple[float, ...], op: Op, samples: int) -> tuple[float, ...]:
        kinds = [self._devices[name].kind for name in devices]
        if len(devices) == 1:
            return self.compute.prefix_seconds(kinds[0], op, samples)
        known: dict[tuple[str, int], float] = {}
        sums = [0.0]
        if samples == 0:
            return (0.0,) * (len(self._units) + 1)
        for index, unit in enumerate(self._units):
            alike = (unit.unit_class, self._summed_bytes(index, op))
            if alike not in known:
                known[alike] = self._unit_seconds(index, devices, tp_shares, op, samples)
            sums.append(sums[-1] + known[alike])
        return tuple(sums)

    def _unit_seconds(self, unit: int, devices: Group, tp_shares: tuple[float, ...], op: Op, samples: int) -> float:
        degree, largest = len(devices), self._largest(unit, devices, tp_shares)
        even = max(tp_shares) - min(tp_shares) <= _EVEN * max(tp_shares)
        if even and all(self.compute.has_timing(unit, kind, degree) for kind in largest):
            return max(self.compute.unit_seconds(unit, kind, op, samples, tp_degree=degree) for kind in largest)
        work_s = max(share * self.compute.unit_seconds(unit, kind, op, samples) for kind, share in largest.items())
        return work_s + self.sums(unit, op) * self._sum_s(devices, samples * self._summed_bytes(unit, op))

    def _largest_of(self, unit: int, devices: Group, tp_shares: tuple[float, ...]) -> Mapping[str, float]:
        """Return the largest part of a unit's work by kind: members of a kind differ by their shares only."""
        largest: dict[str, float] = {}
        for name, share in zip(devices, shares_of(tp_shares), strict=True):
            kind = self._devices[name].kind
            largest[kind] = max(self._units[unit].work_share(share), largest.get(kind, 0.0))
        return largest

    def sums(self, unit: int, op: Op) -> int:
        """Return how often a group sums in one operation of a unit; the first unit's input has no gradient."""
        backward = op is not Op.FORWARD
        if op is Op.BACKWARD_WEIGHT or (backward and self._summed_bytes(unit, op) == 0):
            return 0
        return self._units[unit].tensor_sums

    def sent_bytes_per_sample(self, units: range, recompute: Iterable[int] = ()) -> int:
        """Return the bytes of one sample that a group sums in F, I and W together: before their way through a ring.

        F of recomputed units counts twice.
        """
        forward, backward = Op.FORWARD, Op.BACKWARD_INPUT
        runs = [(unit, op) for unit in units for op in (forward, backward)] + [(unit, forward) for unit in recompute]
        return sum(self.sums(unit, op) * self._summed_bytes(unit, op) for unit, op in runs)

    def _summed_bytes(self, unit: int, op: Op) -> int:
        """Return the bytes of one sample in one sum: the unit's output in F, its input's gradient in I and B."""
        if op is Op.FORWARD:
            return self._units[unit].cut_bytes_per_sample
        if op is Op.BACKWARD_WEIGHT or unit == 0:
            return 0
        return self._units[unit - 1].gradient_bytes_per_sample

    def _sum_of(self, devices: Group, size_bytes: int) -> float:
        return self.network.collectives.fastest(devices, size_bytes)[1]
