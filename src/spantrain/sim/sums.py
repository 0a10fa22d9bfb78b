"""The end of a step: gradient sums of stages, bucket by bucket, that slow each other down while they overlap."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.cost.sums import behind_s
from spantrain.sim.costs import StepCosts

Bucket = tuple[float, float]
"""When its gradients are whole, and the seconds of its sum alone."""
Slowdowns = Callable[[frozenset[int]], Mapping[int, float]]
"""Given the stages whose sums run at once: how many times as long each takes then."""


def ends_together(buckets: Mapping[int, Sequence[Bucket]], slowdowns: Slowdowns) -> dict[int, float]:
    """Return when each stage's sum ends; a stage sums its buckets in order, one by one.

    >>> twice = lambda stages: dict.fromkeys(stages, float(len(stages)))
    >>> ends_together({0: [(0.0, 4.0)], 1: [(3.0, 4.0)]}, twice)
    {0: 5.0, 1: 8.0}
    >>> ends_together({0: [(0.0, 1.0), (3.0, 1.0)], 1: [(0.5, 1.0)]}, twice)
    {0: 4.0, 1: 2.0}
    """
    waiting = {stage: list(reversed(row)) for stage, row in buckets.items() if row}
    left_s = {stage: row[-1][1] for stage, row in waiting.items()}
    end_s: dict[int, float] = {}
    now_s = 0.0
    while waiting:
        ready = {stage: row[-1][0] for stage, row in waiting.items()}
        now_s = max(now_s, min(ready.values()))
        at_work = frozenset(stage for stage, ready_s in ready.items() if ready_s <= now_s)
        slower = slowdowns(at_work) if len(at_work) > 1 else dict.fromkeys(at_work, 1.0)
        ends_s = {stage: now_s + left_s[stage] * slower[stage] for stage in at_work}
        until_s = min([*ends_s.values(), *(ready_s for ready_s in ready.values() if ready_s > now_s)])
        for stage in at_work:
            left_s[stage] -= (until_s - now_s) / slower[stage]
            if ends_s[stage] <= until_s:
                end_s[stage] = until_s
                waiting[stage].pop()
                if waiting[stage]:
                    left_s[stage] = waiting[stage][-1][1]
                else:
                    del waiting[stage]
        now_s = until_s
    return dict(sorted(end_s.items()))


class LastAction(NamedTuple):
    """What a replica did last in one of its stages."""

    leader: str
    action: Action | None
    """None: nothing in this step."""
    start_s: float
    end_s: float


def end_of_step(
    last: Sequence[Sequence[LastAction]], costs: StepCosts, *, overlap: bool = True
) -> tuple[float, dict[int, tuple[float, float]]]:
    """Return when all devices may update, and when the sum of each stage that has one begins and ends.

    As in the runtime: the replicas of a stage sum a bucket when all of them have its gradients, in their last backward
    (without `overlap`, behind it), whatever other stages do, so that sums of several stages may share links; then the
    stages that share a parameter sum it, when each of them has come so far; then all meet. `last` is by stage.
    """
    summed_s = [max(one.end_s for one in row) for row in last]
    sums = {
        index: list(zip(_ready_s(row, costs, len(seconds), overlap=overlap), seconds, strict=True))
        for index, (row, seconds) in enumerate(zip(last, map(costs.gradient_bucket_s, range(len(last))), strict=True))
        if sum(seconds) > 0
    }
    ends_s = ends_together(sums, costs.sum_slowdowns)
    for index, end_s in ends_s.items():
        summed_s[index] = max(summed_s[index], end_s)
    for tied in costs.tied_sums():
        tied_s = max(summed_s[stage] for stage in tied.stages) + tied.seconds
        for stage in tied.stages:
            summed_s[stage] = tied_s
    return max(summed_s) + costs.commit_s, {index: (sums[index][0][0], end_s) for index, end_s in ends_s.items()}


def _ready_s(row: Sequence[LastAction], costs: StepCosts, count: int, *, overlap: bool) -> list[float]:
    """Return when each bucket's gradients are whole on all replicas of a stage."""
    ready_s = [max(one.end_s for one in row)] * count
    by_replica = [
        [one.start_s + (one.end_s - one.start_s) * part for part in costs.bucket_parts(one.leader, one.action)]
        for one in (row if overlap else ())
        if one.action is not None
    ]
    return list(map(max, zip(*by_replica, strict=True))) if by_replica else ready_s


def sum_behind_s(plan: Plan, costs: StepCosts, stage: int) -> float:
    """Return the least seconds of a stage's gradient sum that are left when the last action of the stage ends.

    Proof. That action is the B or the W of one of the plan's own micro-batches on one of the stage's replicas. No
    bucket is whole before the part of that action that its gradients need has passed, and buckets follow each other: so
    behind the j-th bucket's readiness come its sum and all later ones'. The least is taken over all such actions.
    """
    seconds = costs.gradient_bucket_s(stage)
    replicas = plan.stages[stage].replicas
    last = {
        (replica.devices[0], Action(stage, op, span))
        for number, replica in enumerate(replicas)
        for span in {span.size: span for span in plan.stages[stage].replica_spans(number)}.values()
        for op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    }
    return min(
        (
            behind_s(seconds, costs.bucket_parts(device, action), costs.action_s(device, action))
            for device, action in last
        ),
        default=sum(seconds),
    )
