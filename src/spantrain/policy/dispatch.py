"""What a replica of a stage does next: one decision machine per replica, driven by the runtime and by the simulator.

A machine hears events (`StepStarted`, `Arrived`, `Finished`) and answers with at most one `Run` while it is idle.
Its state is plain data and the same events give the same commands, whatever the clock says.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from spantrain.core.action import Action, Direction, Op, requires
from spantrain.core.messages import Arrived, Command, Event, Finished, Run, StepStarted
from spantrain.core.spans import Coverage, Span
from spantrain.errors import ScheduleError
from spantrain.schedule.layout import Layout
from spantrain.schedule.orders import static_orders
from spantrain.schedule.registry import STATIC_SCHEDULES, check_schedule

__all__ = ["DispatchPolicy", "DispatchState", "Progress", "ReplicaTask", "make_policy"]


@dataclass(frozen=True, kw_only=True)
class ReplicaTask:
    """Everything that a replica may know."""

    stage: int
    num_stages: int
    spans: tuple[Span, ...]
    """Its own micro-batches in order."""
    in_flight_limit: int
    """Samples forwarded and not yet through W."""
    split_backward: bool | None = None
    """Whether backwards run as I and W; None: as the schedule has it. Stage 0 needs no I, nobody waits for it."""
    order: tuple[Action, ...] = ()
    """The static order, from the whole plan; empty: from its own micro-batches, as if all stages had the same ones."""


class DispatchPolicy(Protocol):
    """Decides what one replica does next."""

    def on_event(self, now_s: float, event: Event) -> list[Command]:
        """Take in what happened; return what to do."""

    @property
    def step_complete(self) -> bool:
        """Whether all work of the step is done."""

    def waiting_for(self) -> str:
        """Say in a few words what an idle replica waits for."""


class Progress(IntEnum):
    """How far a micro-batch is."""

    NEW = 0
    FORWARDED = 1
    INPUT_DONE = 2
    RELEASED = 3


_AFTER = {
    Op.FORWARD: Progress.FORWARDED,
    Op.BACKWARD_INPUT: Progress.INPUT_DONE,
    Op.BACKWARD_WEIGHT: Progress.RELEASED,
    Op.BACKWARD: Progress.RELEASED,
}


@dataclass(kw_only=True)
class DispatchState:
    """What has happened in this step."""

    step: int
    progress: list[Progress]
    """By own micro-batch."""
    activations: Coverage = field(default_factory=Coverage)
    gradients: Coverage = field(default_factory=Coverage)
    running: Action | None = None
    held: int = 0
    """Samples whose activations are held; a running forward's count."""
    num_released: int = 0
    first_new: int = 0
    """All own micro-batches before this one have run forward; so looking for older ones starts here."""


