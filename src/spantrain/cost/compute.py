"""Seconds of F, I and W of units and stages, from measurements."""

from bisect import bisect_left

from spantrain.core.action import Op
from spantrain.core.profile import Profile, UnitTiming
from spantrain.errors import ProfileError

__all__ = ["ComputeCost"]


class ComputeCost:
    """Seconds of computation on each kind of device.

    Between two measured sample counts the time is linear; beyond the last one the last slope goes on (never a
    falling one); under the first one the first slope goes back, but not below the first time in proportion to
    the samples. One measured point alone scales in proportion.

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype.
    """

    def __init__(self, profile: Profile, dtype: str | None = None) -> None:
        self._profile = profile
        self._dtype = dtype or profile.dtype
        self._points: dict[tuple[str, str], tuple[UnitTiming, ...]] = {}
        for key, timings in profile.timings_by_key.items():
            wanted = tuple(t for t in timings if t.dtype == self._dtype and t.tp_degree == 1)
            if wanted:
                self._points[key] = wanted
        if not self._points:
            held = sorted({timing.dtype for timing in profile.timings})
            raise ProfileError(
                f"the profile holds no timings for dtype {self._dtype}, only for {', '.join(held) or 'nothing'}; "
                "profile again with that dtype"
            )
        self._prefixes: dict[tuple[str, Op, int], tuple[float, ...]] = {}

    @property
    def dtype(self) -> str:
        """The dtype whose timings are used."""
        return self._dtype

    def unit_seconds(self, unit: int, kind: str, op: Op, samples: int) -> float:
        """Return the seconds of one operation of a unit (by index) on a kind of device.

        Raises:
            ProfileError: the unit was not measured on that kind.
        """
        unit_class = self._profile.graph.units[unit].unit_class
        points = self._points.get((unit_class, kind))
        if points is None:
            kinds = sorted({k for c, k in self._points if c == unit_class})
            raise ProfileError(
                f"the profile has no {self._dtype} timing of unit class {unit_class!r} "
                f"({self._profile.graph.units[unit].name}) on device kind {kind!r}; "
                f"it has {', '.join(kinds) or 'no kind'}; profile this model on this cluster again"
            )
        return _interpolate(points, op, samples)

    def prefix_seconds(self, kind: str, op: Op, samples: int) -> tuple[float, ...]:
        """Return the running sums over units: entry j is the seconds of units 0 to j-1."""
        key = (kind, op, samples)
        found = self._prefixes.get(key)
        if found is None:
            sums = [0.0]
            for unit in range(len(self._profile.graph.units)):
                sums.append(sums[-1] + self.unit_seconds(unit, kind, op, samples))
            found = self._prefixes[key] = tuple(sums)
        return found

    def kind_seconds(self, units: range, kind: str, op: Op, samples: int) -> float:
        """Return the seconds of one operation of consecutive units on a kind of device."""
        sums = self.prefix_seconds(kind, op, samples)
        return sums[units.stop] - sums[units.start]

    def stage_seconds(self, units: range, device: str, op: Op, samples: int) -> float:
        """Return the seconds of one action of a stage on a device, by the device's name."""
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
