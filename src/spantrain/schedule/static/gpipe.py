"""All forwards, then all full backwards (Huang et al., "GPipe", 2019)."""

from collections.abc import Callable, Sequence

from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import Counts, CutLayout, forward_counts
from spantrain.schedule.orders import Orders, first_over_limit, in_turn, too_small


def _counts(layout: CutLayout) -> Counts:
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
        if first_over_limit(layout, counts) is None:
            return counts
    tight = first_over_limit(layout, counts)
    assert tight is not None
    raise PlanError(too_small(layout, counts, tight))


def _round_end(last_stage: int, boundaries: Sequence[int], *, alone: bool) -> Callable[[int, Span], int]:
    def wanted(stage: int, span: Span) -> int:
        if stage < last_stage or alone:
            return span.hi
        return next(end for end in boundaries if end >= span.hi)

    return wanted


def _orders(layout: CutLayout, split: bool | None) -> Orders:
    return in_turn(layout, _counts(layout), split=bool(split))


SCHEDULES = (
    RegisteredSchedule(
        name="gpipe", description="static: all forwards, then all full backwards", splits_backward=False, orders=_orders
    ),
)
