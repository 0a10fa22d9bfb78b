"""Seconds of F, I and W of units and stages, on devices alone and on tensor-parallel groups, from measurements.

A recomputed unit does F again and all of its backward pass as soon as its output's gradient is there: in I, or in B. W
has nothing left to do for it (`models.execution.segment` says why).

Tensor-parallel groups have equal or unequal shares. What was measured at a group's degree is taken where the group
divides evenly and each of its kinds was. Else it is reckoned: the slowest member's share of what the unit takes it
alone (of whole pieces, as the runtime divides: `Unit.work_share`), and the sums of Megatron-LM (Shoeybi et al., 2019,
section 3): `Unit.tensor_sums` all-reduces of the unit's output in F, as many of its input's gradient in I, none in W. A
unit that cannot be divided is computed whole by every member. Unequal shares are those of SpanTrain (Chinese paper,
second-level groups: devices of unlike capacity divide a layer by it).

Sums are taken as the fastest of `cost.sums` and alone on their links. They are not hidden behind compute, and a
share of a unit is taken to run as well as the whole does: both hold for large layers only. Against transformer blocks
that others measured at degrees 2 to 8 (`benchmarks/tensor_parallel_accuracy.py`) it is 3-4 % low in the median; by kind
of device from 13 % low to 7 % high on data-centre cards, and 1 % to two thirds low on consumer cards, which have no
links of their own: measure those.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby

from spantrain.core.action import Op
from spantrain.core.plan import Replica
from spantrain.core.profile import Profile, UnitTiming
from spantrain.core.shares import shares_of
from spantrain.cost.network import NetworkCost
from spantrain.errors import ProfileError


class ComputeCost:
    """Seconds of computation on each kind of device, alone or as one of a tensor-parallel group.

    Between two measured sample counts the time is linear; beyond the last one the last slope goes on (never a
    falling one); under the first one the first slope goes back, but not below the first time in proportion to
    the samples. One measured point alone scales in proportion. Tensor-parallel degrees are taken as they were
    measured, each with its own points; nothing is guessed between them (`cost.compute` reckons the others).

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype.
    """

    def __init__(self, profile: Profile, dtype: str | None = None) -> None:
        self._profile = profile
        self.dtype = dtype or profile.dtype
        """The dtype whose timings are used."""
        self.prefix_seconds = cache(self._prefix_seconds)
        """Running sums over units, by (kind, op, samples); entry j is the seconds of units 0 to j-1."""
        self._points: dict[tuple[str, str, int], tuple[UnitTiming, ...]] = {}
        for (unit_class, kind), timings in profile.timings_by_key.items():
            wanted = [timing for timing in timings if timing.dtype == self.dtype]
            for tp_degree, points in groupby(wanted, key=lambda timing: timing.tp_degree):
                self._points[unit_class, kind, tp_degree] = tuple(points)
        if not self._points:
            held = sorted({timing.dtype for timing in profile.timings})
            raise ProfileError(
                f"the profile holds no timings for dtype {self.dtype}, only for {', '.join(held) or 'nothing'}; "
                "profile again with that dtype"
            )

    def unit_seconds(self, unit: int, kind: str, op: Op, samples: int, *, tp_degree: int = 1) -> float:
        """Return the seconds of one operation of a unit (by index) on a kind of device.

        Raises:
            ProfileError: the unit was not measured on that kind, or not on so many devices of it together.
        """
        points = self._points.get((self._profile.graph.units[unit].unit_class, kind, tp_degree))
        if points is None:
            raise ProfileError(self._what_is_missing(unit, kind, tp_degree))
        return _interpolate(points, op, samples)

    def has_timing(self, unit: int, kind: str, tp_degree: int) -> bool:
        """Whether a unit was measured on so many tensor-parallel devices of a kind."""
        return (self._profile.graph.units[unit].unit_class, kind, tp_degree) in self._points

    def _what_is_missing(self, unit: int, kind: str, tp_degree: int) -> str:
        wanted = self._profile.graph.units[unit]
        found = [(k, degree) for c, k, degree in self._points if c == wanted.unit_class]
        degrees = sorted(degree for k, degree in found if k == kind)
        of_what = f"the profile has no {self.dtype} timing of unit class {wanted.unit_class!r} ({wanted.name})"
        if not degrees:
            kinds = ", ".join(sorted({k for k, _ in found})) or "no kind"
            return f"{of_what} on device kind {kind!r}; it has {kinds}; profile this model on this cluster again"
        return (
            f"{of_what} on {tp_degree} tensor-parallel devices of kind {kind!r}; it has tensor-parallel degree "
            f"{', '.join(map(str, degrees))}; use replicas of as many devices, or profile that degree"
        )

    def _prefix_seconds(self, kind: str, op: Op, samples: int) -> tuple[float, ...]:
        first: dict[str, int] = {}
        for index, unit in enumerate(self._profile.graph.units):
            first.setdefault(unit.unit_class, index)
        seconds = {name: self.unit_seconds(at, kind, op, samples) for name, at in first.items()}
        return (0.0, *accumulate(seconds[unit.unit_class] for unit in self._profile.graph.units))

    def kind_seconds(self, units: range, kind: str, op: Op, samples: int) -> float:
        """Return the seconds of one operation of consecutive units on a kind of device."""
        sums = self.prefix_seconds(kind, op, samples)
        return sums[units.stop] - sums[units.start]


def _seconds(timing: UnitTiming, op: Op) -> float:
    match op:
        case Op.FORWARD:
            return timing.forward_s
        case Op.BACKWARD_INPUT:
            return timing.backward_input_s
        case Op.BACKWARD_WEIGHT:
            return timing.backward_weight_s
        case Op.BACKWARD:
            return timing.backward_input_s + timing.backward_weight_s


def _interpolate(points: tuple[UnitTiming, ...], op: Op, samples: int) -> float:
    if samples < 0:
        raise ValueError(f"samples must not be negative, got {samples}")
    if samples == 0:
        return 0.0
    at = bisect_left(points, samples, key=lambda timing: timing.samples)
    if at < len(points) and points[at].samples == samples:
        return _seconds(points[at], op)
    first = points[0]
    if len(points) == 1:
        return _seconds(first, op) * samples / first.samples
    low = min(max(at - 1, 0), len(points) - 2)
    a, b = points[low], points[low + 1]
    slope = (_seconds(b, op) - _seconds(a, op)) / (b.samples - a.samples)
    if samples < first.samples:
        line = _seconds(a, op) + slope * (samples - a.samples)
        return min(max(line, _seconds(first, op) * samples / first.samples), _seconds(first, op))
    if samples > points[-1].samples:
        return _seconds(b, op) + max(slope, 0.0) * (samples - b.samples)
    return _seconds(a, op) + slope * (samples - a.samples)


def operations_of(op: Op, *, recomputed: bool) -> tuple[Op, ...]:
    """Return what a unit does in an action of its stage.

    >>> [operation.value for operation in operations_of(Op.BACKWARD_INPUT, recomputed=True)]
    ['F', 'I', 'W']
    >>> operations_of(Op.BACKWARD_WEIGHT, recomputed=True)
    ()
    """
    if not recomputed:
        return (op,)
    return {
        Op.FORWARD: (op,),
        Op.BACKWARD_INPUT: (Op.FORWARD, op, Op.BACKWARD_WEIGHT),
        Op.BACKWARD_WEIGHT: (),
        Op.BACKWARD: (Op.FORWARD, op),
    }[op]


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
        self._sum_s = cache(lambda devices, size_bytes: self.network.collectives.fastest(devices, size_bytes)[1])
        self._largest = cache(self._largest_of)

    def replica_seconds(self, units: range, replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of one action of a stage's units on all devices of a replica."""
        sums = self.prefix_seconds(replica.devices, replica.tp_shares, op, samples)
        return sums[units.stop] - sums[units.start]

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
        known, sums = dict[tuple[str, int], float](), [0.0]
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
