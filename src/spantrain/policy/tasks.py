"""What a replica is told of a plan."""

from spantrain.core.plan import Plan
from spantrain.policy.dispatch import ReplicaTask
from spantrain.schedule.layout import Layout
from spantrain.schedule.orders import static_orders
from spantrain.schedule.registry import STATIC_SCHEDULES, check_schedule

__all__ = ["replica_tasks"]


def replica_tasks(
    plan: Plan, *, schedule: str | None = None, split_backward: bool | None = None
) -> tuple[tuple[ReplicaTask, ...], ...]:
    """Return the task of every replica, by stage and replica; static orders are found from the whole plan.

    `schedule` takes the place of the plan's own.

    Raises:
        UsageError: there is no such schedule.
        PlanError: an in-flight limit is too small for a static order.
    """
    name = check_schedule(plan.schedule if schedule is None else schedule)
    layout = Layout.of(plan)
    orders = static_orders(name, layout, split=split_backward) if name in STATIC_SCHEDULES else None
    return tuple(
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
