"""What `goodput.py --live` does: workers killed in turn and started again, beside a run without faults."""

import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recovery import CALM, TOLERANCE, Case, Watcher, case_of
from spantrain.app.training.outcome import TrainOutcome
from spantrain.errors import PlanError
from spantrain.planner.present import full_plan
from spantrain.runtime.coordinator.barrier import StepOutcome

EVERY_S, BACK_S = 30.0, 15.0
"""Seconds from one loss to the next, and from a loss until its worker is started again."""
LEARNING_RATE = 3e-4
"""Gentler than the default, with which losses leap and two runs without faults part by 1e-4 after 25 steps."""
CALM_SPEEDS = ("0.05", "0.02")
"""Of the devices in runs without faults: their plans differ, and so do the orders in which numbers are added."""
_LIMIT = 1_000_000
"""Steps that no run comes to: a request to stop ends it."""
OPTIMIZER = "adamw"

Event = tuple[float, str, bool]
"""When, which device, and whether it came."""


@dataclass
class Struck(Watcher):
    """Kills workers in turn from the first step on, and notes who is there when."""

    names: tuple[str, ...] = ()
    minutes: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    there: list[Event] = field(default_factory=list)
    """Who was killed, and who has joined again."""
    started: list[Event] = field(default_factory=list)
    """The same, with the start of the worker in the place of its joining."""

    def step(self, outcome: StepOutcome, metrics: object, total_steps: int) -> None:
        """Note it; with the first step faults begin."""
        super().step(outcome, metrics, total_steps)
        self.ended_s = time.monotonic()
        if not self.began_s:
            self.began_s = self.ended_s
            threading.Thread(target=self._strike, daemon=True).start()

    def _strike(self) -> None:
        for turn in range(int(self.minutes * 60 / EVERY_S)):
            name, at_s = self.names[turn % len(self.names)], self.began_s + turn * EVERY_S + EVERY_S - BACK_S
            self._wait(at_s)
            self.kill(name)
            self._note(name, comes=False, lists=(self.there, self.started))
            self._wait(at_s + BACK_S)
            assert self.session is not None
            self.session.start_again(name)
            self._note(name, comes=True, lists=(self.started,))
            threading.Thread(target=self._await, args=(name,), daemon=True).start()
        self._wait(self.began_s + self.minutes * 60)
        self.stop.ask()

    def _note(self, name: str, *, comes: bool, lists: tuple[list[Event], ...]) -> None:
        for events in lists:
            events.append((time.monotonic(), name, comes))

    def _await(self, name: str) -> None:
        assert self.session is not None
        while name not in self.session.coordinator.here():
            time.sleep(0.05)
        self._note(name, comes=True, lists=(self.there,))

    def _wait(self, until_s: float) -> None:
        time.sleep(max(0.0, until_s - time.monotonic()))


@dataclass
class Stopped(Watcher):
    """Ends a run after so many steps."""

    after: int = 0

    def step(self, outcome: StepOutcome, metrics: object, total_steps: int) -> None:
        """Note it."""
        super().step(outcome, metrics, total_steps)
        if len(self.steps) == self.after:
            self.stop.ask()


@dataclass
class CalmSteps:
    """Measured seconds of a step of the planner's plan, by devices present; each measured when it is asked for."""

    case: Case
    folder: Path
    known: dict[frozenset[str], float | None] = field(default_factory=dict)

    def __call__(self, present: frozenset[str]) -> float | None:
        """Return the seconds; None where no plan fits."""
        if present not in self.known:
            self.known[present] = self._measured(present)
        return self.known[present]

    def _measured(self, present: frozenset[str]) -> float | None:
        try:
            plan = full_plan(self.case.plan, self.case.profile, present, optimizer=OPTIMIZER).plan
        except PlanError:
            return None
        outcome = self.case.run(self.folder / str(len(self.known)), Watcher(), steps=CALM, plan=plan, protect=0)
        print(f"  calm, {len(present)} devices: {outcome.step_s_measured:.3f} s a step", flush=True)
        return outcome.step_s_measured


