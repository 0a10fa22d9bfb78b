"""Stages whose replicas do every micro-batch together: whether they can, with none waiting for another for ever.

Replicas that exchange something inside of an action wait for each other there. That ends only if all of them do the
same actions in the same order, and if the pipeline runs with each such stage as one replica, which begins an action
when all that any of them needs is there.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan, Stage
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import check_orders
from spantrain.schedule.registry import replica_tasks, schedule_named, schedules

T = TypeVar("T")

_REMEDY = "or give --batch-norm micro-batch"
_ROOM = "cut all stages of the plan into the same micro-batches, with an in_flight_limit of the whole step,"


def statistics_spans(stage: Stage, *, joined: bool) -> tuple[Span, ...]:
    """Return the samples that a stage takes statistics of at once: each replica's own, or those of all `joined`."""
    if joined:
        return stage.micro_batches
    return tuple(sorted(span for number in range(len(stage.replicas)) for span in stage.replica_spans(number)))


def check_joint_statistics(plan: Plan, graph: UnitGraph) -> None:
    """Check that replicas can take statistics of their micro-batches together, in the stages that take any.

    Raises:
        PlanError: they would wait for each other for ever; the message says why, and what to do.
    """
    joint = [
        number
        for number, stage in enumerate(plan.stages)
        if len(stage.replicas) > 1 and any(graph.units[unit].batch_norms for unit in stage.units)
    ]
    if joint:
        _check_joint(plan, joint)


def _check_joint(plan: Plan, joint: Collection[int]) -> None:
    if schedule_named(plan.schedule).orders is None:
        static = ", ".join(name for name, schedule in schedules().items() if schedule.orders)
        raise PlanError(
            f"batch_norm replicas: schedule {plan.schedule} decides at run time what a replica does next, and those of "
            f"stage {min(joint)} would wait for each other inside of F for ever; give --schedule with one whose order "
            f"is fixed ({static}), {_REMEDY}"
        )
    tasks, layout = replica_tasks(plan), CutLayout.of(plan)
    orders: list[Sequence[Sequence[Action]]] = [[task.order for task in row] for row in tasks]
    for number in joint:
        whole = plan.stages[number].micro_batches
        orders[number] = (_joint_order(plan, number, orders[number]),)
        layout = replace(
            layout,
            spans=_with(layout.spans, number, (whole,)),
            limits=_with(layout.limits, number, (sum(layout.limits[number]),)),
        )
    try:
        check_orders(orders, layout)
    except ScheduleError as error:
        raise PlanError(
            f"batch_norm replicas: {plan.schedule} stops where replicas of a stage do each micro-batch together: "
            f"{error}; {_ROOM} {_REMEDY}"
        ) from error


def _joint_order(plan: Plan, number: int, orders: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """Return what all replicas of a stage do, in whole micro-batches."""
    stage = plan.stages[number]
    for replica, order in enumerate(orders):
        own = stage.replica_spans(replica)
        name = "+".join(stage.replicas[replica].devices)
        if len(own) < len(stage.micro_batches):
            raise PlanError(
                f"batch_norm replicas: {name} has no samples in {len(stage.micro_batches) - len(own)} of "
                f"the {len(stage.micro_batches)} micro-batches of stage {number}, and the others would wait for it; "
                f"plan larger micro-batches, or replicas of less unlike shares, {_REMEDY}"
            )
        if _in_numbers(order, own) != _in_numbers(orders[0], stage.replica_spans(0)):
            first = "+".join(stage.replicas[0].devices)
            raise PlanError(
                f"batch_norm replicas: under {plan.schedule}, {name} and {first} of stage {number} do their "
                f"micro-batches in unlike orders, and would wait for each other for ever; {_ROOM} {_REMEDY}"
            )
    return tuple(
        Action(number, op, stage.micro_batches[index]) for op, index in _in_numbers(orders[0], stage.replica_spans(0))
    )


def _in_numbers(order: Sequence[Action], own: Sequence[Span]) -> list[tuple[Op, int]]:
    """Return operations with the numbers of micro-batches."""
    return [(action.op, own.index(action.span)) for action in order]


def _with(rows: tuple[T, ...], number: int, row: T) -> tuple[T, ...]:
    return (*rows[:number], row, *rows[number + 1 :])
