"""What a replica of a stage does next: one decision machine per replica, driven by the runtime and by the simulator.

A machine hears events (`StepStarted`, `Arrived`, `Finished`) and answers with at most one `Run` while it is idle.
Its state is plain data and the same events give the same commands. What the clock says does not matter, but to a
machine with a planned order: that measures how long it has waited.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from spantrain.core.action import Action, Op
from spantrain.core.messages import Command, Event, Finished, StepStarted
from spantrain.core.planned.hints import DispatchHints, PlannedOrder
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.dispatch.machine import DispatchMachine, DispatchState, Patience, ReplicaTask, planned_actions
from spantrain.schedule.dispatch.recut import Renumbering, recut_order
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.dispatch.several import SeveralStages, SharedTask, shared_machine
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import check_orders

Task = ReplicaTask | SharedTask
Tasks = tuple[tuple[Task, ...], ...]
"""By crew and replica (`core.plan.Crew`)."""


class PlannedDispatch(DispatchMachine):
    """Follows an order that was found when planning: the next action if it is ready, else the first behind it that is.

    Only where the plan says that waiting pays does it wait, and not much longer than planned: a link that has become
    slow costs no more than that. What runs early never hinders what it overtook: backwards take no memory, and forwards
    leave room for older ones. So a pipeline that can run in the planned order can run however messages come.
    """

    def __init__(self, task: ReplicaTask, planned: PlannedOrder) -> None:
        super().__init__(task, split="I" in planned.ops)
        actions = planned_actions(planned, [task])
        self._planned = [(action.op, self._index[action.span]) for action in actions]
        self._planned_waits_s = Patience.of(planned).waits_s
        self._follow(self._planned, self._planned_waits_s)

    def _follow(self, sequence: list[tuple[Op, int]], waits_s: Mapping[int, float]) -> None:
        self._sequence, self._patience = sequence, Patience(waits_s)
        self._position = {step: number for number, step in enumerate(sequence)}
        self._next = 0
        self._taken = bytearray(len(sequence))

    def _begin(self, step: int, now_s: float) -> None:
        super()._begin(step, now_s)
        self._follow(self._planned, self._planned_waits_s)

    def _renumber(self, change: Renumbering) -> None:
        """Go on with the same order; of what replaces a micro-batch, only the first piece is worth waiting for."""
        sequence: list[tuple[Op, int]] = []
        waits_s: dict[int, float] = {}
        taken = bytearray()
        for position, step in enumerate(self._sequence):
            pieces = recut_order([step], change)
            if pieces and position in self._patience.waits_s:
                waits_s[len(sequence)] = self._patience.waits_s[position]
            sequence += pieces
            taken += bytes([self._taken[position]]) * len(pieces)
        self._follow(sequence, waits_s)
        self._taken = taken

    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:
        while self._next < len(self._sequence) and self._taken[self._next]:
            self._next += 1
        found = min(self._could_run(state), default=None)
        if found is None or (found != self._next and self._patience.lasts(self._next, now_s)):
            return None
        self._taken[found] = 1
        op, index = self._sequence[found]
        if found == self._next:
            return op, index, f"action {found + 1} of {len(self._sequence)} in the planned order"
        late, which = self._sequence[self._next]
        return op, index, f"{self._actions[late][which]} is late; the next planned action that is ready"

    def _could_run(self, state: DispatchState) -> list[int]:
        """Return the positions of what is ready: of each kind, the oldest micro-batch."""
        return [
            self._position[op, ready[0]]
            for op, ready in self._ready.items()
            if ready and (op is not Op.FORWARD or self._fits(state, ready[0]))
        ]


class StaticDispatch(DispatchMachine):
    """Runs a fixed order, each action as soon as it can."""

    def __init__(self, task: ReplicaTask, order: Sequence[Action]) -> None:
        super().__init__(task, split=any(action.op is Op.BACKWARD_INPUT for action in order))
        self._planned = [(action.op, self._index[action.span]) for action in order]
        self._order = self._planned
        self._position = 0

    def _renumber(self, change: Renumbering) -> None:
        # Nothing of what is replaced has run, so what has run stays as many actions.
        self._order = recut_order(self._order, change)

    def _begin(self, step: int, now_s: float) -> None:
        super()._begin(step, now_s)
        self._order = self._planned
        self._position = 0

    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:  # noqa: ARG002
        if self._position == len(self._order):
            return None
        op, index = self._order[self._position]
        if index not in self._ready[op]:
            return None
        if op is Op.FORWARD and not self._fits(state, index):
            assert self.held_before, f"F {index} is over the limit: {state.held} held"
            return None
        self._position += 1
        return op, index, f"action {self._position} of {len(self._order)} in the order"


class RuleDispatch(DispatchMachine):
    """Runs the first kind of work, in order of preference, that is ready; the oldest samples first."""

    def __init__(self, task: ReplicaTask, preference: Sequence[Op], *, split: bool) -> None:
        super().__init__(task, split=split)
        self._preference = [(op, self._ready[op], f"oldest ready {op.value}") for op in preference]

    def _renumber(self, change: Renumbering) -> None:
        """Know nothing but what is ready, which follows by itself."""

    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:  # noqa: ARG002
        blocked = ""
        for op, ready, reason in self._preference:
            if not ready:
                continue
            if op is Op.FORWARD and not self._fits(state, ready[0]):
                blocked = f"; a forward waits for room, {state.held} of {self.task.in_flight_limit} held"
                continue
            return op, ready[0], reason + blocked
        return None


def _by_rule(task: ReplicaTask, *, forwards_first: bool) -> RuleDispatch:
    backward = (Op.BACKWARD_INPUT, Op.BACKWARD)
    first = (Op.FORWARD, *backward) if forwards_first else (*backward, Op.FORWARD)
    split = task.stage > 0 if task.split_backward is None else task.split_backward
    return RuleDispatch(task, (*first, Op.BACKWARD_WEIGHT), split=split)


def _critical_path(task: ReplicaTask) -> DispatchMachine:
    """Return what follows the planned order (`core.plan`); without one, what goes back first.

    The stages before wait for backwards of inputs. Nobody waits for stage 0: it sends forwards as early as its memory
    allows. A pipeline of one stage goes back first, to hold the least.
    """
    if task.planned is not None:
        return PlannedDispatch(task, task.planned)
    return _by_rule(task, forwards_first=task.stage == 0 and task.num_stages > 1)


def _shared_by_rule(task: SharedTask, *, forwards_first: bool) -> SeveralStages:
    backward = (Op.BACKWARD_INPUT, Op.BACKWARD)
    first = (Op.FORWARD, *backward) if forwards_first else (*backward, Op.FORWARD)
    split = task.split_backward
    return shared_machine(
        task, (*first, Op.BACKWARD_WEIGHT), split=(lambda stage: stage > 0) if split is None else lambda _: split
    )


RUN_TIME_SCHEDULES = (
    RegisteredSchedule(
        name="compact",
        description="at run time: forwards first, then backwards of inputs, weights into the holes (SpanTrain 3.3.1)",
        splits_backward=True,
        policy=partial(_by_rule, forwards_first=True),
        shared_policy=partial(_shared_by_rule, forwards_first=True),
    ),
    RegisteredSchedule(
        name="critical-path",
        description="at run time: backwards of inputs first, then forwards, weights into the holes; or as planned",
        splits_backward=True,
        policy=_critical_path,
        shared_policy=partial(_shared_by_rule, forwards_first=False),
    ),
)


def with_hints(tasks: Tasks, hints: DispatchHints, layout: CutLayout) -> Tasks:
    """Return the tasks with the planned orders in them.

    Raises:
        PlanError: the hints are of another plan.
    """
    hinted = tuple(
        tuple(replace(task, planned=planned) for task, planned in zip(row, orders, strict=True))
        for row, orders in zip(tasks, hints.orders, strict=True)
    )
    try:
        check_orders([[known_order(task) for task in row] for row in hinted], layout)
    except (ValueError, ScheduleError) as error:
        raise PlanError(
            f"the plan's hints do not fit its micro-batches and in-flight limits: {error}; plan again, or take `hints` "
            "out of the plan"
        ) from error
    return hinted


def known_order(task: Task) -> tuple[Action, ...]:
    """Return the order that a task has from the plan; nothing if it is decided at run time."""
    if task.planned is None:
        return task.order
    return planned_actions(task.planned, task.stages if isinstance(task, SharedTask) else [task])


class TwoSteps:
    """Two decision machines of one replica, one for each step that is open, under one in-flight limit.

    The rule is a uniform delay of one: step t works on weights V_t throughout, V_0 = V_1 are the first weights, and
    V_{t+2} = update(V_{t+1}, gradients of step t). So step t + 1 never waits for the update from step t, and step t + 2
    begins on a device when it has that update. (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    2021, section 3.1, PipeDream-2BW: kept: two versions of weights, gradients one update late for every sample and
    stage. Not kept: its 1F1B order without an end of the step; here any schedule runs its steps whole, and the next one
    fills in.)

    The older step never waits for the next one: a forward of the next one must leave room for all samples that the
    older one holds, or has yet to forward. So steps end one after another as they would alone, and no limit that lets
    one step run stops two.
    """

    def __init__(self, machines: Iterable[DispatchMachine]) -> None:
        """Take two machines of the same task."""
        self._free = list(machines)
        self._open: dict[int, DispatchMachine] = {}
        """By rising step."""
        self._is_running = False
        assert len(self._free) == 2, "two steps need two machines"

    def on_event(self, now_s: float, step: int, event: Event) -> tuple[int, Command] | None:
        """Take in what happened in a step; return what to do, and in which step.

        Raises:
            ScheduleError: the step is not open, or it begins while two others are.
        """
        if isinstance(event, StepStarted):
            if not self._free or any(step != other + 1 for other in self._open):
                raise ScheduleError(f"step {step} begins while {list(self._open)} are open")
            self._open[step] = self._free.pop()
        machine = self._open.get(step)
        if machine is None:
            raise ScheduleError(f"{event} is of step {step}, open are {list(self._open)}")
        machine.hear(now_s, event)
        if isinstance(event, Finished):
            self._is_running = False
        return None if self._is_running else self._decide(now_s)

    def close(self) -> int | None:
        """Take leave of the oldest open step if all its work is done; return it."""
        step = next(iter(self._open), None)
        if step is None or not self._open[step].step_complete:
            return None
        machine = self._open.pop(step)
        machine.held_before = 0
        self._free.append(machine)
        return step

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The steps that have begun and were not closed, by rising number."""
        return tuple(self._open)

    def waiting_for(self) -> str:
        """Say in a few words what an idle replica waits for."""
        return "; ".join(f"in step {step} for {machine.waiting_for()}" for step, machine in self._open.items())

    def _decide(self, now_s: float) -> tuple[int, Command] | None:
        held_before = 0
        for step, machine in self._open.items():
            machine.held_before = held_before
            for command in machine.decide(now_s):
                self._is_running = True
                return step, command
            held_before += machine.unreleased
        return None
