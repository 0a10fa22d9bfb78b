"""What every plan is tuned by, whoever made it: settings of gradient sums, and slices of the sequence.

Buckets of sums are to be large enough for the link, and small enough to begin early.
Of what a stage's framework lets one choose (`cost.sums`), the setting is taken with which the sum ends first, by
the seconds of the work and of the ring; of equal ones the first. Our own sums copy a bucket to send it, so buckets over
the default size must fit beside what the stage's devices hold.

Slices of the sequence, in plans with tensor-parallel groups and where they are asked for, are after Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022, section 4.2.2). Kept: what a group sends stays
the same and what its members hold falls. Not looked at: a stage gathers once at its end and, backward, once at its
beginning, which the cost model does not count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from spantrain.core.action import Op
from spantrain.core.plan import DEFAULT_BUCKET_BYTES, Plan, Replica, Stage, SumModel
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.units import UnitGraph
from spantrain.cost.replicas import ReplicaCost
from spantrain.cost.sums import sum_options
from spantrain.errors import PlanError
from spantrain.planner.request import PlanRequest, Proposal, Strategy
from spantrain.schedule.registry import splits_backward

_ALWAYS_BYTES = 2 * DEFAULT_BUCKET_BYTES
"""Copies of buckets that are not counted as memory."""


def with_best_sums(plan: Plan, costs: ReplicaCost, free_bytes: Mapping[str, float]) -> Plan:
    """Return the plan with the best setting in each stage; those without sums, and those that share devices, stay.

    `free_bytes`: what the plan leaves free, by device.
    """
    if plan.interleaved:
        return plan  # a device sums the gradients of all of its stages as one
    stages = tuple(_tuned(plan, index, costs, free_bytes) for index in range(len(plan.stages)))
    return plan if stages == plan.stages else replace(plan, stages=stages)


def _tuned(plan: Plan, index: int, costs: ReplicaCost, free_bytes: Mapping[str, float]) -> Stage:
    stage = plan.stages[index]
    total = costs.summed_bytes(stage)
    if not total or stage.state_sharding.divides_gradients:
        return stage
    options = sum_options(stage.sums.model, total)
    if stage.sums.model is SumModel.SPANTRAIN:
        room = max(_ALWAYS_BYTES, min(free_bytes[device] for device in stage.devices))
        options = tuple(sums for sums in options if sums.copied_bytes <= room)
    tried = [replace(stage, sums=sums) for sums in options]
    if len(tried) == 1:
        return tried[0]
    op = Op.BACKWARD_WEIGHT if splits_backward(plan.schedule) and index else Op.BACKWARD
    works = _works(stage, op, costs)
    return min(tried, key=lambda option: _summed_s(option, op, works, costs))


class _AlikeReplicas(Record):
    """What replicas of one sort do in a step."""

    replica: Replica
    samples: int
    """Samples of its last micro-batch."""
    all_s: float
    last_s: float
    """Seconds of the last micro-batch's backward."""


def _works(stage: Stage, op: Op, costs: ReplicaCost) -> list[_AlikeReplicas]:
    """Return the work of each sort of replicas: of the same kinds of devices, with as many samples."""
    found: dict[object, _AlikeReplicas] = {}
    for number, replica in enumerate(stage.replicas):
        sizes = stage.sizes_by_replica[number]
        key = (costs.groups.kinds(replica), replica.tp_shares, sizes)
        if sizes and key not in found:
            seconds = partial(costs.action_s, stage, replica)
            all_s = sum(
                count * (seconds(Op.FORWARD, size) + seconds(Op.BACKWARD, size))
                for size, count in Counter(sizes).items()
            )
            found[key] = _AlikeReplicas(replica=replica, samples=sizes[-1], all_s=all_s, last_s=seconds(op, sizes[-1]))
    return list(found.values())


def _summed_s(stage: Stage, op: Op, works: Sequence[_AlikeReplicas], costs: ReplicaCost) -> float:
    """Return when the sum ends if replicas wait for nobody and end with their last micro-batch's backward."""
    buckets, seconds = costs.buckets_beside(stage), costs.end_of_step_s(stage)
    ready_s = [0.0] * len(seconds)
    for work in works:
        parts: Sequence[float] = [1.0] * len(seconds)
        if buckets is not None:
            parts = costs.parts_until_whole(buckets, stage, work.replica, op, work.samples)
        ready_s = [
            max(before, work.all_s - (1 - part) * work.last_s) for before, part in zip(ready_s, parts, strict=True)
        ]
    end_s = 0.0
    for ready, bucket_s in zip(ready_s, seconds, strict=True):
        end_s = max(end_s, ready) + bucket_s
    return end_s


_NOTHING = (
    "No stage divides the layers of a transformer block among devices, so no sequence is sliced "
    "(--tensor-parallel any lets auto divide them)."
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
    able = {unit for unit, own in enumerate(graph.units) if own.sequence_activation_bytes is not None}
    stages = tuple(
        replace(stage, sequence_parallel=stage.divides_tensors and not able.isdisjoint(stage.units))
        for stage in plan.stages
    )
    if not any(stage.sequence_parallel for stage in stages):
        return replace(proposal, reasons=(*reasons, _NOTHING))
    return replace(proposal, plan=replace(plan, stages=stages))
