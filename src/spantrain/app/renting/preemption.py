"""What a run loses when a machine is taken away: the pauses of live runs, the step under way, and slower steps until
another machine is there (docs/recovery.md has what live runs do).
"""

from spantrain.app.planning.protection import with_keepers
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.moving import moved
from spantrain.errors import PlanError, ProfileError
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import light_plan
from spantrain.recovery.policy import holds_all
from spantrain.sim.availability import PREPARED_S, detect_s

REPLACED_S = 600.0
"""Until another machine stands in the place of one that was taken away: an assumption."""
CHECKPOINT_S = 600.0
"""Between two checkpoints, to which a run goes back where nobody else holds what is lost: on average by half of it."""


def loss_of_host_s(plan: Plan, profile: Profile, host: str, optimizer: str, step_s: float) -> float:
    """Return the seconds that it costs a run of this plan, as it was, in all, that a host is taken away.

    `optimizer` has the name that `cost.memory` gives it.
    """
    gone = set(profile.cluster.host_by_name[host].devices)
    present = frozenset(name for name in profile.cluster.device_by_name if name not in gone)
    if not gone & set(plan.devices):
        return 0.0
    held = with_keepers(plan, profile, optimizer, None)
    holders = present & set(plan.devices)
    goes_back = not holds_all(held, holders)
    again_s = CHECKPOINT_S / 2 if goes_back else step_s / 2
    pause_s = detect_s(alone=not present) + PREPARED_S + again_s
    try:
        light = light_plan(held, profile, present, optimizer=optimizer).plan if present else None
    except (PlanError, ProfileError):
        light = None
    if light is None:
        return pause_s + REPLACED_S
    there_s, _ = moved(profile, optimizer, held, frozenset() if goes_back else holders, light)
    back_s, _ = moved(profile, optimizer, light, frozenset(light.devices), plan)
    slower = max(0.0, 1 - step_s / predict(light, profile).step_s)
    return pause_s + there_s + back_s + slower * REPLACED_S
