"""What a replica of a stage does next: one decision machine per replica, driven by the runtime and by the simulator.

A machine hears events (`StepStarted`, `Arrived`, `Finished`) and answers with at most one `Run` while it is idle.
Its state is plain data and the same events give the same commands. What the clock says does not matter, but to a
machine with a planned order: that measures how long it has waited.
"""

from collections.abc import Sequence

from spantrain.core.action import Action, Op
from spantrain.schedule.dispatch.machine import DispatchState, Machine, ReplicaTask
from spantrain.schedule.dispatch.planned import PlannedDispatch
from spantrain.schedule.dispatch.recut import Renumbering, recut_order
from spantrain.schedule.layout import Layout
from spantrain.schedule.orders import static_orders
from spantrain.schedule.registry import STATIC_SCHEDULES, check_schedule


class _StaticDispatch(Machine):
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


class _RuleDispatch(Machine):
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


def _preference(schedule: str, task: ReplicaTask) -> tuple[Op, ...]:
    """Return the order in which a replica prefers ready work.

    `compact` (SpanTrain 3.3.1): forwards, then backwards of inputs, then weights into the holes. `critical-path`:
    backwards of inputs first, since the stages before wait for them; not on stage 0, which nobody waits for: it sends
    forwards as early as its memory allows. A pipeline of one stage goes back first, to hold the least. With a planned
    order (`core.hints`) `critical-path` follows that.
    """
    backward = (Op.BACKWARD_INPUT, Op.BACKWARD)
    forward_first = schedule == "compact" or (task.stage == 0 and task.num_stages > 1)
    first = (Op.FORWARD, *backward) if forward_first else (*backward, Op.FORWARD)
    return (*first, Op.BACKWARD_WEIGHT)


def make_policy(schedule: str, task: ReplicaTask) -> Machine:
    """Return the decision machine of one replica.

    Raises:
        UsageError: there is no such schedule.
        PlanError: the in-flight limit is too small for a static order.
    """
    if check_schedule(schedule) in STATIC_SCHEDULES:
        return _StaticDispatch(task, task.order or _order_alone(schedule, task))
    if schedule == "critical-path" and task.planned is not None:
        return PlannedDispatch(task, task.planned)
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
