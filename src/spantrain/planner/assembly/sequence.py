"""Slices of the sequence in plans with tensor-parallel groups, where they are asked for.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, section 4.2.2). Kept:
what a group sends stays the same and what its members hold falls. Not looked at: a stage gathers once at its end and,
backward, once at its beginning, which the cost model does not count.
"""

from dataclasses import replace

from spantrain.core.plan import Stage
from spantrain.core.profile import Profile
from spantrain.core.units import UnitGraph
from spantrain.errors import PlanError
from spantrain.planner.request import PlanRequest, Proposal, Strategy

_NOTHING = (
    "No stage divides the layers of a transformer block among devices, so no sequence is sliced "
    "(--allow-tensor-parallel lets auto divide them)."
)


def check_sequence(profile: Profile) -> None:
    """Refuse slices of the sequence for a model that has none.

    Raises:
        PlanError: no unit of the profile's model can hold slices of a sequence.
    """
    if not any(unit.sequence_activation_bytes for unit in profile.graph.units):
        raise PlanError(
            f"sequence parallelism: no unit of {profile.model.name} is a transformer block of which all layers are "
            "known, so there is no sequence to slice (docs/tensor-parallel.md); leave --sequence-parallel out, or "
            "profile the model again if the profile is an older one"
        )


def slicing(strategy: Strategy) -> Strategy:
    """Return a strategy whose plans slice the sequence wherever a group has blocks."""

    def propose(request: PlanRequest) -> tuple[Proposal, ...]:
        return tuple(_sliced(proposal, request.profile.graph) for proposal in strategy(request))

    return propose


def _sliced(proposal: Proposal, graph: UnitGraph) -> Proposal:
    plan, reasons = proposal.plan, proposal.reasons
    stages = tuple(replace(stage, sequence_parallel=_slices(stage, graph)) for stage in plan.stages)
    if not any(stage.sequence_parallel for stage in stages):
        return replace(proposal, reasons=(*reasons, _NOTHING))
    return replace(proposal, plan=replace(plan, stages=stages))


def _slices(stage: Stage, graph: UnitGraph) -> bool:
    divides = any(len(replica.devices) > 1 for replica in stage.replicas)
    return divides and any(graph.units[unit].sequence_activation_bytes for unit in stage.units)