def possible_steps(events: list[Event], watcher: Struck, calm: CalmSteps) -> float:
    """Return the steps that the devices present could have done from the end of the first step to that of the last."""
    present, now_s, found = frozenset(watcher.names), watcher.began_s, 0.0
    for at_s, name, comes in (*sorted(events), (watcher.ended_s, "", True)):
        until_s = min(at_s, watcher.ended_s)
        step_s = calm(present) if until_s > now_s else None
        found += (until_s - now_s) / step_s if step_s else 0.0
        now_s = max(now_s, until_s)
        present = present | {name} if comes else present - {name}
    return found


def live(minutes: float, *, network: bool) -> tuple[list[str], dict[str, Any]]:
    """Return lines and figures of a run whose workers are killed in turn."""
    case = replace(case_of("laptop", network=network), learning_rate=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watcher = Struck(names=tuple(case.profile.cluster.device_by_name), minutes=minutes)
        outcome = case.run(folder / "faults", watcher, steps=_LIMIT)
        print(f"  {len(outcome.losses)} steps in {watcher.ended_s - watcher.began_s:.0f} s", flush=True)
        calm = CalmSteps(case, folder)
        possible = [possible_steps(events, watcher, calm) for events in (watcher.there, watcher.started)]
        references = [calm_run(speed, folder / speed, len(outcome.losses)) for speed in CALM_SPEEDS]
    data = figures(watcher, outcome, references, possible)
    data["calm_step_s"] = {", ".join(sorted(present)): step_s for present, step_s in calm.known.items()}
    return table_of(minutes, data), data


def calm_run(speed: str, folder: Path, steps: int) -> TrainOutcome:
    """Train without faults; losses are those of samples and parameters, however fast devices and links are."""
    case = replace(case_of(f"laptop:{speed}", network=False), learning_rate=LEARNING_RATE)
    return case.run(folder, Stopped(after=steps), steps=_LIMIT, protect=0)


def figures(
    watcher: Struck, outcome: TrainOutcome, references: list[TrainOutcome], possible: list[float]
) -> dict[str, Any]:
    """Return what came of a run."""
    reference, other_plan = references
    off, calm_off = (
        [abs(one - other) for one, other in zip(run.losses, reference.losses, strict=False)]
        for run in (outcome, other_plan)
    )
    said = [text for _, text in watcher.notes]
    return {
        "steps": len(outcome.losses) - 1, "seconds": watcher.ended_s - watcher.began_s,
        "possible": possible[0], "possible_from_start": possible[1],
        "killed": sum(not comes for _, _, comes in watcher.there),
        "joined": sum(comes for _, _, comes in watcher.there),
        "trained_again": sum("is trained again" in text for text in said),
        "went_back": sum("go back" in text for text in said),
        "pauses_s": [change.duration_s for change in outcome.plan_changes],
        "changes": [change.reason for change in outcome.plan_changes],
        "worst_loss_off": max(off), "last_loss_off": off[-1],
        "losses": list(outcome.losses), "losses_without_faults": list(reference.losses),
        "worst_loss_off_without_faults": max(calm_off), "last_loss_off_without_faults": calm_off[-1],
    }  # fmt: skip


def table_of(minutes: float, found: dict[str, Any]) -> list[str]:
    """Return lines for people."""
    pauses, off = found["pauses_s"], found["last_loss_off"]
    verdict = "holds" if off <= TOLERANCE and not found["went_back"] else "missed"
    lines = [
        f"laptop, gpt2-tiny, {minutes:g} min: {found['killed']} workers killed in turn, {found['joined']} joined again",
        f"{'steps done':<56}{found['steps']}",
        f"{'  over what those that had joined could have done':<56}{found['steps'] / found['possible']:.3f}",
        f"{'  the same, devices there from the start of a worker':<56}"
        f"{found['steps'] / found['possible_from_start']:.3f}",
        f"{'times that all went back to the beginning':<56}{found['went_back']}",
        f"{'the last loss is off by':<56}{off:.1e}  at most {TOLERANCE:g}  {verdict}",
        f"{'  the worst of all':<56}{found['worst_loss_off']:.1e}",
    ]
    lines.append(
        f"{'  two runs without faults by other plans: last, worst':<56}{found['last_loss_off_without_faults']:.1e}, "
        f"{found['worst_loss_off_without_faults']:.1e}"
    )
    if pauses:
        lines.append(
            f"{'changes of plan, and pause: median, worst, all':<56}{len(pauses)}, {statistics.median(pauses):.2f} s, "
            f"{max(pauses):.2f} s, {sum(pauses):.1f} s"
        )
    return lines
