"""What a run leaves in its folder for those who look at it later: plan, profile, trace, decisions, figures of steps."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spantrain.config.artefacts import (
    read_artefact,
    read_plan,
    read_profile,
    reference_to_profile,
    write_artefact,
    write_plan,
    write_profile,
)
from spantrain.config.decision_log import write_decisions
from spantrain.core.decisions import DeviceDecisions
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.trace import Trace
from spantrain.errors import UsageError
from spantrain.schedule.perfetto import write_trace

__all__ = [
    "DECISIONS_FILE",
    "RUN_FILE",
    "TRACE_FILE",
    "MeasuredStep",
    "RunContent",
    "RunRecord",
    "read_run_record",
    "write_run",
]

RUN_FILE = "run.json"
TRACE_FILE = "trace.json"
DECISIONS_FILE = "decisions.jsonl"
_FORMAT = "spantrain-run"
_MOST_STEPS = 200
"""So many of the last steps are looked at, however long the run was."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What one step of a live run was: the coordinator's view."""

    duration_s: float
    """From one barrier to the next."""
    busy_s: Mapping[str, float]
    """By device."""
    peak_held_samples: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What was run, and medians over its steady steps (warm-up and evaluations left out)."""

    plan: str
    """Name of the plan's file in the run's folder."""
    profile: str
    """Name of the profile's file in the run's folder, or its path from there."""
    schedule: str
    optimizer: str
    """As `cost.memory` names it."""
    steps_measured: int
    """How many steps the figures are of; at most the last 200."""
    step_s: float
    slowest_step_s: float
    fastest_step_s: float
    busy_s: Mapping[str, float] = field(default_factory=dict)
    peak_held_samples: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device: the most that its tensors held at once (`runtime.memory`)."""


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """All that a run has to leave."""

    plan: Plan
    profile: Profile
    schedule: str
    optimizer: str
    """As `cost.memory` names it."""
    steps: tuple[MeasuredStep, ...]
    """The steady ones."""
    peak_bytes: Mapping[str, int]
    """By device, where it was measured."""
    trace: Trace
    decisions: tuple[DeviceDecisions, ...]


def write_run(folder: Path, content: RunContent) -> None:
    """Write all files of a run that has ended.

    The plan goes to plan.json and its profile to profile.json, unless other ones lie there that no run has put there:
    those are left, and this run's go beside them (plan.trained.json, profile.trained.json). run.json names them.

    Raises:
        UsageError: something cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan_name, profile_name = _write_inputs(folder, content.plan, content.profile)
    start_s = min((interval.start_s for interval in content.trace.intervals), default=0.0)
    write_trace(_shifted(content.trace, -start_s), folder / TRACE_FILE)
    shifted = (replace(log, trace_shift_s=log.trace_shift_s - start_s) for log in content.decisions)
    write_decisions(shifted, folder / DECISIONS_FILE)
    write_artefact(_record(plan_name, profile_name, content), _FORMAT, folder / RUN_FILE)


def read_run_record(folder: Path) -> RunRecord | None:
    """Return the record of a run's folder; None where there is none.

    Raises:
        ConfigError: it is something else, or wrong.
    """
    path = folder / RUN_FILE
    return read_artefact(RunRecord, _FORMAT, path) if path.exists() else None


def _write_inputs(folder: Path, plan: Plan, profile: Profile) -> tuple[str, str]:
    """Write plan and profile, or find them written; return their names."""
    plan_path = folder / "plan.json"
    if plan.profile is not None and (folder / plan.profile.path).is_file() and _holds(plan_path, plan):
        return plan_path.name, plan.profile.path
    ours = _written_before(folder)
    if _holds_profile(folder / "profile.json", profile):
        ours = (*ours, "profile.json")
    profile_path = _free(folder, "profile", ours)
    write_profile(profile, profile_path)
    plan_path = _free(folder, "plan", ours)
    write_plan(replace(plan, profile=reference_to_profile(profile_path, plan_path)), plan_path)
    return plan_path.name, profile_path.name


def _holds(path: Path, plan: Plan) -> bool:
    try:
        return read_plan(path) == plan
    except UsageError:
        return False


def _holds_profile(path: Path, profile: Profile) -> bool:
    try:
        return read_profile(path) == profile
    except UsageError:
        return False


def _written_before(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that an earlier run has put here."""
    try:
        record = read_run_record(folder)
    except UsageError:
        return ()
    return (record.plan, record.profile) if record else ()


def _free(folder: Path, stem: str, ours: Sequence[str]) -> Path:
    path = folder / f"{stem}.json"
    return path if path.name in ours or not path.exists() else folder / f"{stem}.trained.json"


def _record(plan: str, profile: str, content: RunContent) -> RunRecord:
    steps = content.steps[-_MOST_STEPS:]
    durations_s = [step.duration_s for step in steps]
    devices = sorted(steps[0].busy_s)
    return RunRecord(
        plan=plan,
        profile=profile,
        schedule=content.schedule,
        optimizer=content.optimizer,
        steps_measured=len(steps),
        step_s=statistics.median(durations_s),
        slowest_step_s=max(durations_s),
        fastest_step_s=min(durations_s),
        busy_s={name: statistics.median(step.busy_s[name] for step in steps) for name in devices},
        peak_held_samples={name: max(step.peak_held_samples[name] for step in steps) for name in devices},
        peak_bytes=content.peak_bytes,
    )


def _shifted(trace: Trace, by_s: float) -> Trace:
    return Trace(
        intervals=tuple(
            replace(interval, start_s=interval.start_s + by_s, end_s=interval.end_s + by_s)
            for interval in trace.intervals
        ),
        flows=tuple(
            replace(flow, sent_s=flow.sent_s + by_s, received_s=flow.received_s + by_s) for flow in trace.flows
        ),
        clock=trace.clock,
    )
