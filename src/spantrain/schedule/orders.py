"""Orders as data: what each replica does, from first to last.

What static schedules (`schedule.static`) make them of, and a check that an order, planned or executed, does all work
once, within memory, and can run.
"""

from collections.abc import Callable, Sequence

from spantrain.core.action import Action, Op, requires
from spantrain.core.span import Coverage, Span
from spantrain.errors import PlanError, ScheduleError
from spantrain.schedule.layout import Counts, CutLayout, forward_counts, windows

Orders = tuple[tuple[tuple[Action, ...], ...], ...]
"""By crew and replica (`core.plan.Crew`): as each stage has its own devices but in interleaved pipelines, by stage."""


def each_in_turn(left: int) -> int:
    """K_p = P − p: with no time between stages, the first gradient comes just then."""
    return left


def twice_the_way(left: int) -> int:
    """K_p = 2 (P − p) − 1: there and back. Asteroid, section 3.2; the warm-up of the zero-bubble order as well."""
    return 2 * left - 1


def interleave(stage: int, spans: Sequence[Span], counts: Sequence[int], *, split: bool = False) -> tuple[Action, ...]:
    """Return backwards in order, each as soon as `counts` forwards are done; W right after I where they are split.

    >>> spans = [Span(0, 2), Span(2, 4), Span(4, 6)]
    >>> " ".join(map(str, interleave(0, spans, [2, 3, 3])))
    '0F[0:2] 0F[2:4] 0B[0:2] 0F[4:6] 0B[2:4] 0B[4:6]'
    """
    backward = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.BACKWARD,)
    order: list[Action] = []
    done = 0
    for span, count in zip(spans, counts, strict=True):
        order += [Action(stage, Op.FORWARD, ahead) for ahead in spans[done:count]]
        done = max(done, count)
        order += [Action(stage, op, span) for op in backward]
    return tuple(order)


def in_turn(layout: CutLayout, counts: Counts, *, split: bool) -> Orders:
    """Return the order of every replica by the forwards before each of its backwards."""
    return tuple(
        tuple(interleave(stage, own, ahead, split=split) for own, ahead in zip(spans, counted, strict=True))
        for stage, (spans, counted) in enumerate(zip(layout.spans, counts, strict=True))
    )


def warm_up_counts(layout: CutLayout, by_stages_left: Callable[[int], int]) -> Counts:
    """Return the forwards before each backward of an order that, once warm, takes one of each in turn.

    `by_stages_left` gives, by the number of stages from a stage to the last, the micro-batches that it forwards before
    its first backward. Where that would hold more samples than a limit allows, stages from there on warm up less.
    Stages with other micro-batches warm up more where the stages after them need it to start.

    Raises:
        PlanError: a limit is so small that no order can run.
    """
    warm_up = [by_stages_left(left) for left in range(layout.num_stages, 0, -1)]
    while True:
        counts = forward_counts(layout, _micro_batches_ahead(layout, warm_up))
        tight = first_over_limit(layout, counts)
        if tight is None:
            return counts
        largest = max(warm_up[tight:])
        if largest == 1:
            raise PlanError(too_small(layout, counts, tight))
        warm_up[tight:] = [min(count, largest - 1) for count in warm_up[tight:]]


def _micro_batches_ahead(layout: CutLayout, warm_up: Sequence[int]) -> Callable[[int, Span], int]:
    ordered = [sorted(spans) for spans in layout.micro_batches]

    def wanted(stage: int, span: Span) -> int:
        last = layout.micro_batch_index(stage, span) + warm_up[stage] - 1
        # K_p = 1 means: only this replica's own part must be there, not the whole micro-batch of the stage.
        return span.hi if warm_up[stage] == 1 else ordered[stage][min(last, len(ordered[stage]) - 1)].hi

    return wanted


def first_over_limit(layout: CutLayout, counts: Counts) -> int | None:
    """Return the first stage that would hold more samples than it may."""
    for stage, held in enumerate(windows(layout, counts)):
        if any(size > limit for size, limit in zip(held, layout.limits[stage], strict=True)):
            return stage
    return None


def too_small(layout: CutLayout, counts: Counts, stage: int) -> str:
    """Return that the limits of a stage are too small for an order, as a message."""
    needed = windows(layout, counts)[stage]
    return (
        f"stage {stage}: in-flight limits {list(layout.limits[stage])} samples are too small, the micro-batches "
        f"need {list(needed)}; allow more samples or make the micro-batches of the other stages smaller"
    )


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


def held_samples(order: Sequence[Action], stage: int) -> int:
    """Return the most samples of a stage that are held at once in an order.

    >>> held_samples([Action.parse(text) for text in ("0F[0:4]", "2F[0:4]", "0F[4:6]", "0B[0:4]")], 0)
    6
    """
    held = most = 0
    for action in order:
        if action.stage == stage and action.op is Op.FORWARD:
            held += action.span.size
            most = max(most, held)
        elif action.stage == stage and action.op is not Op.BACKWARD_INPUT:
            held -= action.span.size
    return most


def check_room(name: str, orders: Sequence[Sequence[Sequence[Action]]], layout: CutLayout) -> None:
    """Check that orders, by crew and replica, hold no more of any stage than its in-flight limits allow.

    Raises:
        PlanError: they do; the message says of which schedule, and how much it needs.
    """
    for stages, row in zip(layout.crews, orders, strict=True):
        for replica, order in enumerate(row):
            for stage in stages:
                held, limit = held_samples(order, stage), layout.limits[stage][replica]
                if held > limit:
                    raise PlanError(
                        f"stage {stage}: an in-flight limit of {limit} samples is too small, {name} needs {held}; "
                        "allow more samples, or give --schedule critical-path"
                    )


def check_orders(orders: Sequence[Sequence[Sequence[Action]]], layout: CutLayout) -> None:
    """Check the orders of all replicas, by crew and replica: each by itself, then that together they can run.

    They are run without times: a replica does its next action when all that `core.action.requires` names is there.

    Raises:
        ScheduleError: they are wrong or stop; the message names the action that fails, or where each replica stops.
    """
    crews = layout.crews
    shape, wanted = [len(row) for row in orders], [len(layout.spans[stages[0]]) for stages in crews]
    if shape != wanted:
        raise ScheduleError(f"the order has {shape} replicas by stage, the plan has {wanted}")
    for stages, row in zip(crews, orders, strict=True):
        for replica, order in enumerate(row):
            wrong = next((action for action in order if action.stage not in stages), None)
            if wrong is not None:
                raise ScheduleError(f"{wrong} is in the order of stage {stages[0]}, replica {replica}")
            for stage in stages:
                own = [action for action in order if action.stage == stage]
                try:
                    check_replica_order(own, layout.spans[stage][replica], layout.limits[stage][replica])
                except ScheduleError as error:
                    raise ScheduleError(f"stage {stage}, replica {replica}: {error}") from error
    _replay(orders, layout.num_stages)


def _replay(orders: Sequence[Sequence[Sequence[Action]]], num_stages: int) -> None:
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
