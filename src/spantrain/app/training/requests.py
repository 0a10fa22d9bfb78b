"""Turn files into a training request: a plan, or an earlier run's checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spantrain.app.planning.plan_files import check_fits_profile, open_plan, under_schedule
from spantrain.app.training.first_weights import first_weights
from spantrain.app.training.train import Resume, TrainRequest
from spantrain.config.artefacts import profile_at, profile_path_of, read_plan_report, read_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, PlanReport
from spantrain.core.profile import Profile
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, PlanError
from spantrain.planner.engine.outcome import not_trained_yet
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.worker.user_functions import with_own_functions
from spantrain.schedule.layout import check_limits

_ReadPlan = tuple[Plan, PlanReport, Profile, str]
"""What is to run, what is said of it, and the profile that it was made from, with its path."""
_MOST_SHOWN = 120
"""Characters of a value in a message: a transformers configuration has kilobytes."""


def new_run(
    plan_path: Path,
    job: TrainJob,
    out: Path,
    *,
    functions: Sequence[str],
    schedule: str | None = None,
    from_scratch: bool = False,
) -> TrainRequest:
    """Read a plan and its profile, and look at the weights to begin with.

    Args:
        plan_path: the plan's file.
        job: how to train.
        out: where the run writes.
        functions: of the user's, as `FILE.py:FUNCTION`, that may be called if the plan names them.
        schedule: to train in; None: the plan's own.
        from_scratch: whether weights in the folder of the model are left.

    Raises:
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
        ConfigError: the plan names a function that is not among those that may be called; or as `first_weights`.
    """
    plan, report, profile, profile_path = _read_plan(plan_path, functions)
    own = under_schedule(plan, schedule)
    return TrainRequest(
        plan=own,
        report=report if own is plan else replace(report, prediction=None),
        profile=profile,
        profile_path=profile_path,
        job=job,
        out=out,
        weights=first_weights(plan.model, from_scratch=from_scratch),
    )


def resumed_run(
    run: Path,
    steps: int,
    out: Path,
    *,
    functions: Sequence[str],
    plan_path: Path | None = None,
    job: TrainJob | None = None,
) -> TrainRequest:
    """Read what an earlier run left, to go on to `steps` in all: under its own plan, or under another one.

    Args:
        run: folder of the run.
        steps: in all, those done included.
        out: where the run that goes on writes.
        functions: of the user's, as `FILE.py:FUNCTION`, that may be called if the plan names them.
        plan_path: of another plan for the same model: other cuts, degrees, shares, devices, also another global batch.
        job: of a run that has none of its own yet: what `spantrain import` made.

    Raises:
        ConfigError: there is no checkpoint, or it has as many steps already, or is of another model; or the plan names
            a function that is not among those that may be called.
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
    """
    folder = latest_checkpoint(run)
    manifest = read_manifest(folder)
    if steps <= manifest.step:
        raise ConfigError(f"{run} has {manifest.step} steps done; --steps is the number in all, give more than that")
    plan, report, profile, profile_path = _what_to_run(run, manifest, plan_path, functions)
    job = manifest.job or job
    assert job is not None, "a run that has no job of its own is given one"
    return TrainRequest(
        plan=plan,
        report=report,
        profile=profile,
        profile_path=profile_path,
        job=replace(job, steps=steps),
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


def _what_to_run(run: Path, manifest: Manifest, plan_path: Path | None, functions: Sequence[str]) -> _ReadPlan:
    if plan_path is not None:
        found = _read_plan(plan_path, functions)
        _check_same_model(run, manifest, found[0], plan_path)
        return found
    if manifest.plan is None:
        raise ConfigError(f"{run} was imported and has no plan yet; make one for its model, and give it with --plan")
    if not manifest.profile:
        raise ConfigError(f"{run}: its checkpoint names no profile; give a plan of its model with --plan")
    path = Path(manifest.profile)
    # A plan that took over in mid-run names none.
    profile = profile_at(path, manifest.plan, str(run)) if manifest.plan.profile else read_profile(path)
    check_fits_profile(manifest.plan, profile, where=f"{run}: ")
    return _runnable(manifest.plan, functions), manifest.report, profile, manifest.profile


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


def _read_plan(plan_path: Path, functions: Sequence[str]) -> _ReadPlan:
    plan, profile = open_plan(plan_path)
    return (
        _runnable(plan, functions),
        read_plan_report(plan_path),
        profile,
        str(profile_path_of(plan, plan_path).resolve()),
    )


def _runnable(plan: Plan, functions: Sequence[str]) -> Plan:
    """Return the plan with these functions in the place of those that it names."""
    _check(plan)
    return replace(plan, model=with_own_functions(plan.model, functions))


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
