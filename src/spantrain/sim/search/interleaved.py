"""The order of work of devices with several stages: the best of the static ones and of rules, within their memory.

Rules are run on the virtual clock: of what is ready a device takes the first kind in its order of preference, samples
that are furthest on their way first, and a forward only if there is room for it and, behind it, for one more of each
later stage of the device: so that what is held can always come back. What they did is the order.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.core.planned.hints import DispatchHints, PlannedOrder, PlannedWait
from spantrain.core.trace import Trace
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.dispatch.policies import Task, known_order
from spantrain.schedule.dispatch.several import AnyMachine, Ready, SeveralStages, SharedTask
from spantrain.schedule.orders import held_samples
from spantrain.schedule.registry import make_machine, replica_tasks, schedules
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import Simulation, SimulationOptions, SimulationResult, simulate

_HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD)
_PREFERENCES = (
    (*_HALVES, Op.FORWARD, Op.BACKWARD_WEIGHT),
    (Op.FORWARD, *_HALVES, Op.BACKWARD_WEIGHT),
    (*_HALVES, Op.BACKWARD_WEIGHT, Op.FORWARD),
)
_SAME_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a device may hold of samples in flight."""

    size_bytes: float
    sample_bytes: Mapping[int, float]
    """By stage."""

    def of(self, order: tuple[Action, ...]) -> bool:
        """Whether an order stays in it."""
        held = 0.0
        for action in order:
            size = action.span.size * self.sample_bytes[action.stage]
            if action.op is Op.FORWARD:
                held += size
                if held > self.size_bytes:
                    return False
            elif action.op is not Op.BACKWARD_INPUT:
                held -= size
        return True


@dataclass(frozen=True, kw_only=True)
class _Rule:
    preference: tuple[Op, ...]
    deep: bool
    """Whether forwards of a device's later stages go first."""
    splits: bool

    def choose(self, device: SeveralStages, room: Room) -> tuple[Ready, str] | None:
        """Return what a device should do."""
        held = sum(machine.held * room.sample_bytes[stage] for stage, machine in device.machines.items())
        ready = device.ready()
        for op in self.preference:
            found = sorted(one for one in ready if one[1] is op)
            if op is Op.FORWARD:
                found = [one for one in found if held + _needed(device, room, one) <= room.size_bytes]
            if found:
                return found[-1 if op is Op.FORWARD and self.deep else 0], "by rule"
        return None


def _needed(device: SeveralStages, room: Room, forward: Ready) -> float:
    """Return the bytes of a forward and of one more in each of the device's later stages."""
    stage, _, index = forward
    samples = device.machines[stage].size(index)
    return samples * sum(own for number, own in room.sample_bytes.items() if number >= stage)


class _RuleRun(Simulation):
    def __init__(
        self, plan: Plan, costs: StepCosts, rule: _Rule, room: Mapping[str, Room], *, trace: bool = False
    ) -> None:
        self._rule, self._room = rule, room
        super().__init__(plan, costs, SimulationOptions(trace=trace))

    def _machine(self, task: Task, leader: str) -> AnyMachine:
        if not isinstance(task, SharedTask):
            return make_machine(self._plan.schedule, task)
        room, rule = self._room[leader], self._rule
        return SeveralStages(
            task.stages, lambda device, _now_s: rule.choose(device, room), split=lambda stage: rule.splits and stage > 0
        )


