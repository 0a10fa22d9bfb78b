"""Static orders: what each replica does, from first to last, known before the step begins."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from spantrain.core.action import Action, Op
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.schedule.layout import Counts, Layout, forward_counts, windows
from spantrain.schedule.registry import STATIC_SCHEDULES

Orders = tuple[tuple[tuple[Action, ...], ...], ...]
"""By stage and replica."""


def _each_in_turn(left: int) -> int:
    """K_p = P − p: with no time between stages, the first gradient comes just then."""
    return left


def _twice_the_way(left: int) -> int:
    """K_p = 2 (P − p) − 1: there and back. Asteroid, section 3.2; the warm-up of the zero-bubble order as well."""
    return 2 * left - 1


_WARM_UP: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {"1f1b": _each_in_turn, "1f1b-asteroid": _twice_the_way, "zb-h1": _each_in_turn, "zb": _twice_the_way}
)
"""Micro-batches that a stage forwards before its first backward, by the number of stages from it to the last."""

_WEIGHT_LAG_PER_STAGE: Mapping[str, int] = MappingProxyType({"zb-h1": 1, "zb": 2})
"""By how many micro-batches more than the stage before a stage's W is behind its I.

So every stage holds as many micro-batches as the first one: P with `zb-h1`, 2 P − 1 with `zb`.
"""


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


def defer_weights(order: Sequence[Action], *, lag: int, limit: int) -> tuple[Action, ...]:
    """Move every W of an order behind the I that comes `lag` micro-batches later; earlier where memory is short.

    A forward that would hold more than `limit` samples gets its room from the oldest W. Fixed places, as in the
    original zero-bubble order: what W fills is decided before the step, not when a hole appears.

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


def warm_up_counts(layout: Layout, warm_up: Sequence[int]) -> Counts:
    """Return the forwards before each backward of an order that, once warm, takes one of each in turn.

    `warm_up` has the micro-batches that a stage forwards before its first backward. Where that would hold more samples
    than a limit allows, stages from there on warm up less. Stages with other micro-batches warm up more where the
    stages after them need it to start.

    Raises:
        PlanError: a limit is so small that no order can run.
    """
    warm_up = list(warm_up)
    while True:
        counts = forward_counts(layout, _micro_batches_ahead(layout, warm_up))
        tight = _first_over_limit(layout, counts)
        if tight is None:
            return counts
        largest = max(warm_up[tight:])
        if largest == 1:
            raise PlanError(_too_small(layout, counts, tight))
        warm_up[tight:] = [min(count, largest - 1) for count in warm_up[tight:]]


def _micro_batches_ahead(layout: Layout, warm_up: Sequence[int]) -> Callable[[int, Span], int]:
    ordered = [sorted(spans) for spans in layout.micro_batches]

    def wanted(stage: int, span: Span) -> int:
        last = layout.micro_batch_index(stage, span) + warm_up[stage] - 1
        # K_p = 1 means: only this replica's own part must be there, not the whole micro-batch of the stage.
        return span.hi if warm_up[stage] == 1 else ordered[stage][min(last, len(ordered[stage]) - 1)].hi

    return wanted


def gpipe_counts(layout: Layout) -> Counts:
    """Return the forwards before each backward of GPipe: all of them, or all of a round where memory is short.

    Rounds are as few as the in-flight limits allow; each holds whole micro-batches of the last stage. Backwards run
    in the order of the forwards: every stage has all its activations by then, so that either direction ends at the
    same time, and with rising order the next round's forwards find the oldest samples released first.

    Raises:
        PlanError: a limit is so small that no order can run.
    """
    ends = [span.hi for span in sorted(layout.micro_batches[-1])]
    counts: Counts = ()
    for per_round in range(len(ends), 0, -1):
        boundaries = sorted({ends[min(k + per_round, len(ends)) - 1] for k in range(0, len(ends), per_round)})
        counts = forward_counts(layout, _round_end(layout.num_stages - 1, boundaries, alone=per_round == 1))
        if _first_over_limit(layout, counts) is None:
            return counts
    tight = _first_over_limit(layout, counts)
    assert tight is not None
    raise PlanError(_too_small(layout, counts, tight))


def _round_end(last_stage: int, boundaries: Sequence[int], *, alone: bool) -> Callable[[int, Span], int]:
    def wanted(stage: int, span: Span) -> int:
        if stage < last_stage or alone:
            return span.hi
        return next(end for end in boundaries if end >= span.hi)

    return wanted


def _first_over_limit(layout: Layout, counts: Counts) -> int | None:
    """Return the first stage that would hold more samples than it may."""
    for stage, held in enumerate(windows(layout, counts)):
        if any(size > limit for size, limit in zip(held, layout.limits[stage], strict=True)):
            return stage
    return None


def _too_small(layout: Layout, counts: Counts, stage: int) -> str:
    needed = windows(layout, counts)[stage]
    return (
        f"stage {stage}: in-flight limits {list(layout.limits[stage])} samples are too small, the micro-batches "
        f"need {list(needed)}; allow more samples or make the micro-batches of the other stages smaller"
    )


def static_orders(schedule: str, layout: Layout, *, split: bool | None = None) -> Orders:
    """Return the order of every replica, by stage and replica.

    `split` True: all backwards as I and W; False: none; None: as the schedule has it. That is whole backwards, but for
    `zb-h1` and `zb` only on stage 0, where W follows I at once and nobody waits for I.

    Raises:
        PlanError: micro-batches are not in rising order, or a limit is so small that no order can run.
    """
    assert schedule in STATIC_SCHEDULES, schedule
    if not layout.rising:
        raise PlanError(f"schedule {schedule} needs the micro-batches of every stage by rising sample")
    warm_up = _WARM_UP.get(schedule)
    if warm_up is None:
        counts = gpipe_counts(layout)
    else:
        counts = warm_up_counts(layout, [warm_up(left) for left in range(layout.num_stages, 0, -1)])
    return tuple(
        tuple(
            _order(schedule, stage, own, ahead, limit, split=split)
            for own, ahead, limit in zip(layout.spans[stage], counts[stage], layout.limits[stage], strict=True)
        )
        for stage in range(layout.num_stages)
    )


def _order(
    schedule: str, stage: int, spans: Sequence[Span], counts: Sequence[int], limit: int, *, split: bool | None
) -> tuple[Action, ...]:
    lag = _WEIGHT_LAG_PER_STAGE.get(schedule, 0) * stage
    apart = lag > 0 if split is None else split
    return defer_weights(interleave(stage, spans, counts, split=apart), lag=lag, limit=limit)
