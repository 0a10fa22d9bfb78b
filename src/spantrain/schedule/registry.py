"""Schedules by name: ours, and those that installed packages add (`docs/contributing.md` has the recipe)."""

import difflib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from spantrain.core.plan import Plan
from spantrain.errors import UsageError
from spantrain.plugins import modules_of, with_plugins
from spantrain.schedule import static
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.dispatch.policies import RUN_TIME_SCHEDULES, StaticDispatch, with_hints
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders

ENTRY_POINTS = "spantrain.schedules"
"""The group of entry points of which each names a `RegisteredSchedule`, by that schedule's own name."""


@cache
def own_schedules() -> Mapping[str, RegisteredSchedule]:
    """Return the schedules of this package, sorted by name: those decided at run time, and all of `schedule.static`."""
    found = [*RUN_TIME_SCHEDULES, *(one for module in modules_of(static.__name__) for one in module.SCHEDULES)]
    return MappingProxyType({schedule.name: schedule for schedule in sorted(found, key=lambda entry: entry.name)})


@cache
def schedules() -> Mapping[str, RegisteredSchedule]:
    """Return all schedules by name: ours first, then those of installed packages, each sorted by name.

    Raises:
        UsageError: a package's schedule cannot be loaded, is none, or has the name of one that is there already.
    """
    return with_plugins(own_schedules(), ENTRY_POINTS, RegisteredSchedule, "schedule")


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules."""
    return tuple(schedules())


def schedule_named(name: str) -> RegisteredSchedule:
    """Return the schedule of a name.

    Raises:
        UsageError: there is none; the message has the names and a near match.
    """
    known = schedules()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown schedule {name!r}; {hint}choose one of {', '.join(known)}")


def check_schedule(name: str) -> str:
    """Return the name if there is such a schedule; else as `schedule_named`.

    >>> check_schedule("compact")
    'compact'
    """
    return schedule_named(name).name


def splits_backward(name: str) -> bool:
    """Return whether a schedule goes back in I and W on all stages but the first, and so may put W off."""
    return schedule_named(name).splits_backward


def static_orders(name: str, layout: CutLayout, *, split: bool | None = None) -> Orders:
    """Return the order of every replica, by stage and replica.

    `split` True: all backwards as I and W; False: none; None: as the schedule has it. That is whole backwards, but for
    `zb-h1` and `zb` only on stage 0, where W follows I at once and nobody waits for I.

    Raises:
        PlanError: a limit is so small that no order can run.
    """
    orders = schedule_named(name).orders
    assert orders is not None, f"{name} is decided at run time"
    return orders(layout, split)


def make_policy(name: str, task: ReplicaTask) -> DispatchMachine:
    """Return the decision machine of one replica.

    Raises:
        UsageError: there is no such schedule.
    """
    policy = schedule_named(name).policy
    return StaticDispatch(task, task.order) if policy is None else policy(task)


def replica_tasks(plan: Plan, *, split_backward: bool | None = None) -> tuple[tuple[ReplicaTask, ...], ...]:
    """Return the task of every replica, by stage and replica; static orders are found from the whole plan.

    `critical-path` follows the plan's hints, unless `split_backward` says something else than they do.

    Raises:
        UsageError: there is no such schedule.
        PlanError: an in-flight limit is too small for a static order; or the hints are of another plan.
    """
    name, layout = plan.schedule, CutLayout.of(plan)
    orders = static_orders(name, layout, split=split_backward) if schedule_named(name).orders else None
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
        return with_hints(tasks, plan.hints, layout)
    return tasks
