"""What a run leaves in its folder for those who look at it later: plan, profile, trace, decisions, figures of steps.

Two runs in one folder would be mixed: one that holds a run already is refused, or the old one is removed.
"""

import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spantrain.app.live_requests import LOCK_FILE
from spantrain.app.training.metrics import METRICS_FILE
from spantrain.app.training.run_record import (
    DECISIONS_FILE,
    RUN_FILE,
    TRACE_FILE,
    RunRecord,
    files_of_run,
    sound_record,
)
from spantrain.app.watching.view import VIEW_FILE
from spantrain.config import artefacts
from spantrain.config.files.text_files import locked_file, write_atomically
from spantrain.config.traces.trace_file import write_decisions
from spantrain.core.messages import DeviceDecisions
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.trace import Trace
from spantrain.errors import ConfigError, UsageError
from spantrain.runtime.checkpoint.manifest import BEST, MANIFEST_FILE, MARKER, step_of
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.control.data_requests import JOURNAL_FOLDER
from spantrain.schedule.render.perfetto import perfetto_json

if TYPE_CHECKING:
    from spantrain.runtime.coordinator.barrier import StepOutcome


SWITCHES_FILE = "switches.jsonl"
_MAX_STEPS = 200
"""So many of the last steps are looked at, however long the run was."""


class RunContent(Record):
    """All that a run has to leave."""

    plan: Plan
    """The first one."""
    report: PlanReport
    """What is said of it."""
    profile: Profile
    record: RunRecord
    """Without the names of the files, which are found when they are written."""
    trace: Trace
    decisions: tuple[DeviceDecisions, ...]
    later_plans: Mapping[str, Plan] = field(default_factory=dict)
    """Those that took over, in order, by the names of their files: the last one is what the figures are of."""


def measured(steps: Sequence["StepOutcome"], *, overlap: bool) -> dict[str, Any]:
    """Return the figures of a run's steady steps, by the fields of its record; `overlap` as of `typical_s`."""
    steps = steps[-_MAX_STEPS:]
    durations_s, devices = [step.duration_s for step in steps], sorted(steps[0].busy_s)
    return {
        "steps_measured": len(steps),
        "step_s": typical_s(durations_s, overlap=overlap),
        "slowest_step_s": max(durations_s),
        "fastest_step_s": min(durations_s),
        "busy_s": {name: statistics.median(step.busy_s[name] for step in steps) for name in devices},
        "peak_held_samples": {name: max(step.peak_held_samples[name] for step in steps) for name in devices},
    }


def write_run(folder: Path, content: RunContent) -> None:
    """Write all files of a run that has ended.

    The plan goes to plan.json and its profile to profile.json, unless other ones lie there that no run has put there:
    those are left, and this run's go beside them (plan.trained.json, profile.trained.json). Plans that took over are
    plan-1.json and so on, by generation. run.json names them.

    Raises:
        UsageError: something cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan_name, profile_name = _write_inputs(folder, content)
    for name, plan in content.later_plans.items():
        path = folder / name
        own = replace(plan, profile=artefacts.reference_to_profile(folder / profile_name, path))
        artefacts.write_plan(own, path, artefacts.read_plan_report(path) if path.exists() else None)
    before = sound_record(folder)
    ran = (*before.earlier_plans, before.plan) if before else ()
    earlier = ran[: ran.index(plan_name)] if plan_name in ran else ()  # where the run goes on under this plan
    names = (*earlier, plan_name, *content.later_plans)
    by_s = -min((interval.start_s for interval in content.trace.intervals), default=0.0)
    intervals = (replace(one, start_s=one.start_s + by_s, end_s=one.end_s + by_s) for one in content.trace.intervals)
    flows = (replace(one, sent_s=one.sent_s + by_s, received_s=one.received_s + by_s) for one in content.trace.flows)
    trace = replace(content.trace, intervals=tuple(intervals), flows=tuple(flows))
    write_atomically(folder / TRACE_FILE, json.dumps(perfetto_json(trace)))
    shifted = (replace(log, trace_shift_s=log.trace_shift_s + by_s) for log in content.decisions)
    write_decisions(shifted, folder / DECISIONS_FILE)
    record = replace(content.record, plan=names[-1], earlier_plans=names[:-1], profile=profile_name)
    artefacts.write_artefact(record, artefacts.RUN_FORMAT, folder / RUN_FILE)


def typical_s(durations_s: Sequence[float], *, overlap: bool) -> float:
    """Return the median of steps' durations; if steps overlap, the mean of an even number.

    Those may end in pairs, one long and one short.
    """
    if overlap:
        return statistics.fmean(durations_s[len(durations_s) % 2 :] or durations_s)
    return statistics.median(durations_s)


def free_name(folder: Path, stem: str) -> str:
    """Return the name of a file that holds nothing, or what an earlier run wrote: STEM.json or STEM.trained.json."""
    return _free(folder, stem, files_of_run(folder)).name


def _write_inputs(folder: Path, content: RunContent) -> tuple[str, str]:
    """Write plan and profile, or find them written; return their names."""
    plan, profile = content.plan, content.profile
    for name in ("plan.json", f"plan-{plan.generation}.json"):
        found = _profile_beside(folder / name, plan)
        if found:
            return name, found
    ours = files_of_run(folder)
    with suppress(UsageError):
        if artefacts.read_profile(folder / "profile.json") == profile:
            ours = (*ours, "profile.json")
    profile_path = _free(folder, "profile", ours)
    artefacts.write_profile(profile, profile_path)
    plan_path = _free(folder, "plan", ours)
    artefacts.write_plan(
        replace(plan, profile=artefacts.reference_to_profile(profile_path, plan_path)), plan_path, content.report
    )
    return plan_path.name, profile_path.name


def _profile_beside(path: Path, plan: Plan) -> str:
    """Return the profile that a plan's file names, if it holds this plan, made from the same, and both are there."""
    try:
        found = artefacts.read_plan(path)
    except UsageError:
        return ""
    if found.profile is None or not (path.parent / found.profile.path).is_file():
        return ""
    same_profile = plan.profile is None or plan.profile.sha256 == found.profile.sha256
    return found.profile.path if same_profile and replace(plan, profile=found.profile) == found else ""


