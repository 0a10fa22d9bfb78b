"""Who is lost, and on what evidence: silence, against what was measured, and closed connections. Slow is not dead."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

HEARTBEAT_S = 0.3
"""How often a worker says that it is there."""
LONGEST_SILENCE_S = 6.0
"""What silence makes a device lost, whatever was measured."""
_USUAL = 0.95
"""The part of the gaps between heartbeats that are usual."""
_FACTOR = 6
"""So many usual gaps of silence are a loss: a beat that is lost or late is not, nor a second's standstill."""
_KEPT_OF_ONE, _KEPT_OF_ALL = 32, 256
_ENOUGH = 10
"""Before so many gaps of a device are known, nothing is said to be usual for it."""
_NEW_S = 1.0
"""How late a heartbeat may be of a device of which no gap is known, and how late any may be when its connection closes:
the end of a process that holds much memory takes a while."""
_ROUND_TRIPS, _LATE = 5, 0.1
"""For a new connection, with its handshakes, and a heartbeat on it; by what part of a gap that may take longer."""
_DIAL_S = 0.02
"""The least that a new connection takes: what the machines do for it."""
_AFTER_END = 1
"""So many heartbeats may arrive of one that has ended: those that were under way."""
_PAUSE_S = 1.0
"""Who has not looked for so long was not running: in that time nobody could be heard."""
_GRACE_S = 2.0
"""How long after such a pause everybody is given to be heard again."""


@dataclass
class _Signs:
    heard_s: float
    gaps: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT_OF_ONE))
    round_trips: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT_OF_ONE))
    lines: set[int] = field(default_factory=set)
    """Its open connections that tell when they close."""
    closed_s: float | None = None
    """When the last of them closed, if the device has not shown since that it is there."""
    heard_since: int = 0
    """How many heartbeats came since."""


class LossDetector:
    """Decide who is lost; time is an argument, on any one clock. Not for several threads at once.

    A closed connection is evidence at once: if the next heartbeat does not come on time by another one, its device is
    lost. Silence is, after six times the gap between heartbeats that is usual, if others are heard
    meanwhile: when nobody is, it is rather the network here that is away, and only the longest silence counts.

    >>> detector = LossDetector()
    >>> for beat in range(20):
    ...     detector.on_heartbeat(0.3 * beat, "edge-1"); detector.on_heartbeat(0.3 * beat, "edge-2")
    >>> for beat in range(20, 27):
    ...     detector.on_heartbeat(0.3 * beat, "edge-1")
    >>> detector.lost(7.0), detector.lost(7.6)
    ((), (('edge-2', 'no heartbeat for 1.9 s, usual 0.30 s, limit 1.8 s'),))

    Ask often: who asks after a pause of its own, in which it heard nobody, gives everybody two seconds more.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        """`limit_s`: what silence is a loss, no less and no more; None: as measured, 6 s at most."""
        assert limit_s is None or limit_s > 0
        self._limit_s = limit_s
        self._longest_s = limit_s or LONGEST_SILENCE_S
        self._devices: dict[str, _Signs] = {}
        self._gaps: deque[float] = deque(maxlen=_KEPT_OF_ALL)
        """Of all devices."""
        self._not_before_s = -math.inf
        """Before then nobody is lost by silence."""
        self._asked_s: float | None = None

    def on_heartbeat(self, now_s: float, device: str, round_trip_s: float = 0.0) -> None:
        """Note a sign of life, and how long the one before took to be answered, as the device says.

        The first one begins the watch, so note a device when it joins.
        """
        found = self._devices.setdefault(device, _Signs(now_s))
        if now_s > found.heard_s:
            gap_s = min(now_s - found.heard_s, self._longest_s)
            found.gaps.append(gap_s)
            self._gaps.append(gap_s)
            found.heard_s = now_s
        found.round_trips.append(min(max(0.0, round_trip_s), _NEW_S))
        found.heard_since += 1
        if found.heard_since > _AFTER_END:
            found.closed_s = None

    def on_open(self, device: str, line: int) -> None:
        """Note a connection that will tell when it closes; nothing happens if the device is not watched."""
        if device in self._devices:
            self._devices[device].lines.add(line)
            self._devices[device].closed_s = None

    def on_close(self, now_s: float, device: str, line: int) -> None:
        """Note that it has closed. If its device was silent before, it closed for that, and says nothing more."""
        found = self._devices.get(device)
        if found is None or line not in found.lines:
            return
        found.lines.discard(line)
        if not found.lines and now_s <= self._due_s(found) + max(_NEW_S, self._gap_s(found)):
            found.closed_s, found.heard_since = now_s, 0

    def forget(self, device: str) -> None:
        """Watch a device no more: it has left, or its loss has been dealt with."""
        self._devices.pop(device, None)

    def silence_s(self, now_s: float, device: str) -> float:
        """Return for how long nothing was heard of a device; without end if it is not watched."""
        return now_s - self._devices[device].heard_s if device in self._devices else math.inf

    def lost(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return who is lost and why, the longest silent first, until forgotten."""
        if self._asked_s is not None and now_s - self._asked_s > _PAUSE_S:
            self._not_before_s = now_s + min(_GRACE_S, self._longest_s)
        self._asked_s = now_s
        lost = []
        for name, device in self._devices.items():
            reason = self._closed_for(now_s, device) or self._silent_for(now_s, name, device)
            if reason:
                lost.append((device.heard_s, name, reason))
        return tuple((name, reason) for _, name, reason in sorted(lost))

    def _closed_for(self, now_s: float, device: _Signs) -> str | None:
        silence_s, gap_s = now_s - device.heard_s, self._gap_s(device)
        # What a new connection takes if the one for heartbeats has closed too.
        redial_s = _DIAL_S + _ROUND_TRIPS * max(device.round_trips, default=0.0) + _LATE * gap_s
        if device.closed_s is None or now_s <= max(device.closed_s, self._due_s(device)) + redial_s:
            return None
        return f"its connection closed, and no heartbeat came for {silence_s:.2f} s, before at most {gap_s:.2f} s"

    def _gap_s(self, device: _Signs) -> float:
        return max(device.gaps, default=_NEW_S)

    def _due_s(self, device: _Signs) -> float:
        """Return by when a device that is there is heard again."""
        return device.heard_s + self._gap_s(device)

    def _silent_for(self, now_s: float, name: str, device: _Signs) -> str | None:
        silence_s, limit_s, usual = now_s - device.heard_s, self._longest_s, ""
        if now_s < self._not_before_s:
            return None
        if self._limit_s is None and len(device.gaps) >= _ENOUGH:
            usual_s = max(_quantile(device.gaps), _quantile(self._gaps))
            usual = f", usual {usual_s:.2f} s"
            others = (one for other, one in self._devices.items() if other != name)
            if any(now_s - one.heard_s <= 2 * usual_s for one in others):
                limit_s = min(limit_s, _FACTOR * usual_s)
        return f"no heartbeat for {silence_s:.1f} s{usual}, limit {limit_s:.1f} s" if silence_s > limit_s else None


def _quantile(gaps: Iterable[float]) -> float:
    ordered = sorted(gaps)
    return ordered[math.ceil(_USUAL * len(ordered)) - 1]
