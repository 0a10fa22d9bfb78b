"""Forwards and I in turn, as 1F1B takes forwards and B; W at fixed places, some micro-batches later.

(Qi et al., "Zero Bubble Pipeline Parallelism", 2024.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from spantrain.core.action import Action, Op
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, each_in_turn, interleave, twice_the_way, warm_up_counts


def defer_weights(order: Sequence[Action], *, lag: int, limit: int) -> tuple[Action, ...]:
    """Move every W of an order behind the I that comes `lag` micro-batches later; earlier where memory is short.

    A forward that would hold more than `limit` samples gets its room from the oldest W. Fixed places, as in the
    original zero-bubble order: what W fills is decided before the step, not when a hole appears.

    >>> from spantrain.core.span import Span
    >>> order = interleave(2, [Span(0, 2), Span(2, 4), Span(4, 6)], [1, 2, 3], split=True)
    >>> " ".join(map(str, defer_weights(order, lag=1, limit=6)))
    '2F[0:2] 2I[0:2] 2F[2:4] 2I[2:4] 2W[0:2] 2F[4:6] 2I[4:6] 2W[2:4] 2W[4:6]'
    >>> " ".join(map(str, defer_weights(order, lag=2, limit=2)[:4]))
    '2F[0:2] 2I[0:2] 2W[0:2] 2F[2:4]'
    """
    moved: list[Action] = []
    waiting = deque(action for action in order if action.op is Op.BACKWARD_WEIGHT)
    behind: deque[Action] = deque()  # those whose I has run
    held = 0
    for action in order:
        while behind and action.op is Op.FORWARD and held + action.span.size > limit:
            held -= behind[0].span.size
            moved.append(behind.popleft())
        if action.op is not Op.BACKWARD_WEIGHT:
            moved.append(action)
        if action.op is Op.FORWARD:
            held += action.span.size
        elif action.op is Op.BACKWARD:
            held -= action.span.size
        elif action.op is Op.BACKWARD_INPUT:
            behind.append(waiting.popleft())
        if len(behind) > lag:
            held -= behind[0].span.size
            moved.append(behind.popleft())
    return (*moved, *behind)


def deferred_orders(warm_up: Callable[[int], int], lag_per_stage: int, layout: CutLayout, split: bool | None) -> Orders:
    """Return the orders with W of a stage that many micro-batches more behind its I than on the stage before.

    So every stage holds as many micro-batches as the first one: P with `zb-h1`, 2 P − 1 with `zb`. Backwards of stage 0
    are whole: W follows I at once there, and nobody waits for I.
    """
    counts = warm_up_counts(layout, warm_up)
    return tuple(
        tuple(
            defer_weights(
                interleave(stage, own, ahead, split=stage > 0 if split is None else split),
                lag=lag_per_stage * stage,
                limit=limit,
            )
            for own, ahead, limit in zip(layout.spans[stage], counts[stage], layout.limits[stage], strict=True)
        )
        for stage in range(layout.num_stages)
    )


SCHEDULES = (
    RegisteredSchedule(
        name="zb",
        description="static: warms up as 1f1b-asteroid; weights apart, at fixed places (the original zero-bubble "
        "order, H2)",
        splits_backward=True,
        orders=partial(deferred_orders, twice_the_way, 2),
        is_improved=True,
    ),
    RegisteredSchedule(
        name="zb-h1",
        description="static: warms up as 1f1b; weights apart, at fixed places, no stage holds more than 1f1b's first "
        "one",
        splits_backward=True,
        orders=partial(deferred_orders, each_in_turn, 1),
        is_improved=True,
    ),
)
