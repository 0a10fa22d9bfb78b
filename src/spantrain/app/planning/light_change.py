"""The light change of a run's plan: by what it costs until there is a better one."""

from collections.abc import Collection

from spantrain.app.planning.protection import keepers_wait_s, with_keepers
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.moving import moved
from spantrain.planner.present import NewPlan, light_plan

_LASTS = 8
"""Steps that a light change lasts, about: until the planner's answer is there, and what it moves has gone ahead."""


def light_change(
    plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str, losses: int | None
) -> NewPlan:
    """Return the light change of a plan for devices that are left.

    What it moves while all stand still is spread over the steps that it lasts. Steps wait for keepers, too, of which
    there are to be as many as `protection.with_keepers` gives for `losses`.

    Raises:
        PlanError, ProfileError: as `planner.present.light_plan`.
    """

    def besides(after: Plan) -> float:
        move_s, _ = moved(profile, optimizer, plan, present, after)
        return keepers_wait_s(with_keepers(after, profile, optimizer, losses), profile) + move_s / _LASTS

    return light_plan(plan, profile, present, optimizer=optimizer, besides=besides)
