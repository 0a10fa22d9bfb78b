"""In how many buckets stages sum their gradients: enough to begin early, not so many that latency outweighs it.

Buckets are summed while the last backward of a step goes on, as soon as their gradients are whole (`cost.buckets`). The
number with which the sum ends first is taken, by the seconds of the work and of the ring; of equal ones the least.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from spantrain.core.action import Op
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.cost.buckets import MOST_BUCKETS
from spantrain.cost.replicas import ReplicaCost

__all__ = ["with_sum_buckets"]

_TRIED = tuple(2**power for power in range(MOST_BUCKETS.bit_length()))


def with_sum_buckets(plan: Plan, costs: ReplicaCost) -> Plan:
    """Return the plan with the best number of buckets in each stage; stages without sums stay as they are."""
    stages = tuple(_bucketed(plan, index, costs) for index in range(len(plan.stages)))
    return plan if stages == plan.stages else replace(plan, stages=stages)


def _bucketed(plan: Plan, index: int, costs: ReplicaCost) -> Stage:
    stage = plan.stages[index]
    if costs.buckets_beside(stage) is None:
        return stage
    op = Op.BACKWARD_WEIGHT if plan.splits_backward and index else Op.BACKWARD
    works = _works(stage, op, costs)
    options = [replace(stage, sum_buckets=count) for count in _TRIED]
    return min(options, key=lambda option: (_summed_s(option, op, works, costs), option.sum_buckets))


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What replicas of one sort do in a step."""

    replica: Replica
    samples: int
    """Of its last micro-batch."""
    all_s: float
    last_s: float
    """Of the last micro-batch's backward."""


def _works(stage: Stage, op: Op, costs: ReplicaCost) -> list[_Work]:
    """Return the work of each sort of replicas: of the same kinds of devices, with as many samples."""
    found: dict[object, _Work] = {}
    for number, replica in enumerate(stage.replicas):
        sizes = tuple(span.size for span in stage.replica_spans(number))
        key = (costs.groups.kinds(replica), replica.tp_shares, sizes)
        if sizes and key not in found:
            seconds = partial(costs.action_s, stage, replica)
            all_s = sum(
                count * (seconds(Op.FORWARD, size) + seconds(Op.BACKWARD, size))
                for size, count in Counter(sizes).items()
            )
            found[key] = _Work(replica=replica, samples=sizes[-1], all_s=all_s, last_s=seconds(op, sizes[-1]))
    return list(found.values())


def _summed_s(stage: Stage, op: Op, works: Sequence[_Work], costs: ReplicaCost) -> float:
    """Return when the sum ends if replicas wait for nobody and end with their last micro-batch's backward."""
    buckets = costs.buckets_beside(stage)
    assert buckets is not None, "a stage whose sums wait has no choice"
    ready_s = [0.0] * len(buckets)
    for work in works:
        parts = costs.parts_until_whole(buckets, stage, work.replica, op, work.samples)
        ready_s = [
            max(before, work.all_s - (1 - part) * work.last_s) for before, part in zip(ready_s, parts, strict=True)
        ]
    end_s = 0.0
    for ready, bucket_s in zip(ready_s, costs.end_of_step_s(stage), strict=True):
        end_s = max(end_s, ready) + bucket_s
    return end_s
