"""A run that stands still though all its devices are heard: whom to ask, what is cut, and who is given up for it. Pure.

The coordinator hears devices by its own connections, which say nothing of those among the devices. So when a step takes
far longer than usual, all are asked whom they cannot reach. Between whom nothing passes for as long as silence is borne
is not trained any further: those are given up without whom all others reach each other.
"""

from collections import deque
from collections.abc import Collection, Iterable
from math import inf

from spantrain.recovery.detection import LONGEST_SILENCE_S

_FIRST_S, _LEAST_S, _USUAL_TIMES = 10.0, 3.0, 3
"""A step is overdue after so long: the first one of an order, any, and over the longest of those before."""
_LONG_TIMES = 2
"""Over that: when it is told of a step that takes longer, though nothing is cut."""
_STEPS_KEPT = 8
_ROUND_S = 2.5
"""For the answers to a question; who has not answered by then is asked again."""


class Standstill:
    """Watches over the steps of one set of devices; time is an argument, on any one clock."""

    def __init__(self, devices: Collection[str], now_s: float, limit_s: float = LONGEST_SILENCE_S) -> None:
        """`limit_s`: for how long nothing may pass between two devices."""
        self._devices = tuple(devices)
        self._limit_s = limit_s
        self._begun_s = now_s
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.round = 0
        """Of questions: it grows when devices are to answer anew."""
        self._asked_s = 0.0
        self._answered = set[str]()
        self._unreached_since_s: dict[tuple[str, str], float] = {}
        """By who says it, and of whom."""
        self._told = False

    def on_step(self, now_s: float) -> None:
        """Note that a step was committed."""
        self._steps_s.append(now_s - self._begun_s)
        self._begun_s, self._told = now_s, False
        self._answered.clear()
        self._unreached_since_s.clear()

    def asks(self, now_s: float) -> bool:
        """Return whether devices are to be asked now, which then counts as done; ask often."""
        if now_s - self._begun_s < self._overdue_s or (
            self._asked_s > self._begun_s and now_s < self._asked_s + _ROUND_S
        ):
            return False
        self.round += 1
        self._asked_s = now_s
        self._answered.clear()
        return True

    def on_answer(self, now_s: float, device: str, number: int, unreached: Iterable[str]) -> None:
        """Take which others a device cannot reach; of an earlier question nothing is taken.

        What one says of another counts until it says otherwise itself: the other may not have to dial it.
        """
        if number != self.round or device not in self._devices:
            return
        self._answered.add(device)
        cut = frozenset(unreached)
        for other in frozenset(self._devices) - {device}:
            if other in cut:
                self._unreached_since_s.setdefault((device, other), now_s)
            else:
                self._unreached_since_s.pop((device, other), None)

    @property
    def _cut_since_s(self) -> dict[frozenset[str], float]:
        """By pair of devices, since when one of them has not reached the other."""
        return {
            frozenset((one, other)): min(since_s, self._unreached_since_s.get((other, one), since_s))
            for (one, other), since_s in self._unreached_since_s.items()
        }

    def said(self, now_s: float, step: int, awaited: Collection[str], steps: float = inf) -> str:
        """Return what people are to be told now, once for each standstill.

        `awaited`: who has not ended the step; nobody, where a step may take as long as it likes. `steps`: of the run.
        """
        lasts_s = now_s - self._begun_s
        usual = f", usually {max(self._steps_s):.1f} s" if self._steps_s else ""
        stands = f"Step {step + 1} has taken {lasts_s:.1f} s{usual}"
        if step >= steps:
            stands = f"All {steps} steps are done, and the end has taken {lasts_s:.1f} s"
        if self._told or len(self._answered) < len(self._devices):
            return ""
        if self._cut_since_s:
            self._told = True
            since_s = now_s - min(self._cut_since_s.values())
            return (
                f"{stands}: {self._pairs()} wait for each other: nothing passes between them (known for "
                f"{since_s:.1f} s), though all are heard here; after {self._limit_s:.0f} s the run goes on without "
                f"{', '.join(self._given_up(self._cut_since_s))}"
            )
        if lasts_s < _LONG_TIMES * self._overdue_s or not awaited:
            return ""
        self._told = True
        return f"{stands}: it waits for {', '.join(sorted(awaited))}; all devices reach each other"

    def lost(self, now_s: float) -> dict[str, str]:
        """Return who is to be given up and why, if nothing has passed for too long."""
        cut = {pair: since_s for pair, since_s in self._cut_since_s.items() if now_s - since_s > self._limit_s}
        reasons = {}
        for name in self._given_up(cut):
            others = sorted(other for pair in cut for other in pair - {name} if name in pair)
            since_s = min(since_s for pair, since_s in cut.items() if name in pair)
            reasons[name] = (
                f"nothing passes between it and {', '.join(others)} for {now_s - since_s:.1f} s, limit "
                f"{self._limit_s:.1f} s; it is heard here"
            )
        return reasons

    @property
    def _overdue_s(self) -> float:
        return max(_LEAST_S, _USUAL_TIMES * max(self._steps_s)) if self._steps_s else _FIRST_S

    def _given_up(self, cut: Collection[frozenset[str]]) -> tuple[str, ...]:
        """Return the devices without which nothing is cut: again and again the one that reaches fewest others."""
        left, gone = set(cut), list[str]()
        while left:
            gone.append(max(reversed(self._devices), key=lambda name: sum(name in pair for pair in left)))
            left = {pair for pair in left if gone[-1] not in pair}
        return tuple(gone)

    def _pairs(self) -> str:
        """Return who and who are cut off from each other, those together that are cut off from the same ones."""
        left, names_by_others = set(self._cut_since_s), dict[frozenset[str], list[str]]()
        for name in self._given_up(left):
            others = frozenset(other for pair in left if name in pair for other in pair - {name})
            names_by_others.setdefault(others, []).append(name)
            left = {pair for pair in left if name not in pair}
        sides = ([", ".join(sorted(one)) for one in (names, others)] for others, names in names_by_others.items())
        return "; ".join(" and ".join(side) for side in sides)
