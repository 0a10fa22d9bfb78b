"""Static orders: what each replica does, from first to last, known before the step begins."""

from collections.abc import Callable, Sequence

from spantrain.core.action import Action, Op
from spantrain.core.spans import Span
from spantrain.errors import PlanError
from spantrain.schedule.layout import Counts, Layout, forward_counts, windows
from spantrain.schedule.registry import STATIC_SCHEDULES

__all__ = ["gpipe_counts", "interleave", "one_forward_one_backward_counts", "static_orders"]

Orders = tuple[tuple[tuple[Action, ...], ...], ...]


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


def one_forward_one_backward_counts(layout: Layout) -> Counts:
    """Return the forwards before each backward of 1F1B: K_p = P − p micro-batches warm up stage p.

    Where that would hold more samples than a limit allows, stages from there on warm up less. Stages with other
    micro-batches warm up more where the stages after them need it to start.

    Raises:
        PlanError: a limit is so small that no order can run.
    """
    stages = layout.num_stages
    warm_up = [stages - stage for stage in range(stages)]
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


def static_orders(schedule: str, layout: Layout, *, split: bool = False) -> Orders:
    """Return the order of every replica, by stage and replica.

    Raises:
        PlanError: micro-batches are not in rising order, or a limit is so small that no order can run.
    """
    assert schedule in STATIC_SCHEDULES, schedule
    if not layout.rising:
        raise PlanError(f"schedule {schedule} needs the micro-batches of every stage by rising sample")
    counts = gpipe_counts(layout) if schedule == "gpipe" else one_forward_one_backward_counts(layout)
    return tuple(
        tuple(
            interleave(stage, own, ahead, split=split)
            for own, ahead in zip(layout.spans[stage], counts[stage], strict=True)
        )
        for stage in range(layout.num_stages)
    )
