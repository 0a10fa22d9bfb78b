"""In-flight limits that would stop the pipeline, found before it runs.

A replica goes back on a span when the next stage has gone back on all micro-batches that share samples with it; those
may reach further, and need further forwards of the stages before them, and so on down to the last stage. Policies take
the oldest samples first and keep room for older forwards, so a pipeline never stops as long as every replica may hold,
from any own span on, what these micro-batches reach: `minimum_in_flight`.
"""

from spantrain.core.plan import Plan
from spantrain.schedule.layout import Layout, forward_counts, windows


def minimum_in_flight(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and replica, the samples that it must be able to hold; own micro-batches by rising sample.

    With the same micro-batches everywhere this is the largest own one:

    >>> from spantrain.core.span import equal_spans
    >>> def layout(*sizes):
    ...     cuts = tuple(equal_spans(16, size) for size in sizes)
    ...     return Layout(micro_batches=cuts, spans=tuple((cut,) for cut in cuts), limits=((16,),) * len(cuts))
    >>> minimum_in_flight(layout(4, 4)), minimum_in_flight(layout(2, 8, 4))
    (((4,), (4,)), ((8,), (8,), (4,)))
    """
    return windows(layout, forward_counts(layout, lambda _stage, span: span.hi))


def check_limits(plan: Plan) -> list[str]:
    """Return what would stop the pipeline; nothing if it can run."""
    layout = Layout.of(plan)
    if not layout.rising:
        wrong = [str(stage) for stage, spans in enumerate(layout.micro_batches) if list(spans) != sorted(spans)]
        return [f"stage {', '.join(wrong)}: micro-batches must be in order of rising sample"]
    return [
        f"stage {stage}, replica {plan.stages[stage].replicas[replica].devices[0]}: in-flight limit "
        f"{layout.limits[stage][replica]} samples, but the micro-batches of the other stages need it to hold {needed}; "
        "allow it more, or make the coarser micro-batches smaller"
        for stage, row in enumerate(minimum_in_flight(layout))
        for replica, needed in enumerate(row)
        if layout.limits[stage][replica] < needed
    ]
