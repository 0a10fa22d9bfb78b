"""What a replica is told of a plan."""

from dataclasses import replace

from spantrain.core.hints import DispatchHints
from spantrain.core.plan import Plan
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.check import check_orders
from spantrain.schedule.dispatch.machine import ReplicaTask
from spantrain.schedule.dispatch.planned import actions_of
from spantrain.schedule.layout import Layout
from spantrain.schedule.orders import static_orders
from spantrain.schedule.registry import STATIC_SCHEDULES, check_schedule


def replica_tasks(
    plan: Plan, *, schedule: str | None = None, split_backward: bool | None = None
) -> tuple[tuple[ReplicaTask, ...], ...]:
    """Return the task of every replica, by stage and replica; static orders are found from the whole plan.

    `schedule` takes the place of the plan's own. `critical-path` follows the plan's hints, unless `split_backward`
    says something else than they do.

    Raises:
        UsageError: there is no such schedule.
        PlanError: an in-flight limit is too small for a static order; or the hints are of another plan.
    """
    name = check_schedule(plan.schedule if schedule is None else schedule)
    layout = Layout.of(plan)
    orders = static_orders(name, layout, split=split_backward) if name in STATIC_SCHEDULES else None
    tasks = tuple(
        tuple(
            ReplicaTask(
                stage=stage,
                num_stages=layout.num_stages,
                spans=own,
                in_flight_limit=layout.limits[stage][replica],
                split_backward=split_backward,
                order=orders[stage][replica] if orders else (),
            )
            for replica, own in enumerate(layout.spans[stage])
        )
        for stage in range(layout.num_stages)
    )
    if name == "critical-path" and plan.hints is not None and split_backward is None:
        return _with_hints(tasks, plan.hints, layout)
    return tasks


def _with_hints(
    tasks: tuple[tuple[ReplicaTask, ...], ...], hints: DispatchHints, layout: Layout
) -> tuple[tuple[ReplicaTask, ...], ...]:
    hinted = tuple(
        tuple(replace(task, planned=planned) for task, planned in zip(row, orders, strict=True))
        for row, orders in zip(tasks, hints.orders, strict=True)
    )
    try:
        orders = [[actions_of(task.planned, task) for task in row if task.planned] for row in hinted]
        check_orders(orders, layout)
    except (ValueError, ScheduleError) as error:
        raise PlanError(
            f"the plan's hints do not fit its micro-batches and in-flight limits: {error}; plan again, or take `hints` "
            "out of the plan"
        ) from error
    return hinted
