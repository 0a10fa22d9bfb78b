"""The order of work of devices with several stages: the best of the static ones and of rules, within their memory.

By a rule a device takes, of what is ready, the first kind in its order of preference, samples that are furthest on
their way first, and a forward only if there is room for it and, behind it, for one more of each later stage of the
device: so that what is held can always come back. Rules are run in a model of the step, the best of them simulated on
the virtual clock: what they did is the order.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.core.planned.hints import DispatchHints, PlannedOrder, PlannedWait
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.core.trace import Trace
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.dispatch.policies import known_order
from spantrain.schedule.dispatch.several import Ready, SeveralStages, SharedTask
from spantrain.schedule.orders import held_samples
from spantrain.schedule.registry import replica_tasks, schedules
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.model import Room, StepModel, model_of, model_within, run_ranks
from spantrain.sim.sums import LastAction, end_of_step

_HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD)
_PREFERENCES = (
    (*_HALVES, Op.FORWARD, Op.BACKWARD_WEIGHT),
    (Op.FORWARD, *_HALVES, Op.BACKWARD_WEIGHT),
    (*_HALVES, Op.BACKWARD_WEIGHT, Op.FORWARD),
)
_SAME_S = 1e-9
_SIMULATED, _SMALL = 3, 6_000
"""Rules that are simulated: those that are best in the model; of a step of more actions than that, the best."""


class _Rule(Record):
    preference: tuple[Op, ...] = _PREFERENCES[0]
    deep: bool
    """Whether forwards of a device's later stages go first."""
    splits: bool = True

    def ops(self, stage: int) -> tuple[Op, ...]:
        """Return what a stage's work is made of."""
        halves = self.splits and stage > 0
        return (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if halves else (Op.FORWARD, Op.BACKWARD)

    def choices(self, stages: Sequence[int]) -> list[tuple[int, Op]]:
        """Return the work of a device with these stages, in its order of preference."""
        found: list[tuple[int, Op]] = []
        for op in self.preference:
            can = [(stage, op) for stage in stages if op in self.ops(stage)]
            found += reversed(can) if op is Op.FORWARD and self.deep else can
        return found

    def choose(self, device: SeveralStages, _now_s: float, room: Room) -> tuple[Ready, str] | None:
        """Return what a device should do."""
        ready = {(stage, op): index for stage, op, index in device.ready()}
        held = sum(machine.held * room.sample_bytes[stage] for stage, machine in device.machines.items())
        for stage, op in self.choices(list(device.machines)):
            index = ready.get((stage, op))
            if index is None:
                continue
            each = sum(own for number, own in room.sample_bytes.items() if number >= stage)
            if op is not Op.FORWARD or held + device.machines[stage].size(index) * each <= room.size_bytes:
                return (stage, op, index), "by rule"
        return None

    def machine(self, task: SharedTask, leader: str, rooms: Mapping[str, Room]) -> SeveralStages:
        """Return what decides for a device."""
        choose = partial(self.choose, room=rooms[leader])
        return SeveralStages(task.stages, choose, split=lambda stage: len(self.ops(stage)) > 2)

    def step_s(self, plan: Plan, costs: StepCosts, model: StepModel, most_s: float = math.inf) -> float:
        """Return the seconds of a step in a model with the rooms of devices, that splits what the rule does.

        Infinite if it stops for want of room, or is certain to take over `most_s`. Devices with one stage go by the
        plain rule, within their in-flight limits.
        """
        places = [(stage, one) for stage, row in enumerate(plan.stages) for one in range(len(row.replicas))]
        ranks = []
        for device, (stage, _) in enumerate(places):
            stages, parts = [places[other][0] for other in model.crews[device]], self.ops(stage)
            plain = _Rule(preference=_PREFERENCES[0 if stage else 1], deep=False, splits=self.splits)
            choices = (self if len(stages) > 1 else plain).choices(stages)
            ranks.append([[float(choices.index((stage, op)))] * len(model.sizes[device]) for op in parts])
        update_s = max(costs.optimizer_s(leader) for leader in plan.leaders)
        run = run_ranks(model, ranks, most_s - update_s)
        if run.seconds == math.inf:
            return math.inf
        last: list[list[LastAction]] = [[] for _ in plan.stages]
        for device, (stage, one) in enumerate(places):
            leader, spans = plan.stages[stage].replicas[one].devices[0], plan.stages[stage].replica_spans(one)
            action = Action(stage, self.ops(stage)[-1], spans[-1]) if spans else None
            start_s = run.starts[device][-1][-1] if spans else 0.0
            last[stage].append(LastAction(leader, action, start_s, start_s + sum(model.seconds[device][-1][-1:])))
        return end_of_step(last, costs)[0] + update_s


def with_interleaved_order(plan: Plan, costs: StepCosts, room: Mapping[str, Room]) -> Plan | None:
    """Return an interleaved plan under the best order found, with limits to match; None where there is no room for any.

    `room` is by leader of a replica, of all of them. Devices with one stage go by the plain rule in theirs.
    """
    best: tuple[float, str, SimulationResult] | None = None
    for name, other, options in _candidates(replace(_with_room(plan, room), hints=None), costs, room):
        try:
            found = simulate(other, costs, steps=1, options=options)
        except ScheduleError:
            continue  # it stops for want of room
        found = replace(found, orders={leader: _rising(order) for leader, order in found.orders.items()})
        fits_all = all(own.of(found.orders[leader]) for leader, own in room.items())
        if fits_all and (best is None or found.step_s < best[0]):
            best = found.step_s, name, found
    if best is None:
        return None
    step_s, name, result = best
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


def _rising(order: Sequence[Action]) -> tuple[Action, ...]:
    """Return an order as a plan has it: each kind of a stage's work by rising samples, whatever came first."""
    spans: dict[tuple[int, Op], list[Span]] = {}
    for action in sorted(order, key=lambda action: action.span, reverse=True):
        spans.setdefault((action.stage, action.op), []).append(action.span)
    return tuple(replace(action, span=spans[action.stage, action.op].pop()) for action in order)


def quick_step_s(plan: Plan, costs: StepCosts, room: Mapping[str, Room], most_s: float = math.inf) -> float:
    """Return the seconds of a step under the better of two rules, in a model of it.

    Infinite where there is no room for either, or both certainly take over `most_s`.
    """
    if (model := model_within(plan := _with_room(plan, room), costs, room, most_s)) is None:
        return math.inf
    found_s = _Rule(deep=True).step_s(plan, costs, model, most_s)
    return min(found_s, _Rule(deep=False).step_s(plan, costs, model, min(found_s, most_s)))


def _with_room(plan: Plan, room: Mapping[str, Room]) -> Plan:
    """Return a plan in which devices with one stage may hold what they have room for; others share theirs."""
    limits = [[plan.global_batch] * len(stage.replicas) for stage in plan.stages]
    for crew in plan.crews:
        for number, replica in enumerate(() if crew.several else crew.first.replicas):
            own = room[replica.devices[0]]
            fits = own.size_bytes // max(own.sample_bytes[crew.numbers[0]], 1e-12)
            largest = max((span.size for span in crew.first.replica_spans(number)), default=1)
            limits[crew.numbers[0]][number] = int(min(plan.global_batch, max(fits, largest)))
    return plan.with_limits(limits)


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


def _candidates(
    plan: Plan, costs: StepCosts, room: Mapping[str, Room]
) -> Iterator[tuple[str, Plan, SimulationOptions]]:
    """Yield the static schedules that have an order for the plan and room for it, and rules."""
    for name, schedule in schedules().items():
        if schedule.orders and schedule.shares_devices and _has_room(under := replace(plan, schedule=name), room):
            yield name, under, SimulationOptions()
    plan = replace(plan, schedule="critical-path")
    models = {splits: model_of(plan, costs, split=splits, rooms=room) for splits in (True, False)}
    rules = [
        _Rule(preference=preference, deep=deep, splits=splits)
        for preference, deep, splits in product(_PREFERENCES, (True, False), (True, False))
    ]
    most = _SIMULATED if sum(len(row) for parts in models[True].seconds for row in parts) <= _SMALL else 1
    best: list[tuple[float, int]] = []
    for number, rule in enumerate(rules):
        most_s = best[-1][0] if len(best) == most else math.inf
        best = sorted([*best, (rule.step_s(plan, costs, models[rule.splits], most_s), number)])[:most]
    for _, number in best:
        yield "a rule", plan, SimulationOptions(shared=partial(rules[number].machine, rooms=room))


def _has_room(plan: Plan, room: Mapping[str, Room]) -> bool:
    """Whether a plan has a static order, in which all devices with several stages have room."""
    try:
        rows = zip(plan.crews, replica_tasks(plan), strict=True)
    except PlanError:
        return False
    tasks = [(one.devices[0], task) for crew, row in rows for one, task in zip(crew.first.replicas, row, strict=True)]
    return all(room[leader].of(known_order(task)) for leader, task in tasks)