def with_interleaved_order(plan: Plan, costs: StepCosts, room: Mapping[str, Room]) -> Plan | None:
    """Return an interleaved plan under the best order found, with limits to match; None where there is no room for any.

    `room` is by leader of a replica, of all of them. Devices with one stage go by the plain rule in theirs.
    """
    free = [[plan.global_batch] * len(stage.replicas) for stage in plan.stages]
    for crew in plan.crews:
        for number, replica in enumerate(() if crew.several else crew.first.replicas):
            own = room[replica.devices[0]]
            fits = own.size_bytes // max(own.sample_bytes[crew.numbers[0]], 1e-12)
            largest = max((span.size for span in crew.first.replica_spans(number)), default=1)
            free[crew.numbers[0]][number] = int(min(plan.global_batch, max(fits, largest)))
    best: tuple[float, str, _Trial] | None = None
    for name, run in _candidates(replace(plan.with_limits(free), hints=None), costs, room):
        try:
            found = run(False)
        except ScheduleError:
            continue  # it stops for want of room
        fits_all = all(own.of(found.orders[leader]) for leader, own in room.items())
        if fits_all and (best is None or found.step_s < best[0]):
            best = found.step_s, name, run
    if best is None:
        return None
    step_s, name, run = best
    result = run(True)
    orders = result.orders
    limits = [
        [max(1, held_samples(orders[replica.devices[0]], index)) for replica in stage.replicas]
        for index, stage in enumerate(plan.stages)
    ]
    hints = DispatchHints(
        orders=tuple(
            tuple(_planned(orders[one.devices[0]], result.trace, one.devices[0]) for one in crew.first.replicas)
            for crew in plan.crews
        ),
        predicted_s=step_s,
        reason=f"found from {name}: {step_s:.6g} s",
    )
    return replace(plan.with_limits(limits), schedule="critical-path", hints=hints)


def quick_step_s(plan: Plan, costs: StepCosts, room: Mapping[str, Room]) -> float:
    """Return the seconds of a step under the better of two rules; infinite where there is no room for either."""
    found = [math.inf]
    for deep in (True, False):
        rule = _Rule(preference=_PREFERENCES[0], deep=deep, splits=True)
        with suppress(ScheduleError):  # it stops for want of room
            found.append(_RuleRun(plan, costs, rule, room).run(1).step_s)
    return min(found)


def _planned(order: tuple[Action, ...], trace: Trace, device: str) -> PlannedOrder:
    """Return what a device did as a plan has it.

    What it waited for, and what came at the very moment at which it was wanted, is worth waiting for, though other work
    be ready.
    """
    stages = tuple(action.stage for action in order)
    own = sorted((one.start_s, one.end_s) for one in trace.intervals if (one.device, one.lane) == (device, "compute"))
    came_s = sorted(flow.received_s for flow in trace.flows if flow.target == device)
    waits = []
    for position, (before, (start_s, _)) in enumerate(pairwise(own[: len(order)]), start=1):
        just_came = bisect_right(came_s, start_s + _SAME_S) > bisect_left(came_s, start_s - _SAME_S)
        if start_s - before[1] > _SAME_S or just_came:
            waits.append(PlannedWait(position=position, seconds=max(_SAME_S, start_s - before[1])))
    return PlannedOrder(
        ops="".join(action.op.value for action in order),
        waits=tuple(waits),
        stages=stages if len(set(stages)) > 1 else (),
    )


_Trial = Callable[[bool], SimulationResult]
"""Runs a step, with a trace or without."""


def _candidates(plan: Plan, costs: StepCosts, room: Mapping[str, Room]) -> Iterator[tuple[str, _Trial]]:
    """Yield the static schedules that have an order for the plan and room for it, and rules."""
    for name, schedule in schedules().items():
        if schedule.orders and schedule.shares_devices and _has_room(under := replace(plan, schedule=name), room):
            yield name, partial(_simulated, under, costs)
    plan = replace(plan, schedule="critical-path")
    for preference, deep, splits in product(_PREFERENCES, (True, False), (True, False)):
        yield "a rule", partial(_ruled, plan, costs, _Rule(preference=preference, deep=deep, splits=splits), room)


def _has_room(plan: Plan, room: Mapping[str, Room]) -> bool:
    """Whether a plan has a static order, in which all devices with several stages have room."""
    try:
        rows = zip(plan.crews, replica_tasks(plan), strict=True)
    except PlanError:
        return False
    tasks = [(one.devices[0], task) for crew, row in rows for one, task in zip(crew.first.replicas, row, strict=True)]
    return all(room[leader].of(known_order(task)) for leader, task in tasks)


def _simulated(plan: Plan, costs: StepCosts, trace: bool) -> SimulationResult:
    return simulate(plan, costs, steps=1, options=SimulationOptions(trace=trace))


def _ruled(plan: Plan, costs: StepCosts, rule: _Rule, room: Mapping[str, Room], trace: bool) -> SimulationResult:
    return _RuleRun(plan, costs, rule, room, trace=trace).run(1)
