"""A run whose devices leave and come, by virtual time: what live runs decide, over the predicted steps of plans.

Each loss is detected by the detector of live runs, from heartbeats that stop; the plans are given by whoever calls.
"""

from collections.abc import Iterable
from functools import cache
from typing import Protocol

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.cost.moving import moved
from spantrain.recovery.detection import HEARTBEAT_S, LossDetector
from spantrain.recovery.policy import holds_all, is_worth

PREPARED_S = 0.01
"""Seconds until a light change that was worked out beforehand is taken over (`app.training.recovery.carry_on`)."""
_PLAN_S = 0.3
"""Seconds that a plan takes to be worked out: an assumption, not a measurement."""
_RESTS = 2
"""Beforehand, it takes so many times as long: the thread that does it rests as long as it works."""
_BEATS, _LOOKS = 20, 3


class AvailabilityEvent(Record):
    """A device leaves without a word, or comes."""

    at_s: float
    device: str
    comes: bool


class Goodput(Record):
    """What comes of a run."""

    samples_per_s: float
    """Of steps that stay committed."""
    share: float
    """Of what the devices present could have done under the planner's plan for them, with no pause."""
    steps: int
    steps_lost: int
    """Steps under way at a loss, and those behind the checkpoint that the run went back to."""
    moved_bytes: int
    pause_s: dict[str, float]
    """By part: detect, plan, move, and none: no plan fits the devices present."""
    rent_usd: float | None
    """Of the devices present; None where one is not rented at a list price."""
    lines: tuple[str, ...]
    """Of each event, as live runs say it, after its time."""


