"""Turn files into a training request: a plan, or an earlier run's checkpoint."""

from dataclasses import replace
from pathlib import Path

from spantrain.app.train import Resume, TrainRequest
from spantrain.app.trainable import not_trained_yet
from spantrain.config.artefacts import profile_of_plan, read_plan, read_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError, PlanError
from spantrain.policy.limits import check_limits
from spantrain.runtime.checkpoint import latest_checkpoint, read_manifest
from spantrain.schedule.registry import check_schedule

__all__ = ["new_run", "resumed_run"]


def new_run(plan_path: Path, job: TrainJob, schedule: str | None, out: Path) -> TrainRequest:
    """Read a plan and its profile.

    Raises:
        PlanError, ProfileError: a file is missing or foreign, or the plan cannot run.
    """
    plan = read_plan(plan_path)
    _check(plan)
    profile = profile_of_plan(plan, plan_path)
    assert plan.profile is not None
    return TrainRequest(
        plan=plan,
        profile=profile,
        profile_path=str((plan_path.parent / plan.profile.path).resolve()),
        job=job,
        schedule=check_schedule(schedule or plan.schedule),
        out=out,
    )


def resumed_run(run: Path, steps: int, out: Path) -> TrainRequest:
    """Read what an earlier run left, to go on to `steps` in all.

    Raises:
        ConfigError: there is no checkpoint, or it has as many steps already.
    """
    folder = latest_checkpoint(run)
    manifest = read_manifest(folder)
    if steps <= manifest.step:
        raise ConfigError(f"{run} has {manifest.step} steps done; --steps is the number in all, give more than that")
    return TrainRequest(
        plan=manifest.plan,
        profile=read_profile(Path(manifest.profile)),
        profile_path=manifest.profile,
        job=replace(manifest.job, steps=steps),
        schedule=manifest.schedule,
        out=out,
        resume=Resume(folder=folder, steps_done=manifest.step, losses=manifest.losses),
    )


def _check(plan: Plan) -> None:
    if plan.outer is not None:
        raise PlanError(
            f"this plan joins {', '.join(group.name for group in plan.outer.groups)} by an outer optimizer, which "
            "training does not do yet: train the plan of one site, which is written beside it, or plan again without "
            "--allow-outer"
        )
    problems = check_limits(plan)
    if problems:
        raise PlanError("the plan would stop in the middle of a step:\n" + "\n".join(f"  {p}" for p in problems))
    divided = not_trained_yet(plan)
    if divided:
        raise PlanError(
            f"this plan is for comparison by simulation only, it cannot be trained: {'; '.join(divided)}; plan again "
            "with a strategy that does neither"
        )
