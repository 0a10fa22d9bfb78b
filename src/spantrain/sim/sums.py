"""Gradient sums of stages, bucket by bucket, that slow each other down while they overlap in time."""

from collections.abc import Callable, Mapping, Sequence

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