class Plans(Protocol):
    """Gives plans; None where none fits."""

    def light(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        """Return the light change and its phrase."""

    def full(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        """Return the planner's answer and its phrase."""

    def calm_step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step without keepers."""

    def step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step with its wait for keepers."""

    def ahead(self, before: Plan, after: Plan) -> "GoesAhead | None":
        """Return how a change takes place whose state goes ahead; None where that is not worth the while."""


class GoesAhead(Record):
    """State that goes ahead of a change of plan, beside the steps."""

    beside_s: float
    """How long that takes."""
    slower_s: float
    """How much longer steps take meanwhile, all together."""
    left_s: float
    """How long all stand still in the end."""


@cache
def detect_s(*, alone: bool) -> float:
    """Return the seconds from the last heartbeat of a device until it is lost; `alone`: nobody else is heard."""
    detector, names = LossDetector(), ("gone",) if alone else ("gone", "left")
    for beat in range(_BEATS):
        for name in names:
            detector.on_heartbeat(beat * HEARTBEAT_S, name)
    last_s, look = (_BEATS - 1) * HEARTBEAT_S, 0
    while not any(name == "gone" for name, _ in detector.lost(last_s + look * HEARTBEAT_S / _LOOKS)):
        look += 1
        if not alone and look % _LOOKS == 0:
            detector.on_heartbeat(last_s + look * HEARTBEAT_S / _LOOKS, "left")
    return look * HEARTBEAT_S / _LOOKS


class AvailabilityRun:
    """The state of a run at a virtual time; `now_s` only grows."""

    def __init__(
        self, plan: Plan, profile: Profile, plans: Plans, optimizer: str, checkpoint_every: int | None
    ) -> None:
        """Begin with all devices of the cluster present."""
        self._first, self._profile, self._plans = plan, profile, plans
        self._optimizer, self._every = optimizer, checkpoint_every
        self._present = frozenset(profile.cluster.device_by_name)
        self._plan: Plan | None = plan
        self._held, self._holders = plan, frozenset(plan.devices)
        self._step_s, self._free_s, self._now_s = plans.step_s(plan), 0.0, 0.0
        self._next: tuple[float, Plan, GoesAhead | None] | None = None
        """A better plan, when it is known and what is to go ahead is there, and how that goes."""
        self._ready_s = self._prepares_s(plan)
        """When the light change for each loss is known."""
        self._possible, self.steps, self.steps_lost, self.moved_bytes = 0.0, 0, 0, 0
        self.pause_s = {"detect": 0.0, "plan": 0.0, "move": 0.0, "none": 0.0}
        self.present_s: dict[str, float] = dict.fromkeys(self._present, 0.0)
        self.lines: list[str] = []

    def run(self, events: Iterable[AvailabilityEvent], until_s: float) -> float:
        """Go through events in order of time; return the steps that the devices present could have done."""
        for event in sorted(events, key=lambda event: event.at_s):
            if event.at_s < until_s and event.comes != (event.device in self._present):
                self._advance(event.at_s)
                (self._come if event.comes else self._leave)(event.at_s, event.device)
        self._advance(until_s)
        self._interrupt(until_s)
        return self._possible

    @property
    def progress(self) -> float:
        """Steps that stay, with the part of the one under way."""
        under_way_s = self._now_s - self._free_s if self._plan is not None else 0.0
        return self.steps + max(0.0, under_way_s) / self._step_s

    def _advance(self, to_s: float) -> None:
        """Commit the steps that end by then, and take over a plan that is ready."""
        span_s, self._now_s = to_s - self._now_s, to_s
        for name in self._present:
            self.present_s[name] += span_s
        best = self._plans.full(self._first, self._present) if self._present else None
        steps_s = [self._plans.calm_step_s(best[0])] if best else []
        if self._plan is None:
            self.pause_s["none"] += span_s
        else:
            if self._next is not None:
                ready_s, plan, ahead = self._next
                self._commit(min(ready_s, to_s))
                if self._free_s + self._step_s <= to_s:
                    self._commit(self._free_s + self._step_s)
                    steps_s.append(self._step_s)
                    self._change(plan, self._free_s, {}, ahead)
            self._commit(to_s)
            steps_s.append(self._step_s)
        if steps_s:
            self._possible += span_s / min(steps_s)

    def _commit(self, to_s: float) -> None:
        if self._plan is not None and to_s >= self._free_s:
            self._held, self._holders = self._plan, self._present & frozenset(self._plan.devices)
            done = int((to_s - self._free_s) / self._step_s + 1e-9)
            self.steps += done
            self._free_s += done * self._step_s

    def _change(self, plan: Plan, from_s: float, pauses: dict[str, float], ahead: GoesAhead | None = None) -> None:
        """Go over to a plan, when its pauses and the move of its state are over, or of what has not gone ahead."""
        move_s, size = moved(self._profile, self._optimizer, self._held, self._holders, plan)
        if ahead is not None:
            move_s = ahead.slower_s + ahead.left_s
        for part, seconds in (pauses | {"move": move_s}).items():
            self.pause_s[part] += seconds
        self.moved_bytes += size
        self._plan, self._step_s, self._next = plan, self._plans.step_s(plan), None
        self._free_s = from_s + sum(pauses.values()) + move_s
        self._ready_s = self._free_s + self._prepares_s(plan)

    @staticmethod
    def _prepares_s(plan: Plan) -> float:
        return _RESTS * _PLAN_S * len(plan.devices)

    def _interrupt(self, at_s: float) -> None:
        """Take back what was reckoned of a pause that ends early."""
        left_s = max(0.0, self._free_s - at_s) if self._plan is not None else 0.0
        for part in ("move", "plan", "detect"):
            early_s = min(left_s, self.pause_s[part])
            self.pause_s[part] -= early_s
            left_s -= early_s

    def _leave(self, at_s: float, device: str) -> None:
        self._present -= {device}
        self._holders -= {device}
        if self._plan is None or device not in self._plan.devices:
            self._next = None
            self._tell(at_s, f"{device} left: it had no part in the run")
            return
        self._interrupt(at_s)
        silent_s = detect_s(alone=not self._present)
        lost = f"{device} lost (no heartbeat for {silent_s:.1f} s)"
        self.steps_lost += at_s > self._free_s
        self._go_on(at_s, lost, {"detect": silent_s, "plan": PREPARED_S if at_s >= self._ready_s else _PLAN_S})

    def _go_on(self, at_s: float, what: str, pauses: dict[str, float]) -> None:
        """Take the light change, from memory or from the newest checkpoint; or wait for devices."""
        found = self._plans.light(self._held, self._present) if self._present else None
        if found is None:
            self._plan, self._next, self._holders = None, None, frozenset()
            self._tell(at_s, f"{what}: no plan fits the devices that are left; the run waits for others")
            return
        again = f"step {self.steps + 1} is trained again"
        if not holds_all(self._held, self._holders):
            kept = self.steps // self._every * self._every if self._every else 0
            where = f"the checkpoint after {kept} steps" if kept else "the beginning"
            again = f"all go back to {where} ({self.steps - kept} steps trained again)"
            self.steps_lost += self.steps - kept
            self.steps, self._holders = kept, frozenset()
        self._change(found[0], at_s, pauses)
        self._tell(at_s, f"{what}: {again}, {found[1]}")
        self._consider(found[0], self._free_s)

    def _come(self, at_s: float, device: str) -> None:
        self._present |= {device}
        if self._plan is None:
            self._go_on(at_s, f"{device} joined", {"plan": _PLAN_S})
            return
        how = self._consider(self._plan, max(at_s, self._free_s))
        stands_by = " joined, and stands by: steps would be no shorter with it"
        self._tell(at_s, f"{device} joined: {how}" if how else f"{device}{stands_by}")

    def _consider(self, plan: Plan, from_s: float) -> str:
        """Have the planner's answer be taken over if steps get shorter by it; return its phrase, or nothing."""
        found = self._plans.full(plan, self._present)
        if found is None or not is_worth(self._plans.step_s(plan), self._plans.step_s(found[0])):
            return ""
        ahead = self._plans.ahead(plan, found[0])
        self._next = (from_s + _PLAN_S + (ahead.beside_s if ahead else 0.0), found[0], ahead)
        return found[1]

    def _tell(self, at_s: float, text: str) -> None:
        self.lines.append(f"{at_s:.1f} s: {text}")
