"""What a device with several stages does next: a machine for each stage says what is ready, and one order decides.

An interleaved pipeline gives a device stages that are not neighbours: its first chunk of the model and another one
further up (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2).
"""

from collections.abc import Callable, Iterable, Sequence

from spantrain.core.action import Action, Op
from spantrain.core.messages import Arrived, Command, Event, Finished, StepStarted
from spantrain.core.planned.hints import PlannedOrder
from spantrain.core.records import Record
from spantrain.errors import ScheduleError
from spantrain.schedule.dispatch.machine import DispatchMachine, DispatchState, Patience, ReplicaTask, planned_actions
from spantrain.schedule.dispatch.recut import Renumbering

Ready = tuple[int, Op, int]
"""A stage, an operation, and which of the stage's own micro-batches."""


class SharedTask(Record):
    """Everything that a device with several stages may know."""

    stages: tuple[ReplicaTask, ...]
    """By rising stage."""
    order: tuple[Action, ...] = ()
    """The static order, from the whole plan; of a schedule that is decided at run time, empty."""
    planned: PlannedOrder | None = None
    """The order that `critical-path` follows; None: its plain rule."""

    @property
    def split_backward(self) -> bool | None:
        """As of each of its stages."""
        return self.stages[0].split_backward


class _OneOfSeveral(DispatchMachine):
    """Knows what is ready in one stage; which of it is run, the device says."""

    _next: tuple[Op, int, str] | None = None

    def ready(self) -> Iterable[tuple[Op, int]]:
        """Yield of each operation the oldest micro-batch that could be run."""
        state = self.state
        assert state is not None
        for op, ready in self._ready.items():
            if ready and (op is not Op.FORWARD or self._fits(state, ready[0])):
                yield op, ready[0]

    def run(self, op: Op, index: int, reason: str, now_s: float) -> list[Command]:
        """Return the command to run it."""
        self._next = (op, index, reason)
        return list(self.decide(now_s))

    @property
    def held(self) -> int:
        """Samples whose activations are held."""
        return 0 if self.state is None else self.state.held

    def size(self, index: int) -> int:
        """Return the samples of an own micro-batch."""
        return self._spans[index].size

    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:  # noqa: ARG002
        return self._next

    def _renumber(self, change: Renumbering) -> None:
        raise ScheduleError(f"a device with several stages cannot re-cut micro-batches to {change.spans}")


Choose = Callable[["SeveralStages", float], tuple[Ready, str] | None]
"""Returns what an idle device should run at a time, of what is ready, and why; None: it waits."""


class SeveralStages:
    """Decides for all stages of a device: one action at a time."""

    def __init__(self, tasks: Sequence[ReplicaTask], choose: Choose, *, split: Callable[[int], bool]) -> None:
        """Take the tasks of its stages; `split`: whether backwards of a stage run as I and W."""
        self.machines = {task.stage: _OneOfSeveral(task, split=split(task.stage)) for task in tasks}
        self._choose = choose
        self._is_running = False

    def on_event(self, now_s: float, event: Event) -> list[Command]:
        """Take in what happened; return what to do."""
        match event:
            case StepStarted():
                for machine in self.machines.values():
                    machine.hear(now_s, event)
                if isinstance(self._choose, InOrder):
                    self._choose.begin()
            case Arrived(_, _, int(stage)):
                self.machines[stage].hear(now_s, event)
            case Finished(action):
                self.machines[action.stage].hear(now_s, event)
                self._is_running = False
            case _:
                raise ScheduleError(f"{event} is not for a device with several stages")
        if self._is_running:
            return []
        chosen = self._choose(self, now_s)
        if chosen is None:
            return []
        self._is_running = True
        (stage, op, index), reason = chosen
        return self.machines[stage].run(op, index, reason, now_s)

    def ready(self) -> list[Ready]:
        """Return, of each operation of each stage, the oldest micro-batch that could be run now."""
        return [(stage, op, index) for stage, machine in self.machines.items() for op, index in machine.ready()]

    @property
    def step_complete(self) -> bool:
        """Whether all work of the step is done."""
        return all(machine.step_complete for machine in self.machines.values())

    def waiting_for(self) -> str:
        """Say in a few words what the device waits for."""
        return "; ".join(f"at stage {stage}: {machine.waiting_for()}" for stage, machine in self.machines.items())


class InOrder:
    """Follows an order: a static one strictly; a planned one as far as nothing else is ready.

    What is late in a planned order is overtaken by what is ready behind it, unless the plan says that waiting pays, but
    no forward overtakes the end of a backward: so the device never holds more than in the order itself.
    """

    def __init__(self, order: Sequence[tuple[int, Op, int]], planned: PlannedOrder | None = None) -> None:
        """Follow an order of stages, operations and own micro-batches; without `planned` strictly."""
        self._order = list(order)
        self._position = {step: number for number, step in enumerate(self._order)}
        self._strict = planned is None
        self._waits_s = Patience.of(planned).waits_s if planned else {}
        self._frees = [n for n, (_, op, _) in enumerate(self._order) if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._taken = bytearray(len(self._order))
        self._next = self._freed = 0
        self._patience = Patience(self._waits_s)

    def __call__(self, device: SeveralStages, now_s: float) -> tuple[Ready, str] | None:
        """Return the next action that may run."""
        while self._next < len(self._order) and self._taken[self._next]:
            self._next += 1
        found = min((self._position[one] for one in device.ready() if self._may_run(one)), default=None)
        if found is None or (found != self._next and (self._strict or self._patience.lasts(self._next, now_s))):
            return None
        self._taken[found] = 1
        which = f"action {found + 1} of {len(self._order)} in the order"
        return self._order[found], which if found == self._next else f"{which}; the ones before it are late"

    def _may_run(self, one: Ready) -> bool:
        if one[1] is not Op.FORWARD:
            return True
        while self._freed < len(self._frees) and self._taken[self._frees[self._freed]]:
            self._freed += 1
        return self._freed == len(self._frees) or self._frees[self._freed] > self._position[one]


def by_rule(device: SeveralStages, now_s: float, *, preference: Sequence[Op]) -> tuple[Ready, str] | None:  # noqa: ARG001
    """Return the first kind of work, in order of preference, that is ready: of samples that are furthest on their way.

    That is the last of the stages for a forward, the first of them for a backward.
    """
    ready = device.ready()
    for op in preference:
        stages = sorted(one for one in ready if one[1] is op)
        if stages:
            return stages[-1 if op is Op.FORWARD else 0], f"furthest ready {op.value}"
    return None


def shared_machine(task: SharedTask, preference: Sequence[Op] = (), *, split: Callable[[int], bool]) -> SeveralStages:
    """Return the machine of a device with several stages: of an order, or of a rule (`by_rule`)."""
    actions = task.order if task.planned is None else planned_actions(task.planned, task.stages)
    if not actions:
        return SeveralStages(
            task.stages, lambda device, now_s: by_rule(device, now_s, preference=preference), split=split
        )
    splits = {action.stage for action in actions if action.op is Op.BACKWARD_INPUT}
    numbers = {(own.stage, span): index for own in task.stages for index, span in enumerate(own.spans)}
    order = [(action.stage, action.op, numbers[action.stage, action.span]) for action in actions]
    return SeveralStages(task.stages, InOrder(order, task.planned), split=lambda stage: stage in splits)


AnyMachine = DispatchMachine | SeveralStages
"""What decides for a device: of one stage, or of several."""