class _Machine(ABC):
    """What all policies share: what has arrived, what is ready, what runs."""

    def __init__(self, task: ReplicaTask, *, split: bool) -> None:
        assert list(task.spans) == sorted(task.spans), f"stage {task.stage}: micro-batches must be by rising sample"
        self.task = task
        self._next_op = {
            Progress.NEW: Op.FORWARD,
            Progress.FORWARDED: Op.BACKWARD_INPUT if split else Op.BACKWARD,
            Progress.INPUT_DONE: Op.BACKWARD_WEIGHT,
        }
        self._index = {span: index for index, span in enumerate(task.spans)}
        self._ready: dict[Op, list[int]] = {op: [] for op in Op}
        self.state: DispatchState | None = None

    def on_event(self, now_s: float, event: Event) -> list[Command]:  # noqa: ARG002 - rules here need no time
        """Take in what happened; return what to do."""
        match event:
            case StepStarted(step):
                self._begin(step)
            case Arrived(direction, span):
                self._arrive(direction, span)
            case Finished(action):
                self._finish(action)
        assert self.state is not None, "the step has not started"
        chosen = None if self.state.running else self._choose(self.state)
        if chosen is None:
            return []
        self._start(chosen.action)
        return [chosen]

    @property
    def step_complete(self) -> bool:
        """Whether all work of the step is done."""
        return self.state is not None and self.state.num_released == len(self.task.spans)

    def waiting_for(self) -> str:
        """Say in a few words what an idle replica waits for."""
        if self.state is None:
            return "the step to start"
        if self.state.running:
            return f"{self.state.running} to end"
        if self.step_complete:
            return "nothing, its step is complete"
        ready = self._ready[Op.FORWARD]
        if ready and not self._fits(ready[0]):
            return (
                f"room for {self._action(Op.FORWARD, ready[0])}: {self.state.held} of {self.task.in_flight_limit} "
                f"samples held, gradients of {self._oldest(Progress.FORWARDED)}"
            )
        return (
            f"activations of {self._oldest(Progress.NEW)} (has {self.state.activations}), "
            f"gradients of {self._oldest(Progress.FORWARDED)} (has {self.state.gradients})"
        )

    def _oldest(self, progress: Progress) -> str:
        assert self.state is not None
        at = [span for span, where in zip(self.task.spans, self.state.progress, strict=True) if where is progress]
        return str(at[0]) if at else "nothing"

    @abstractmethod
    def _choose(self, state: DispatchState) -> Run | None:
        """Return what an idle replica should run now."""

    def _begin(self, step: int) -> None:
        if self.state is not None and not self.step_complete:
            raise ScheduleError(
                f"stage {self.task.stage}: step {step} starts before step {self.state.step} is complete"
            )
        self.state = DispatchState(step=step, progress=[Progress.NEW] * len(self.task.spans))
        for ready in self._ready.values():
            ready.clear()
        for index in range(len(self.task.spans)):
            self._refresh(index)

    def _arrive(self, direction: Direction, span: Span) -> None:
        assert self.state is not None, "samples arrived before the step started"
        touched = self._touched(span)
        own = [span.intersect(self.task.spans[index]) for index in touched]
        if sum(part.size for part in own if part) != span.size:
            raise ScheduleError(f"stage {self.task.stage}: samples {span} arrived, its own are {self.task.spans}")
        coverage = self.state.activations if direction is Direction.FORWARD else self.state.gradients
        coverage.add(span)
        for index in touched:
            self._refresh(index)

    def _touched(self, span: Span) -> range:
        """Return the indices of own micro-batches that share samples with a span."""
        spans = self.task.spans
        start = bisect_right(spans, span.lo, key=lambda other: other.hi)
        end = bisect_right(spans, span.hi - 1, key=lambda other: other.lo)
        return range(start, end)

    def _start(self, action: Action) -> None:
        assert self.state is not None
        assert self.state.running is None
        self._ready[action.op].remove(self._index[action.span])
        self.state.running = action
        if action.op is Op.FORWARD:
            self.state.held += action.span.size

    def _finish(self, action: Action) -> None:
        assert self.state is not None
        if self.state.running != action:
            raise ScheduleError(f"{action} ended, but {self.state.running or 'nothing'} was running")
        self.state.running = None
        index = self._index[action.span]
        self.state.progress[index] = _AFTER[action.op]
        if self.state.progress[index] is Progress.RELEASED:
            self.state.held -= action.span.size
            self.state.num_released += 1
        else:
            self._refresh(index)

    def _refresh(self, index: int) -> None:
        """Note the micro-batch's next operation as ready, if it has become so."""
        assert self.state is not None
        progress = self.state.progress[index]
        if progress is Progress.RELEASED:
            return
        op = self._next_op[progress]
        action = self._action(op, index)
        if action == self.state.running or index in self._ready[op]:
            return
        if all(self._there(value, index) for value, _ in requires(action, self.task.num_stages)):
            insort(self._ready[op], index)

    def _there(self, value: str, index: int) -> bool:
        assert self.state is not None
        match value:
            case "activation":
                return self.state.activations.contains(self.task.spans[index])
            case "output_gradient":
                return self.state.gradients.contains(self.task.spans[index])
            case "forward":
                return self.state.progress[index] >= Progress.FORWARDED
            case _:
                return self.state.progress[index] >= Progress.INPUT_DONE

    def _fits(self, index: int) -> bool:
        """Whether a forward may take memory: it must leave room for the older ones that have not run yet.

        Without that room, forwards that overtook could fill the memory while the pipeline waits for an older one.
        """
        assert self.state is not None
        while self.state.first_new < index and self.state.progress[self.state.first_new] is not Progress.NEW:
            self.state.first_new += 1
        between = range(self.state.first_new, index)
        older = sum(self.task.spans[k].size for k in between if self.state.progress[k] is Progress.NEW)
        return self.state.held + older + self.task.spans[index].size <= self.task.in_flight_limit

    def _action(self, op: Op, index: int) -> Action:
        return Action(self.task.stage, op, self.task.spans[index])


