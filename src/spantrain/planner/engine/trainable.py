"""What of a plan training cannot do yet: such plans are for comparison by simulation only."""

from spantrain.core.plan import Plan, StateSharding
from spantrain.planner.request import Constraints


def not_trained_yet(plan: Plan) -> tuple[str, ...]:
    """Return what the runtime cannot do of a plan, by stage; empty if it can do all of it."""
    return tuple(
        f"stage {index}: its state is sharded ({stage.state_sharding.value})"
        for index, stage in enumerate(plan.stages)
        if stage.state_sharding is not StateSharding.NONE
    )


def only_to_compare(plan: Plan, constraints: Constraints) -> str:
    """Return why a plan gives way to those that can be trained; empty if it need not, or if that was allowed."""
    shards = any(stage.state_sharding is not StateSharding.NONE for stage in plan.stages)
    if shards and not constraints.sharded_state:
        return "it divides state among replicas, which training cannot do yet (--allow-sharded-state lets it be chosen)"
    return ""
