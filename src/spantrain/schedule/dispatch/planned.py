"""Follows an order that was found when planning, and leaves it where messages come later than planned."""

from collections.abc import Mapping

from spantrain.core.action import Action, Op
from spantrain.core.hints import PlannedOrder
from spantrain.schedule.dispatch.machine import DispatchState, Machine, ReplicaTask
from spantrain.schedule.dispatch.recut import Renumbering, recut_order

_PATIENCE = 2.0
"""How many times the planned seconds a device waits for an action before it does something else."""


def actions_of(planned: PlannedOrder, task: ReplicaTask) -> tuple[Action, ...]:
    """Return the actions of a planned order, each kind by rising own micro-batch.

    Raises:
        ValueError: it has more actions of a kind than there are micro-batches.

    >>> from spantrain.core.span import Span
    >>> task = ReplicaTask(stage=1, num_stages=2, spans=(Span(0, 4), Span(4, 6)), in_flight_limit=6)
    >>> " ".join(map(str, actions_of(PlannedOrder(ops="FFIIWW"), task)))
    '1F[0:4] 1F[4:6] 1I[0:4] 1I[4:6] 1W[0:4] 1W[4:6]'
    """
    taken = dict.fromkeys("FBIW", 0)
    actions = []
    for letter in planned.ops:
        if taken[letter] == len(task.spans):
            raise ValueError(f"stage {task.stage}: {letter} comes more than {len(task.spans)} times in {planned.ops}")
        actions.append(Action(task.stage, Op(letter), task.spans[taken[letter]]))
        taken[letter] += 1
    return tuple(actions)


class PlannedDispatch(Machine):
    """Runs the next planned action if it is ready, else the first one behind it that is.

    Only where the plan says that waiting pays does it wait, and not much longer than planned: a link that has become
    slow costs no more than that. What runs early never hinders what it overtook: backwards take no memory, and forwards
    leave room for older ones. So a pipeline that can run in the planned order can run however messages come.
    """

    def __init__(self, task: ReplicaTask, planned: PlannedOrder) -> None:
        super().__init__(task, split="I" in planned.ops)
        actions = actions_of(planned, task)
        self._planned = [(action.op, self._index[action.span]) for action in actions]
        self._planned_waits = {wait.position: _PATIENCE * wait.seconds for wait in planned.waits}
        self._follow(self._planned, self._planned_waits)

    def _follow(self, sequence: list[tuple[Op, int]], waits: Mapping[int, float]) -> None:
        self._sequence, self._waits = sequence, waits
        self._position = {step: number for number, step in enumerate(sequence)}
        self._next = 0
        self._taken = bytearray(len(sequence))
        self._idle_since: tuple[int, float] | None = None

    def _begin(self, step: int, now_s: float) -> None:
        super()._begin(step, now_s)
        self._follow(self._planned, self._planned_waits)

    def _renumber(self, change: Renumbering) -> None:
        """Go on with the same order; of what replaces a micro-batch, only the first piece is worth waiting for."""
        sequence: list[tuple[Op, int]] = []
        waits: dict[int, float] = {}
        taken = bytearray()
        for position, step in enumerate(self._sequence):
            pieces = recut_order([step], change)
            if pieces and position in self._waits:
                waits[len(sequence)] = self._waits[position]
            sequence += pieces
            taken += bytes([self._taken[position]]) * len(pieces)
        self._follow(sequence, waits)
        self._taken = taken

    def _choose(self, state: DispatchState, now_s: float) -> tuple[Op, int, str] | None:
        while self._next < len(self._sequence) and self._taken[self._next]:
            self._next += 1
        found = min(self._could_run(state), default=None)
        if found is None or (found != self._next and self._worth_waiting(now_s)):
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

    def _worth_waiting(self, now_s: float) -> bool:
        """Whether to go on waiting for the next planned action."""
        patience_s = self._waits.get(self._next)
        if patience_s is None:
            return False
        if self._idle_since is None or self._idle_since[0] != self._next:
            self._idle_since = (self._next, now_s)
        return now_s - self._idle_since[1] <= patience_s
