"""The plans that a run has had, one after another: their files in its folder, and what each change took."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.training.run_folder import free_name
from spantrain.config.artefacts import write_plan
from spantrain.config.files.json_codec import to_json
from spantrain.core.plan import Plan
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.core.trace import Interval, Trace
from spantrain.runtime.coordinator.advice import Advice
from spantrain.runtime.coordinator.barrier import SwitchFigures

SWITCHES_FILE = "switches.jsonl"


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """One plan that took over while a run went on."""

    first_step: int
    """Under it."""
    generation: int
    reason: str
    plan: str
    """Its file in the run's folder."""
    duration_s: float
    """That the devices were kept from working: the slowest of them, from the verdict on the step before."""
    moved_bytes: int
    """Of parameters and optimizer state, between devices."""

    def __str__(self) -> str:
        moved = f"{format_bytes(self.moved_bytes)} moved" if self.moved_bytes else "nothing moved"
        return (
            f"plan {self.generation} from step {self.first_step + 1} on ({self.plan}): {self.reason}; "
            f"{format_seconds(self.duration_s)}, {moved}"
        )


class PlanChanges:
    """Follows a run from plan to plan."""

    def __init__(self, plan: Plan, *, first_step: int, folder: Path, tell: Callable[[str], None]) -> None:
        """Begin with a plan; `tell` says a line to the user."""
        self._folder = folder
        self._tell = tell
        self._goes_on = first_step > 0
        """Whether the folder's log is of this run."""
        self._plans = [(first_step, plan)]
        self._files: dict[str, Plan] = {}
        self._under_way: tuple[str, str] | None = None
        """File and reason of the plan that takes over."""
        self.changes: list[PlanChange] = []

    @property
    def plan(self) -> Plan:
        """The present one."""
        return self._plans[-1][1]

    @property
    def first_step(self) -> int:
        """Of the present plan."""
        return self._plans[-1][0]

    @property
    def files(self) -> Mapping[str, Plan]:
        """The plans that took over, by the names of their files in the run's folder."""
        return self._files

    def after(self, steps_done: int) -> Plan:
        """Return the plan of the step behind so many."""
        return next(plan for first, plan in reversed(self._plans) if first <= steps_done)

    def decided(self, step: int, advice: Advice) -> None:
        """Note that a plan takes over behind a step; write it down.

        Raises:
            UsageError: it cannot be written.
        """
        plan = advice.plan
        name = free_name(self._folder, f"plan-{plan.generation}")
        self._folder.mkdir(parents=True, exist_ok=True)
        write_plan(replace(plan, profile=None), self._folder / name)
        self._files[name] = plan
        self._plans.append((step + 1, plan))
        self._under_way = name, advice.reason

    def ended(self, steps_done: int) -> None:
        """Forget a plan that has run no step."""
        if self.first_step >= steps_done and self._under_way is not None and len(self._plans) > 1:
            self._plans.pop()
            del self._files[self._under_way[0]]

    def done(self, figures: SwitchFigures) -> None:
        """Note what the change took, behind the first step under the plan.

        Raises:
            OSError: it cannot be written down.
        """
        assert self._under_way is not None, "a plan is decided on before it takes over"
        name, reason = self._under_way
        change = PlanChange(
            first_step=self.first_step,
            generation=self.plan.generation,
            reason=reason,
            plan=name,
            duration_s=figures.duration_s,
            moved_bytes=figures.moved_bytes,
        )
        self._under_way = None
        self.changes.append(change)
        with (self._folder / SWITCHES_FILE).open("a" if self._goes_on else "w", encoding="utf-8") as log:
            log.write(json.dumps(to_json(change), ensure_ascii=False) + "\n")
        self._goes_on = True
        self._tell(str(change))


def with_reasons(trace: Trace, changes: Sequence[PlanChange]) -> Trace:
    """Return a run's trace with a moment on the `adapter` lane where a device went over to another plan, saying why."""
    of_step = {change.first_step: change for change in changes}
    first: dict[tuple[str, int], Interval] = {}
    for interval in sorted(trace.intervals, key=lambda interval: interval.start_s):
        if interval.lane == "compute" and interval.step in of_step:
            first.setdefault((interval.device, interval.step), interval)
    moments = (
        Interval(
            device=device,
            lane="adapter",
            name=f"plan {of_step[step].generation}",
            step=step,
            start_s=interval.start_s,
            end_s=interval.start_s,
            detail={"reason": of_step[step].reason, "plan": of_step[step].plan},
        )
        for (device, step), interval in first.items()
    )
    return replace(trace, intervals=(*trace.intervals, *moments))
