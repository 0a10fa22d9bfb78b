"""Stages whose replicas do every micro-batch together: whether they can, with none waiting for another for ever.

Replicas that exchange something inside of an action wait for each other there. That ends only if all of them do the
same actions in the same order, and if the pipeline runs with each such stage as one replica, which begins an action
when all that any of them needs is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan, Stage
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import check_orders
from spantrain.schedule.registry import replica_tasks, schedule_named, schedules

T = TypeVar("T")

_ROOM = "cut all stages of the plan into the same micro-batches, with an in_flight_limit of the whole step,"


class _Joint(NamedTuple):
    """Why replicas do every micro-batch together."""

    what: str
    remedy: str


_STATISTICS = _Joint("batch_norm replicas", "or give --batch-norm micro-batch")
_DIVIDED = _Joint("divided gradients", "or plan again without --allow-sharded-state")


def statistics_spans(stage: Stage, *, joined: bool) -> tuple[Span, ...]:
    """Return the samples that a stage takes statistics of at once: each replica's own, or those of all `joined`."""
    if joined:
        return stage.micro_batches
    return tuple(sorted(span for number in range(len(stage.replicas)) for span in stage.replica_spans(number)))


def check_joint(plan: Plan, graph: UnitGraph, *, statistics: bool = False) -> None:
    """Check that replicas can do their micro-batches together in the stages where they have to.

    They do where they divide gradients; and where units of the graph take `statistics` of batches, if all take them
    together.

    Raises:
        PlanError: they would wait for each other for ever; the message says why, and what to do.
    """
    joint: dict[int, _Joint] = {}
    for number, stage in enumerate(plan.stages):
        if stage.divides_gradients:
            joint[number] = _DIVIDED
        elif statistics and len(stage.replicas) > 1 and any(graph.units[unit].batch_norms for unit in stage.units):
            joint[number] = _STATISTICS
    _check_joint(plan, joint)


def joint_refusal(plan: Plan) -> str:
    """Return why replicas cannot divide gradients as a plan has it; empty if they can, or none do."""
    for number, stage in enumerate(plan.stages):
        if stage.divides_gradients and stage.divides_tensors:
            return f"stage {number} divides gradients among groups that divide tensors"
    try:
        _check_joint(plan, {number: _DIVIDED for number, stage in enumerate(plan.stages) if stage.divides_gradients})
    except PlanError as error:
        return str(error)
    return ""


def has_fixed_order(schedule: str) -> bool:
    """Whether what a replica does next is known before it runs, so that several can do it together."""
    return schedule_named(schedule).orders is not None


def _check_joint(plan: Plan, joint: Mapping[int, _Joint]) -> None:
    if not joint:
        return
    first = joint[min(joint)]
    if plan.interleaved:
        raise PlanError(f"{first.what}: not where stages share devices; plan again without it, {first.remedy}")
    if not has_fixed_order(plan.schedule):
        static = ", ".join(name for name in schedules() if has_fixed_order(name))
        raise PlanError(
            f"{first.what}: schedule {plan.schedule} decides at run time what a replica does next, and those of "
            f"stage {min(joint)} would wait for each other inside of an action for ever; give --schedule with one "
            f"whose order is fixed ({static}), {first.remedy}"
        )
    tasks, layout = replica_tasks(plan), CutLayout.of(plan)
    orders: list[Sequence[Sequence[Action]]] = [[task.order for task in row] for row in tasks]
    for number, why in joint.items():
        whole = plan.stages[number].micro_batches
        orders[number] = (_joint_order(plan, number, orders[number], why),)
        layout = replace(
            layout,
            spans=_with(layout.spans, number, (whole,)),
            limits=_with(layout.limits, number, (sum(layout.limits[number]),)),
        )
    try:
        check_orders(orders, layout)
    except ScheduleError as error:
        raise PlanError(
            f"{first.what}: {plan.schedule} stops where replicas of a stage do each micro-batch together: "
            f"{error}; {_ROOM} {first.remedy}"
        ) from error


def _joint_order(plan: Plan, number: int, orders: Sequence[Sequence[Action]], why: _Joint) -> tuple[Action, ...]:
    """Return what all replicas of a stage do, in whole micro-batches."""
    stage = plan.stages[number]
    for replica, order in enumerate(orders):
        own = stage.replica_spans(replica)
        name = "+".join(stage.replicas[replica].devices)
        if len(own) < len(stage.micro_batches):
            raise PlanError(
                f"{why.what}: {name} has no samples in {len(stage.micro_batches) - len(own)} of "
                f"the {len(stage.micro_batches)} micro-batches of stage {number}, and the others would wait for it; "
                f"plan larger micro-batches, or replicas of less unlike shares, {why.remedy}"
            )
        if _in_numbers(order, own) != _in_numbers(orders[0], stage.replica_spans(0)):
            first = "+".join(stage.replicas[0].devices)
            raise PlanError(
                f"{why.what}: under {plan.schedule}, {name} and {first} of stage {number} do their "
                f"micro-batches in unlike orders, and would wait for each other for ever; {_ROOM} {why.remedy}"
            )
    return tuple(
        Action(number, op, stage.micro_batches[index]) for op, index in _in_numbers(orders[0], stage.replica_spans(0))
    )


def _in_numbers(order: Sequence[Action], own: Sequence[Span]) -> list[tuple[Op, int]]:
    """Return operations with the numbers of micro-batches."""
    return [(action.op, own.index(action.span)) for action in order]


def _with(rows: tuple[T, ...], number: int, row: T) -> tuple[T, ...]:
    return (*rows[:number], row, *rows[number + 1 :])
