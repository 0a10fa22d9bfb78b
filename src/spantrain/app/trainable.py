"""What of a plan training cannot do yet: such plans are for comparison by simulation only."""

from spantrain.core.plan import Plan, StateSharding
from spantrain.planner.request import Constraints, Restriction

__all__ = ["not_trained_yet", "only_to_compare"]


def not_trained_yet(plan: Plan) -> tuple[str, ...]:
    """Return what the runtime cannot do of a plan, by stage; empty if it can do all of it."""
    tensors = [
        f"stage {index}: replica {'+'.join(replica.devices)} divides tensors"
        for index, stage in enumerate(plan.stages)
        for replica in stage.replicas
        if len(replica.devices) > 1
    ]
    state = [
        f"stage {index}: its state is sharded ({stage.state_sharding.value})"
        for index, stage in enumerate(plan.stages)
        if stage.state_sharding is not StateSharding.NONE
    ]
    return (*tensors, *state)


def only_to_compare(plan: Plan, constraints: Constraints, restriction: Restriction = Restriction.NONE) -> str:
    """Return why a plan gives way to those that can be trained; empty if it need not.

    Plans that divide tensors need not where that was allowed, nor those for another framework, which can.
    """
    if any(stage.state_sharding is not StateSharding.NONE for stage in plan.stages):
        return "it divides state among replicas, which training cannot do yet"
    divides = any(len(replica.devices) > 1 for stage in plan.stages for replica in stage.replicas)
    if divides and not constraints.tensor_parallel and restriction is Restriction.NONE:
        return "it divides tensors, which training cannot do yet (--allow-tensor-parallel lets it be chosen)"
    return ""
