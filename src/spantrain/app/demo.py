"""The demonstration: measure, group, plan, train, compare, in one go on an emulated network."""

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from spantrain.app.faults import Fault, FaultKind
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import PlanChange, TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.run_folder import alone_in, refuse_run, remove_old_run
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOutcome
from spantrain.planner.groups import group_devices
from spantrain.planner.request import JobSpec

_PRESET, _MODEL, _GLOBAL_BATCH, _SCHEDULE = "laptop", "gpt2-tiny", 48, "critical-path"
_BASELINE_STEPS = 8
"""Steps on the best single site, in the same run."""
_MARK = "demo.txt"
"""Says in a folder whose it is."""
_SINGLE_SITE = "single-site"
_FAULTS = "faults"
_KILLED, _BACK, _LAST = 4, 8, 20
"""Steps of the run with faults: those before the device is killed, before it is started again, and all."""


class FaultsShown(Record):
    """What became of the run in which a device was killed."""

    device: str
    changes: tuple[PlanChange, ...]
    steps: int
    largest_loss_difference: float
    """From the run without faults, over all steps."""
    samples_per_s: float
    """At its end, with the device back."""


class DemoSummary(TrainOutcome):
    """What came out of the run on all devices, and beside it; written as summary.json."""

    best_single_site_samples_per_s: float
    """Measured in the same run."""
    best_single_site_devices: tuple[str, ...]
    best_single_device_samples_per_s_predicted: float | None
    speedup_over_single_site: float
    seconds: Mapping[str, float]
    """What each part of the demonstration took."""
    faults: FaultsShown | None = None


def run_demo(steps: int, where: SessionOptions, out: Path, listener: Reporter, *, faults: bool = False) -> DemoSummary:
    """Run the whole demonstration; it replaces what an earlier one has left in the folder.

    `steps`: of the run on all devices; `faults`: whether a second act kills a device in mid-run, and starts it again.

    Raises:
        ConfigError: the folder holds a run that is no demonstration's.
    """
    _take_folder(out)
    cluster = load_preset(_PRESET)
    names = tuple(device.name for device in cluster.devices)
    seconds: dict[str, float] = {}
    begun_s = time.monotonic()

    def lap(part: str) -> None:
        seconds[part] = time.monotonic() - begun_s - sum(seconds.values())

    with alone_in(out), open_session(cluster, names, where, out / "logs", listener) as session:
        lap("start")
        profile = measure_profile(session, resolve_model(_MODEL), ProfileOptions(use_cache=False), listener)
        write_profile(profile, out / "profile.json")
        listener.show_groups(group_devices(profile), profile)
        lap("profile")
        planned = make_plan(profile, JobSpec(global_batch=_GLOBAL_BATCH, schedule=_SCHEDULE))
        reference = reference_to_profile(out / "profile.json", out / "plan.json")
        planned = replace(planned, plan=replace(planned.plan, profile=reference, generation=1))
        write_plan(planned.plan, out / "plan.json", planned.report)
        listener.show_plan(planned)
        lap("plan")
        acts = _Acts(session=session, profile=profile, listener=listener)
        ours = acts.train(planned.plan, steps, out)
        lap("train")
        assert planned.single_site_plan is not None, "the demonstration's model fits on one site"
        site_plan = planned.single_site_plan
        listener.note(f"For comparison: the best single site alone ({', '.join(site_plan.devices)})")
        site = acts.train(site_plan, _BASELINE_STEPS, out / _SINGLE_SITE)
        lap("single site")
        faulted = None
        if faults:
            faulted = acts.with_faults(planned.plan, ours, out / _FAULTS)
            lap("faults")
        listener.show_training(ours, planned.plan, planned.report)
        if faulted is not None:
            listener.note(
                f"With {faulted.device} killed and back: losses of {faulted.steps} steps as without faults, to "
                f"{faulted.largest_loss_difference:.1e}; {faulted.samples_per_s:.1f} samples/s at the end "
                f"({ours.samples_per_s:.1f} without faults)"
            )
    lap("stop")
    return replace(_summary(ours, site, site_plan, planned, seconds), faults=faulted)


def _take_folder(out: Path) -> None:
    """Remove the demonstration that was here; a run of another sort is refused."""
    if not (out / _MARK).exists():
        refuse_run(out, "name another folder with --out")
    for folder in (out, out / _SINGLE_SITE, out / _FAULTS):
        remove_old_run(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).write_text("This folder is the demonstration's, which replaces what it left here before.\n")


class _Acts(Record):
    """Runs of the demonstration, on one session."""

    session: Session
    profile: Profile
    listener: Reporter

    def train(self, plan: Plan, steps: int, out: Path, faults: tuple[Fault, ...] = ()) -> TrainOutcome:
        """Train so many steps of a plan."""
        request = TrainRequest(
            plan=plan,
            profile=self.profile,
            profile_path=str((out / "profile.json").resolve()),
            job=TrainJob(steps=steps, evaluate_every=0 if steps == _BASELINE_STEPS else steps),
            out=out,
            options=RunOptions(faults=faults, protect=None),
        )
        return train(self.session, request, StopRequest(), self.listener)

    def with_faults(self, plan: Plan, ours: TrainOutcome, out: Path) -> FaultsShown:
        """Train the same once more, and lose a device of a stage that others hold as well, if there is one."""
        shared = [one.devices[-1] for stage in plan.stages if len(stage.replicas) > 1 for one in stage.replicas[-1:]]
        victim = (shared or plan.devices)[-1]
        self.listener.note(f"Once more: {victim} is killed after {_KILLED} steps, and started again after {_BACK}")
        kill = Fault(after_step=_KILLED, what=FaultKind.KILL, device=victim)
        back = Fault(after_step=_BACK, what=FaultKind.RESTART, device=victim)
        found = self.train(plan, min(_LAST, ours.steps), out, (kill, back))
        pairs = zip(found.losses, ours.losses, strict=False)
        return FaultsShown(
            device=victim,
            changes=found.plan_changes,
            steps=found.steps,
            largest_loss_difference=max(abs((one or 0.0) - (other or 0.0)) for one, other in pairs),
            samples_per_s=found.samples_per_s,
        )


def _summary(
    ours: TrainOutcome, site: TrainOutcome, site_plan: Plan, planned: PlanOutcome, seconds: Mapping[str, float]
) -> DemoSummary:
    return DemoSummary(
        **{one.name: getattr(ours, one.name) for one in fields(ours)},
        best_single_site_samples_per_s=site.samples_per_s,
        best_single_site_devices=site_plan.devices,
        best_single_device_samples_per_s_predicted=planned.best_single_device.samples_per_s,
        speedup_over_single_site=ours.samples_per_s / site.samples_per_s,
        seconds=seconds,
    )