class _StaticDispatch(_Machine):
    """Runs a fixed order, each action as soon as it can."""

    def __init__(self, task: ReplicaTask, order: Sequence[Action]) -> None:
        super().__init__(task, split=any(action.op is Op.BACKWARD_INPUT for action in order))
        self._order = tuple(order)
        self._position = 0

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._position = 0

    def _choose(self, state: DispatchState) -> Run | None:
        if self._position == len(self._order):
            return None
        action = self._order[self._position]
        index = self._index[action.span]
        if index not in self._ready[action.op]:
            return None
        assert action.op is not Op.FORWARD or self._fits(index), f"{action} is over the limit: {state.held} held"
        self._position += 1
        return Run(action, f"action {self._position} of {len(self._order)} in the order")


class _RuleDispatch(_Machine):
    """Runs the first kind of work, in order of preference, that is ready; the oldest samples first."""

    def __init__(self, task: ReplicaTask, preference: Sequence[Op], *, split: bool) -> None:
        super().__init__(task, split=split)
        self._preference = tuple(preference)

    def _choose(self, state: DispatchState) -> Run | None:
        blocked = ""
        for op in self._preference:
            for index in self._ready[op][:1]:
                if op is Op.FORWARD and not self._fits(index):
                    blocked = f"; a forward waits for room, {state.held} of {self.task.in_flight_limit} held"
                    continue
                return Run(self._action(op, index), f"oldest ready {op.value}{blocked}")
        return None


def _preference(schedule: str, task: ReplicaTask) -> tuple[Op, ...]:
    """Return the order in which a replica prefers ready work.

    `compact` (SpanTrain 3.3.1): forwards, then backwards of inputs, then weights into the holes. `critical-path`:
    backwards of inputs first, since the stages before wait for them; not on stage 0, which nobody waits for: it sends
    forwards as early as its memory allows. A pipeline of one stage goes back first, to hold the least.
    """
    backward = (Op.BACKWARD_INPUT, Op.BACKWARD)
    forward_first = schedule == "compact" or (task.stage == 0 and task.num_stages > 1)
    first = (Op.FORWARD, *backward) if forward_first else (*backward, Op.FORWARD)
    return (*first, Op.BACKWARD_WEIGHT)


def make_policy(schedule: str, task: ReplicaTask) -> DispatchPolicy:
    """Return the decision machine of one replica.

    Raises:
        UsageError: there is no such schedule.
        PlanError: the in-flight limit is too small for a static order.
    """
    if check_schedule(schedule) in STATIC_SCHEDULES:
        return _StaticDispatch(task, task.order or _order_alone(schedule, task))
    split = task.stage > 0 if task.split_backward is None else task.split_backward
    return _RuleDispatch(task, _preference(schedule, task), split=split)


def _order_alone(schedule: str, task: ReplicaTask) -> tuple[Action, ...]:
    """Return the static order when all stages have this replica's micro-batches and limit."""
    if not task.spans:
        return ()
    # Only what follows the stage matters; a replica's spans may have gaps, which other replicas fill.
    layout = Layout(
        micro_batches=(task.spans,) * task.num_stages,
        spans=((task.spans,),) * task.num_stages,
        limits=((task.in_flight_limit,),) * task.num_stages,
    )
    return static_orders(schedule, layout, split=task.split_backward)[task.stage][0]
