"""Turn files into a training request: a plan, or an earlier run's checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spantrain.app.train import Resume, TrainRequest
from spantrain.app.trainable import not_trained_yet
from spantrain.config.artefacts import profile_of_plan, read_plan, read_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, PlanError
from spantrain.policy.limits import check_limits
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.schedule.registry import check_schedule

__all__ = ["has_own_job", "new_run", "resumed_run"]

_MOST_SHOWN = 120
"""Characters of a value in a message: a transformers configuration has kilobytes."""


def new_run(plan_path: Path, job: TrainJob, schedule: str | None, out: Path) -> TrainRequest:
    """Read a plan and its profile.

    Raises:
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
    """
    plan, profile, profile_path = _read_plan(plan_path)
    return TrainRequest(
        plan=plan,
        profile=profile,
        profile_path=profile_path,
        job=job,
        schedule=check_schedule(schedule or plan.schedule),
        out=out,
    )


def resumed_run(
    run: Path, steps: int, out: Path, *, plan_path: Path | None = None, job: TrainJob | None = None
) -> TrainRequest:
    """Read what an earlier run left, to go on to `steps` in all: under its own plan, or under another one.

    Args:
        run: folder of the run.
        steps: in all, those done included.
        out: where the run that goes on writes.
        plan_path: of another plan for the same model: other cuts, degrees, shares, devices, also another global batch.
        job: of a run that has none of its own yet: what `spantrain import` made.

    Raises:
        ConfigError: there is no checkpoint, or it has as many steps already, or is of another model.
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
    """
    folder = latest_checkpoint(run)
    manifest = read_manifest(folder)
    if steps <= manifest.step:
        raise ConfigError(f"{run} has {manifest.step} steps done; --steps is the number in all, give more than that")
    plan, profile, profile_path, schedule = _what_to_run(run, manifest, plan_path)
    job = manifest.job or job
    assert job is not None, "a run that has no job of its own is given one"
    return TrainRequest(
        plan=plan,
        profile=profile,
        profile_path=profile_path,
        job=replace(job, steps=steps),
        schedule=schedule,
        out=out,
        resume=Resume(folder=folder, content=manifest.content, losses=manifest.losses, ledger=manifest.ledger),
        calm_plan=None if plan_path is not None else manifest.calm_plan,
    )


def has_own_job(run: Path) -> bool:
    """Whether a run has a job and a plan of its own to go on with; what `spantrain import` made has none.

    Raises:
        ConfigError: there is no checkpoint.
    """
    return read_manifest(latest_checkpoint(run), check_files=False).job is not None


def _what_to_run(run: Path, manifest: Manifest, plan_path: Path | None) -> tuple[Plan, Profile, str, str]:
    if plan_path is not None:
        plan, profile, profile_path = _read_plan(plan_path)
        _check_same_model(run, manifest, plan, plan_path)
        return plan, profile, profile_path, plan.schedule
    if manifest.plan is None:
        raise ConfigError(f"{run} was imported and has no plan yet; make one for its model, and give it with --plan")
    return manifest.plan, read_profile(Path(manifest.profile)), manifest.profile, manifest.schedule


def _check_same_model(run: Path, manifest: Manifest, plan: Plan, plan_path: Path) -> None:
    """Check that a plan is for the model of a checkpoint, and once samples were consumed, for the same data."""
    data = () if manifest.step == 0 else ("dataset", "sequence_length", "tokenizer")
    before, now = (
        _compared(spec, ("family", "source_sha256", "objective", *data)) for spec in (manifest.model, plan.model)
    )
    wrong = [
        f"{name}: {_short(before.get(name))} there, {_short(now.get(name))} in the plan"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    if wrong:
        raise ConfigError(
            f"{plan_path} is not for the model that {run} has a checkpoint of ({'; '.join(wrong)}); plan for "
            f"{manifest.model.name} as it was trained; to go on with other data, export the run and import it"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _compared(spec: ModelSpec, names: Sequence[str]) -> dict[str, object]:
    """Return what makes a model: these fields, and each of the configuration's."""
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in spec.config.items()}
    return {name: getattr(spec, name) for name in names} | {f"config.{key}": value for key, value in config.items()}


def _read_plan(plan_path: Path) -> tuple[Plan, Profile, str]:
    plan = read_plan(plan_path)
    _check(plan)
    profile = profile_of_plan(plan, plan_path)
    assert plan.profile is not None
    return plan, profile, str((plan_path.parent / plan.profile.path).resolve())


def _check(plan: Plan) -> None:
    if plan.outer is not None:
        raise PlanError(
            f"this plan joins {', '.join(group.name for group in plan.outer.groups)} by an outer optimizer: each "
            "of them trains its own plan, plan.GROUP.json beside it, as a cluster (docs/outer.md): "
            "spantrain outer run outer.yaml --cluster GROUP -- spantrain train plan.GROUP.json; or plan again without "
            "--allow-outer"
        )
    problems = check_limits(plan)
    if problems:
        raise PlanError("the plan would stop in the middle of a step:\n" + "\n".join(f"  {p}" for p in problems))
    divided = not_trained_yet(plan)
    if divided:
        raise PlanError(
            f"this plan is for comparison by simulation only, it cannot be trained: {'; '.join(divided)}; plan again "
            "without --allow-sharded-state, or with another strategy"
        )
