"""A plan file with the profile that it was made from, checked against each other."""

from pathlib import Path

from spantrain.config.artefacts import profile_of_plan, read_plan
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import PlanError, UsageError
from spantrain.schedule.registry import check_schedule

__all__ = ["check_fits_profile", "open_plan"]

_AGAIN = "put the plan and the profile that it was made from together, or plan again with `spantrain plan`"


def open_plan(path: Path) -> tuple[Plan, Profile]:
    """Read a plan, and the profile that it names.

    Raises:
        PlanError: the plan is missing or wrong, or not for the profile; file, field and value are in the message.
        ProfileError: the profile is missing, wrong, or has changed since the plan was made.
    """
    plan = read_plan(path)
    try:
        check_schedule(plan.schedule)
    except UsageError as error:
        raise PlanError(f"{path}: schedule: {error}") from None
    profile = profile_of_plan(plan, path)
    check_fits_profile(plan, profile, where=f"{path}: ")
    return plan, profile


def check_fits_profile(plan: Plan, profile: Profile, *, where: str = "") -> None:
    """Refuse a plan that is not for the units and devices of a profile; `where` begins the message.

    Raises:
        PlanError: it is for another model, another configuration of it, or devices that the profile does not have.
    """
    have, want = len(profile.graph.units), plan.stages[-1].end_unit
    if have != want or plan.model.name != profile.model.name:
        raise PlanError(
            f"{where}stages end at unit {want} of {plan.model.name} (stages[{len(plan.stages) - 1}].end_unit), the "
            f"profile has {profile.model.name} with {have} units; {_AGAIN}"
        )
    if plan.model.config != profile.model.config:
        mine, theirs = plan.model.config, profile.model.config
        differ = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        told = ", ".join(f"{name} {mine.get(name)!r} (profile: {theirs.get(name)!r})" for name in differ)
        raise PlanError(f"{where}the plan is for another {plan.model.name} than the profile: {told}; {_AGAIN}")
    strangers = sorted(set(plan.devices) - set(profile.cluster.device_by_name))
    if strangers:
        raise PlanError(
            f"{where}the plan uses {', '.join(strangers)}, which the profile's cluster does not have; {_AGAIN}"
        )
