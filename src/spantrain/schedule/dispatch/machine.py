"""What all dispatch policies share: what a replica is told, what has arrived, what is ready, what runs."""

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from spantrain.core.action import Action, Direction, Op, requires
from spantrain.core.messages import Arrived, Command, Event, Finished, Recut, Run
from spantrain.core.planned.hints import PlannedOrder
from spantrain.core.records import Record
from spantrain.core.span import Coverage, Span
from spantrain.errors import ScheduleError
from spantrain.schedule.dispatch.recut import Renumbering, check_recut


class ReplicaTask(Record):
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
    """The static order, from the whole plan; of a schedule that is decided at run time, empty."""
    planned: PlannedOrder | None = None
    """The order that `critical-path` follows; None: its plain rule."""


def planned_actions(planned: PlannedOrder, tasks: Sequence[ReplicaTask]) -> tuple[Action, ...]:
    """Return the actions of a planned order of a device's stages, each kind of a stage by rising own micro-batch.

    Raises:
        ValueError: it has more actions of a kind than there are micro-batches, or those of other stages, or does not
            say which of several they are of.

    >>> task = ReplicaTask(stage=1, num_stages=2, spans=(Span(0, 4), Span(4, 6)), in_flight_limit=6)
    >>> " ".join(map(str, planned_actions(PlannedOrder(ops="FFIIWW"), [task])))
    '1F[0:4] 1F[4:6] 1I[0:4] 1I[4:6] 1W[0:4] 1W[4:6]'
    """
    by_stage = {task.stage: task for task in tasks}
    stages = planned.stages if planned.stages or len(tasks) > 1 else (tasks[0].stage,) * len(planned.ops)
    if len(stages) != len(planned.ops):
        raise ValueError(f"the order of several stages says of {len(stages)} actions which stage they are of")
    if set(stages) - set(by_stage):
        own = " and ".join(map(str, by_stage))
        raise ValueError(f"stage {own}: its order has actions of stages {sorted(set(stages))}")
    taken: dict[tuple[int, str], int] = {}
    actions = []
    for letter, stage in zip(planned.ops, stages, strict=True):
        spans, number = by_stage[stage].spans, taken.get((stage, letter), 0)
        if number == len(spans):
            raise ValueError(f"stage {stage}: {letter} comes more than {len(spans)} times in {planned.ops}")
        actions.append(Action(stage, Op(letter), spans[number]))
        taken[stage, letter] = number + 1
    return tuple(actions)


_PATIENCE = 2.0
"""How many times the planned seconds a device waits for an action before it does something else."""


class Patience:
    """Says whether an action that is late in a planned order is worth waiting for, and no longer."""

    def __init__(self, waits_s: Mapping[int, float]) -> None:
        """Wait so long for the action at each position; for others not at all."""
        self.waits_s = waits_s
        self._since: tuple[int, float] | None = None

    @classmethod
    def of(cls, planned: PlannedOrder) -> "Patience":
        """Wait not much longer than planned."""
        return cls({wait.position: _PATIENCE * wait.seconds for wait in planned.waits})

    def lasts(self, position: int, now_s: float) -> bool:
        """Whether to go on waiting for an action, counted from the first time that it is asked for."""
        patience_s = self.waits_s.get(position)
        if patience_s is None:
            return False
        if self._since is None or self._since[0] != position:
            self._since = (position, now_s)
        return now_s - self._since[1] <= patience_s


class SpanProgress(IntEnum):
    """How far a micro-batch is."""

    NEW = 0
    FORWARDED = 1
    INPUT_DONE = 2
    RELEASED = 3


_AFTER = {
    Op.FORWARD: SpanProgress.FORWARDED,
    Op.BACKWARD_INPUT: SpanProgress.INPUT_DONE,
    Op.BACKWARD_WEIGHT: SpanProgress.RELEASED,
    Op.BACKWARD: SpanProgress.RELEASED,
}
_ARRIVES = {"activation": Direction.FORWARD, "output_gradient": Direction.BACKWARD}
_OWN = {"forward": SpanProgress.FORWARDED, "backward_input": SpanProgress.INPUT_DONE}


@dataclass(kw_only=True)
class DispatchState:
    """What has happened in this step."""

    step: int
    progress: list[SpanProgress]
    """By own micro-batch."""
    activations: Coverage = field(default_factory=Coverage)
    gradients: Coverage = field(default_factory=Coverage)
    running: Action | None = None
    running_index: int = 0
    """Which own micro-batch the running action is of."""
    held: int = 0
    """Samples whose activations are held; a running forward's count."""
    num_released: int = 0
    first_new: int = 0
    """All own micro-batches before this one have run forward; so looking for older ones starts here."""