def _free(folder: Path, stem: str, ours: Sequence[str]) -> Path:
    path = folder / f"{stem}.json"
    return path if path.name in ours or not path.exists() else folder / f"{stem}.trained.json"


_INPUTS = ("plan.json", "profile.json")
"""What runs are made from: of no run alone."""
_FILES = (RUN_FILE, TRACE_FILE, DECISIONS_FILE, SWITCHES_FILE, METRICS_FILE)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Have a run's folder to oneself; where its disk knows no locks, that is not known. Nothing of it stays if unused.

    Raises:
        ConfigError: another program trains there.
    """
    before: set[str] | None = None
    with ExitStack() as stack:
        try:
            if folder.exists():
                before = {path.name for path in folder.iterdir()}
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked_file(folder / LOCK_FILE))
        except BlockingIOError:
            raise ConfigError(f"{folder}: a run is under way there; wait, stop it, or name another folder") from None
        except OSError:
            pass  # who cannot write there is told by what is written
        try:
            yield
        finally:
            with suppress(OSError):
                if {path.name for path in folder.iterdir()} - (before or set()) == {LOCK_FILE}:
                    (folder / LOCK_FILE).unlink()
                    if before is None:
                        folder.rmdir()


def check_not_under_way(folder: Path) -> None:
    """Refuse a folder where a run is under way; make nothing.

    Raises:
        ConfigError: it is one.
    """
    if (folder / LOCK_FILE).is_file():
        with alone_in(folder):
            pass


def refuse_run(folder: Path, ways: str) -> None:
    """Refuse a folder that holds a run; a plan and a profile alone are none, nor is one that has begun no step.

    Args:
        folder: to write a run to.
        ways: what can be done instead.

    Raises:
        ConfigError: it does.
    """
    checkpoints = (f"{CHECKPOINTS}/{path.name}" for path in _checkpoints(folder))
    files = [name for name in _FILES if (folder / name).exists()]
    if METRICS_FILE in files and not (folder / METRICS_FILE).stat().st_size:
        files.remove(METRICS_FILE)
    found = (*files, *checkpoints)
    if found:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ConfigError(f"{folder} holds a run already ({shown}), and two would be mixed: {ways}")


def remove_old_run(folder: Path, *, keep: Path | None = None) -> None:
    """Remove what a run has written into a folder, nothing else; a plan and a profile to start from stay.

    Args:
        folder: of the run.
        keep: a plan that is to be run, if it lies there.

    Raises:
        ConfigError: something cannot be removed, or the run is under way.
    """
    check_not_under_way(folder)
    try:
        # Plans and profiles that it has put there besides those that it was made from.
        plans = (name for name in files_of_run(folder) if Path(name).name == name and name not in _INPUTS)
        later = [folder / name for name in plans if keep is None or name != keep.name]
        for path in (*(folder / name for name in (*_FILES, VIEW_FILE)), *later):
            path.unlink(missing_ok=True)
        for path in (*(folder / "logs").glob("*.log"), *(folder / "tensorboard").glob("events.out.tfevents.*")):
            path.unlink()
        for path in _checkpoints(folder):
            (path / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(path)
        if (folder / JOURNAL_FOLDER).exists():
            shutil.rmtree(folder / JOURNAL_FOLDER)
        for marker in (BEST, MARKER):
            (folder / CHECKPOINTS / marker).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: of the old run, cannot be removed: {error.strerror}") from None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / CHECKPOINTS).glob("step-*")) if step_of(path) is not None]
