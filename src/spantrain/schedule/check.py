"""Check that an order, planned or executed, does all work once, within memory, and can run."""

from collections.abc import Sequence

from spantrain.core.action import Action, Op, requires
from spantrain.core.span import Coverage, Span
from spantrain.errors import ScheduleError
from spantrain.schedule.layout import Layout

_PARTS = {
    Op.FORWARD: ("forward",),
    Op.BACKWARD: ("backward_input", "backward_weight"),
    Op.BACKWARD_INPUT: ("backward_input",),
    Op.BACKWARD_WEIGHT: ("backward_weight",),
}
_ALL_PARTS = ("forward", "backward_input", "backward_weight")


def check_replica_order(actions: Sequence[Action], spans: Sequence[Span], limit: int) -> None:
    """Check that one replica does F, and B or I and W, of each own span once, and holds no more than it may.

    Raises:
        ScheduleError: it does not; the message names the action.

    >>> check_replica_order([Action.parse("0F[0:4]"), Action.parse("0B[0:4]")], [Span(0, 4)], limit=4)
    >>> check_replica_order([Action.parse("0F[0:4]"), Action.parse("0I[0:4]")], [Span(0, 4)], limit=4)
    Traceback (most recent call last):
    spantrain.errors.ScheduleError: span [0:4] has no backward_weight: 0F[0:4] 0I[0:4]
    """
    own = set(spans)
    missing = {(part, span) for part in _ALL_PARTS for span in own}
    held = 0
    for number, action in enumerate(actions):
        where = f"action {number}, {action}"
        if action.span not in own:
            raise ScheduleError(f"{where}: the replica's micro-batches are {' '.join(map(str, spans))}")
        for part in _PARTS[action.op]:
            if (part, action.span) not in missing:
                raise ScheduleError(f"{where}: its {part} was done before")
            missing.remove((part, action.span))
        if action.op is Op.FORWARD:
            held += action.span.size
        elif action.op is not Op.BACKWARD_INPUT:
            held -= action.span.size
        if held > limit:
            raise ScheduleError(f"{where}: {held} samples held, the limit is {limit}")
    if missing:
        part, span = min(missing, key=lambda entry: (entry[1], _ALL_PARTS.index(entry[0])))
        raise ScheduleError(f"span {span} has no {part}: {' '.join(map(str, actions))}")


def check_orders(orders: Sequence[Sequence[Sequence[Action]]], layout: Layout) -> None:
    """Check the orders of all replicas, by stage and replica: each by itself, then that together they can run.

    They are run without times: a replica does its next action when all that `core.action.requires` names is there.

    Raises:
        ScheduleError: they are wrong or stop; the message names the action that fails, or where each replica stops.
    """
    shape, wanted = [len(row) for row in orders], [len(row) for row in layout.spans]
    if shape != wanted:
        raise ScheduleError(f"the order has {shape} replicas by stage, the plan has {wanted}")
    for stage, row in enumerate(orders):
        for replica, order in enumerate(row):
            wrong = next((action for action in order if action.stage != stage), None)
            if wrong is not None:
                raise ScheduleError(f"{wrong} is in the order of stage {stage}, replica {replica}")
            try:
                check_replica_order(order, layout.spans[stage][replica], layout.limits[stage][replica])
            except ScheduleError as error:
                raise ScheduleError(f"stage {stage}, replica {replica}: {error}") from error
    _replay(orders)


def _replay(orders: Sequence[Sequence[Sequence[Action]]]) -> None:
    num_stages = len(orders)
    done = {(part, stage): Coverage() for part in ("forward", "backward_input") for stage in range(num_stages)}
    queues = [list(reversed(order)) for row in orders for order in row]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and _blocked_by(queue[-1], num_stages, done) is None:
                action = queue.pop()
                for part in set(_PARTS[action.op]) - {"backward_weight"}:
                    _add(done[part, action.stage], action)
                moved = True
    stuck = [queue[-1] for queue in queues if queue]
    if stuck:
        raise ScheduleError(
            "the order stops: "
            + "; ".join(f"{action} waits for {_blocked_by(action, num_stages, done)}" for action in stuck)
        )


def _add(coverage: Coverage, action: Action) -> None:
    try:
        coverage.add(action.span)
    except ValueError as error:
        raise ScheduleError(f"{action}: another replica of the stage has done some of its samples, {error}") from error


def _blocked_by(action: Action, num_stages: int, done: dict[tuple[str, int], Coverage]) -> str | None:
    """Return what an action still needs: activations are forwards of the stage before, gradients I of the next."""
    made_by = {"activation": "forward", "output_gradient": "backward_input"}
    for value, stage in requires(action, num_stages):
        coverage = done[made_by.get(value, value), stage]
        if not coverage.contains(action.span):
            return f"{value} of stage {stage} (has {coverage})"
    return None