class DispatchMachine(ABC):
    """Keeps the state of a step; a policy chooses among what is ready.

    Actions are made once and found by operation and index of the own micro-batch: every event of every device passes
    here, in planners' simulations millions of times.
    """

    def __init__(self, task: ReplicaTask, *, split: bool) -> None:
        assert list(task.spans) == sorted(task.spans), f"stage {task.stage}: micro-batches must be by rising sample"
        self.task = task
        backward = Op.BACKWARD_INPUT if split else Op.BACKWARD
        self._next_op = (Op.FORWARD, backward, Op.BACKWARD_WEIGHT)  # by progress
        self._awaits = {op: self._awaited(op, progress) for progress, op in enumerate(self._next_op)}
        self._used = self._next_op if split else self._next_op[:2]
        self._ready: dict[Op, list[int]] = {op: [] for op in Op}
        self._take_spans(task.spans)
        self.state: DispatchState | None = None
        self.held_before = 0
        """Samples that an older step holds or has yet to forward here: their room is not this step's."""

    def _take_spans(self, spans: Sequence[Span]) -> None:
        """Work on these micro-batches from now on."""
        self._spans = tuple(spans)
        self._actions = {op: [Action(self.task.stage, op, span) for span in spans] for op in self._used}
        self._index = {span: index for index, span in enumerate(spans)}

    def _awaited(self, op: Op, progress: int) -> Direction | None:
        """Return what must arrive before an operation; what the replica itself must have done is its progress."""
        needed = requires(Action(self.task.stage, op, Span(0, 1)), self.task.num_stages)
        assert all(progress >= _OWN[value] for value, _ in needed if value in _OWN), f"{op} at {progress}"
        return next((_ARRIVES[value] for value, _ in needed if value in _ARRIVES), None)

    def on_event(self, now_s: float, event: Event) -> list[Command]:
        """Take in what happened; return what to do."""
        self.hear(now_s, event)
        return self.decide(now_s)

    def hear(self, now_s: float, event: Event) -> None:
        """Take in what happened."""
        if isinstance(event, Arrived):
            self._arrive(event.direction, event.span)
        elif isinstance(event, Finished):
            self._finish(event.action)
        elif isinstance(event, Recut):
            self._recut(event.spans)
        else:
            self._begin(event.step, now_s)

    def decide(self, now_s: float) -> list[Command]:
        """Return what to do now."""
        state = self.state
        assert state is not None, "the step has not started"
        if state.running is not None:
            return []
        chosen = self._choose(state, now_s)
        if chosen is None:
            return []
        op, index, reason = chosen
        action = self._actions[op][index]
        self._ready[op].remove(index)
        state.running, state.running_index = action, index
        if op is Op.FORWARD:
            state.held += action.span.size
        return [Run(action, reason)]

    @property
    def step_complete(self) -> bool:
        """Whether all work of the step is done."""
        return self.state is not None and self.state.num_released == len(self._spans)

    @property
    def unreleased(self) -> int:
        """Samples of the step that are held, or have yet to be."""
        state = self.state
        if state is None:
            return 0
        pairs = zip(self._spans, state.progress, strict=True)
        return sum(span.size for span, progress in pairs if progress is not SpanProgress.RELEASED)

    def waiting_for(self) -> str:
        """Say in a few words what an idle replica waits for."""
        if self.state is None:
            return "the step to start"
        if self.state.running:
            return f"{self.state.running} to end"
        if self.step_complete:
            return "nothing, its step is complete"
        ready = self._ready[Op.FORWARD]
        if ready and not self._fits(self.state, ready[0]):
            return (
                f"room for {self._actions[Op.FORWARD][ready[0]]}: {self.held_before + self.state.held} of "
                f"{self.task.in_flight_limit} samples held, gradients of {self._oldest(SpanProgress.FORWARDED)}"
            )
        return (
            f"activations of {self._oldest(SpanProgress.NEW)} (has {self.state.activations}), "
            f"gradients of {self._oldest(SpanProgress.FORWARDED)} (has {self.state.gradients})"
        )

    def _oldest(self, progress: SpanProgress) -> str:
        assert self.state is not None
        at = [span for span, where in zip(self._spans, self.state.progress, strict=True) if where is progress]
        return str(at[0]) if at else "nothing"

    @property
    def unbegun(self) -> tuple[Span, ...]:
        """Own micro-batches that have not begun: those that may be cut otherwise."""
        return tuple(self._spans[index] for index in self._unbegun_indices())

    def _unbegun_indices(self) -> list[int]:
        state = self.state
        if state is None:
            return []
        new = [index for index, progress in enumerate(state.progress) if progress is SpanProgress.NEW]
        return [index for index in new if state.running is None or index != state.running_index]

    @property
    def uncut(self) -> tuple[Span, ...]:
        """The same samples in pieces as large as they may be: those of one micro-batch of the plan together."""
        runs: list[Span] = []
        planned = iter(self.task.spans)
        whole = next(planned, None)
        for span in self.unbegun:
            while whole is not None and not whole.contains(span):
                whole = next(planned, None)
            if runs and whole is not None and runs[-1].hi == span.lo and whole.contains(runs[-1]):
                runs[-1] = Span(runs[-1].lo, span.hi)
            else:
                runs.append(span)
        return tuple(runs)

    @property
    def starved_of(self) -> tuple[Span, int] | None:
        """What an idle replica waits for: its oldest micro-batch that has not come whole, and how much of it has."""
        state = self.state
        if state is None or state.running is not None or self._awaits[Op.FORWARD] is None:
            return None
        waiting = (self._spans[index] for index in self._unbegun_indices())
        first = next((span for span in waiting if not state.activations.contains(span)), None)
        return None if first is None else (first, state.activations.end_of(first.lo) - first.lo)

    def _recut(self, spans: Sequence[Span]) -> None:
        """Put these micro-batches instead of those that have not begun and share samples with them."""
        state = self.state
        assert state is not None, "the step has not started"
        unbegun = self._unbegun_indices()
        replaced = check_recut(spans, [self._spans[index] for index in unbegun], self.task.spans, self.task.stage)
        change = Renumbering.of(self._spans, [unbegun[position] for position in replaced], spans)
        progress = state.progress
        state.progress = [SpanProgress.NEW if old is None else progress[old] for old in change.old_of]
        state.first_new = 0
        if state.running is not None:
            state.running_index = change.new_of[state.running_index]
        for ready in self._ready.values():
            ready[:] = [change.new_of[index] for index in ready if index in change.new_of]
        self._take_spans(change.spans)
        for index in change.added:
            if self._awaits[Op.FORWARD] is None or state.activations.contains(self._spans[index]):
                insort(self._ready[Op.FORWARD], index)
        self._renumber(change)

    @abstractmethod
    def _renumber(self, change: Renumbering) -> None:
        """Follow a re-cut in what the policy itself knows of micro-batches by their numbers."""

    @abstractmethod
    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:
        """Return what an idle replica should run now: operation, index of the own micro-batch, reason."""

    def _begin(self, step: int, now_s: float) -> None:  # noqa: ARG002 - for those that measure a step from here
        if self.state is not None and not self.step_complete:
            raise ScheduleError(
                f"stage {self.task.stage}: step {step} starts before step {self.state.step} is complete"
            )
        if self._spans is not self.task.spans:
            self._take_spans(self.task.spans)
        self.state = DispatchState(step=step, progress=[SpanProgress.NEW] * len(self._spans))
        for ready in self._ready.values():
            ready.clear()
        if self._awaits[Op.FORWARD] is None:
            self._ready[Op.FORWARD].extend(range(len(self._spans)))

    def _arrive(self, direction: Direction, span: Span) -> None:
        state = self.state
        assert state is not None, "samples arrived before the step started"
        whole = self._index.get(span)
        touched = self._touched(span) if whole is None else (whole,)
        coverage, waiting = (
            (state.activations, SpanProgress.NEW)
            if direction is Direction.FORWARD
            else (state.gradients, SpanProgress.FORWARDED)
        )
        coverage.add(span)
        op = self._next_op[waiting]
        if self._awaits[op] is not direction:
            return
        for index in touched:
            # What is not that far yet is looked at again when it is; what runs has had all its samples before.
            if state.progress[index] is waiting and (whole is not None or coverage.contains(self._spans[index])):
                insort(self._ready[op], index)

    def _touched(self, span: Span) -> Sequence[int]:
        """Return the indices of own micro-batches that share samples with a span, which must be of them only."""
        spans = self._spans
        start = bisect_right(spans, span.lo, key=lambda other: other.hi)
        end = bisect_right(spans, span.hi - 1, key=lambda other: other.lo)
        own = [span.intersect(other) for other in spans[start:end]]
        if sum(part.size for part in own if part) != span.size:
            raise ScheduleError(f"stage {self.task.stage}: samples {span} arrived, its own are {spans}")
        return range(start, end)

    def _finish(self, action: Action) -> None:
        state = self.state
        assert state is not None
        if state.running is not action and state.running != action:
            raise ScheduleError(f"{action} ended, but {state.running or 'nothing'} was running")
        state.running = None
        index = state.running_index
        progress = state.progress[index] = _AFTER[action.op]
        if progress is SpanProgress.RELEASED:
            state.held -= action.span.size
            state.num_released += 1
            return
        op = self._next_op[progress]
        # Only gradients can be awaited behind a forward.
        if self._awaits[op] is None or state.gradients.contains(action.span):
            insort(self._ready[op], index)

    def _fits(self, state: DispatchState, index: int) -> bool:
        """Whether a forward may take memory: it must leave room for the older ones that have not run yet.

        Without that room, forwards that overtook could fill the memory while the pipeline waits for an older one.
        """
        progress, spans = state.progress, self._spans
        while state.first_new < index and progress[state.first_new] is not SpanProgress.NEW:
            state.first_new += 1
        older = sum(spans[k].size for k in range(state.first_new, index) if progress[k] is SpanProgress.NEW)
        return self.held_before + state.held + older + spans[index].size <= self.task.in_flight_limit
