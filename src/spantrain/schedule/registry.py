"""Schedules by name: ours, and those that installed packages add (`docs/contributing.md` has the recipe)."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from spantrain.core.action import Action
from spantrain.core.names import unknown_name
from spantrain.core.plan import Plan
from spantrain.errors import PlanError, UsageError
from spantrain.plugins import modules_of, with_plugins
from spantrain.schedule import static
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.dispatch.policies import RUN_TIME_SCHEDULES, StaticDispatch, Task, Tasks, with_hints
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.dispatch.several import AnyMachine, SharedTask, shared_machine
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
    raise UsageError(unknown_name("schedule", name, known))


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
    """Return the order of every replica, by crew and replica.

    `split` True: all backwards as I and W; False: none; None: as the schedule has it. That is whole backwards, but for
    `zb-h1` and `zb` only on stage 0, where W follows I at once and nobody waits for I.

    Raises:
        PlanError: a limit is so small that no order can run; or devices have several stages, and the schedule no order
            for such.
    """
    schedule = schedule_named(name)
    assert schedule.orders is not None, f"{name} is decided at run time"
    if layout.shared and not schedule.shares_devices:
        able = ", ".join(one for one, entry in schedules().items() if entry.shares_devices or entry.shared_policy)
        raise PlanError(f"{name} has no order for devices with several stages; give --schedule with one of {able}")
    return schedule.orders(layout, split)


def make_policy(name: str, task: ReplicaTask) -> DispatchMachine:
    """Return the decision machine of one replica.

    Raises:
        UsageError: there is no such schedule.
    """
    policy = schedule_named(name).policy
    return StaticDispatch(task, task.order) if policy is None else policy(task)


def make_machine(name: str, task: Task) -> AnyMachine:
    """Return the same, or that of a device with several stages.

    Raises:
        PlanError: the schedule has none for such.
    """
    if isinstance(task, ReplicaTask):
        return make_policy(name, task)
    schedule = schedule_named(name)
    if schedule.shared_policy is not None:
        return schedule.shared_policy(task)
    if not task.order:
        raise PlanError(f"{name} cannot decide for devices with several stages; give --schedule critical-path")
    return shared_machine(task, split=lambda _: False)


def replica_tasks(plan: Plan, *, split_backward: bool | None = None) -> Tasks:
    """Return the task of every replica, by crew and replica; static orders are found from the whole plan.

    `critical-path` follows the plan's hints, unless `split_backward` says something else than they do.

    Raises:
        UsageError: there is no such schedule.
        PlanError: an in-flight limit is too small for a static order; or the hints are of another plan.
    """
    name, layout = plan.schedule, CutLayout.of(plan)
    orders = static_orders(name, layout, split=split_backward) if schedule_named(name).orders else None
    tasks = tuple(
        tuple(
            _task(layout, stages, replica, orders[crew][replica] if orders else (), split_backward)
            for replica in range(len(layout.spans[stages[0]]))
        )
        for crew, stages in enumerate(layout.crews)
    )
    if name == "critical-path" and plan.hints is not None and split_backward is None:
        return with_hints(tasks, plan.hints, layout)
    return tasks


def _task(
    layout: CutLayout, stages: Sequence[int], replica: int, order: tuple[Action, ...], split_backward: bool | None
) -> Task:
    own = tuple(
        ReplicaTask(
            stage=stage,
            num_stages=layout.num_stages,
            spans=layout.spans[stage][replica],
            in_flight_limit=layout.limits[stage][replica],
            split_backward=split_backward,
            order=order if len(stages) == 1 else (),
        )
        for stage in stages
    )
    return own[0] if len(own) == 1 else SharedTask(stages=own, order=order)
