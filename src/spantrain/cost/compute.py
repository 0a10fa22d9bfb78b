"""Seconds of F, I and W of units and stages, from measurements."""

from bisect import bisect_left
from itertools import groupby

from spantrain.core.action import Op
from spantrain.core.profile import Profile, UnitTiming
from spantrain.errors import ProfileError


class ComputeCost:
    """Seconds of computation on each kind of device, alone or as one of a tensor-parallel group.

    Between two measured sample counts the time is linear; beyond the last one the last slope goes on (never a
    falling one); under the first one the first slope goes back, but not below the first time in proportion to
    the samples. One measured point alone scales in proportion. Tensor-parallel degrees are taken as they were
    measured, each with its own points; nothing is guessed between them (`cost.tensor` reckons the others).

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype.
    """

    def __init__(self, profile: Profile, dtype: str | None = None) -> None:
        self._profile = profile
        self._dtype = dtype or profile.dtype
        self._points: dict[tuple[str, str, int], tuple[UnitTiming, ...]] = {}
        for (unit_class, kind), timings in profile.timings_by_key.items():
            wanted = [timing for timing in timings if timing.dtype == self._dtype]
            for tp_degree, points in groupby(wanted, key=lambda timing: timing.tp_degree):
                self._points[unit_class, kind, tp_degree] = tuple(points)
        if not self._points:
            held = sorted({timing.dtype for timing in profile.timings})
            raise ProfileError(
                f"the profile holds no timings for dtype {self._dtype}, only for {', '.join(held) or 'nothing'}; "
                "profile again with that dtype"
            )
        self._prefixes: dict[tuple[str, Op, int, int], tuple[float, ...]] = {}

    @property
    def dtype(self) -> str:
        """The dtype whose timings are used."""
        return self._dtype

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
        of_what = f"the profile has no {self._dtype} timing of unit class {wanted.unit_class!r} ({wanted.name})"
        if not degrees:
            kinds = ", ".join(sorted({k for k, _ in found})) or "no kind"
            return f"{of_what} on device kind {kind!r}; it has {kinds}; profile this model on this cluster again"
        return (
            f"{of_what} on {tp_degree} tensor-parallel devices of kind {kind!r}; it has tensor-parallel degree "
            f"{', '.join(map(str, degrees))}; use replicas of as many devices, or profile that degree"
        )

    def prefix_seconds(self, kind: str, op: Op, samples: int, *, tp_degree: int = 1) -> tuple[float, ...]:
        """Return the running sums over units: entry j is the seconds of units 0 to j-1."""
        key = (kind, op, samples, tp_degree)
        found = self._prefixes.get(key)
        if found is None:
            sums, of_class = [0.0], dict[str, float]()
            for index, unit in enumerate(self._profile.graph.units):
                seconds = of_class.get(unit.unit_class)
                if seconds is None:
                    seconds = self.unit_seconds(index, kind, op, samples, tp_degree=tp_degree)
                    of_class[unit.unit_class] = seconds
                sums.append(sums[-1] + seconds)
            found = self._prefixes[key] = tuple(sums)
        return found

    def kind_seconds(self, units: range, kind: str, op: Op, samples: int, *, tp_degree: int = 1) -> float:
        """Return the seconds of one operation of consecutive units on a kind of device."""
        sums = self.prefix_seconds(kind, op, samples, tp_degree=tp_degree)
        return sums[units.stop] - sums[units.start]

    def stage_seconds(self, units: range, device: str, op: Op, samples: int) -> float:
        """Return the seconds of one action of a stage on a device alone, by the device's name."""
        return self.kind_seconds(units, self._profile.cluster.device_by_name[device].kind, op, samples)


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
