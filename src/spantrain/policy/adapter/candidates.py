"""Which plans are looked at when links have changed: near the one made for calm links, on the same devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spantrain.core.plan import Plan, Stage, WireFormat
from spantrain.core.spans import Span, tapered_sizes
from spantrain.policy.adapter.state import LinkState
from spantrain.policy.limits import check_limits
from spantrain.policy.recut import halved

__all__ = ["Candidate", "by_stage", "formats_and_cuts", "moved_units"]

_SIZES = ((1, 1), (1, 2), (2, 1), (1, 4))
"""Of micro-batches, as parts of the present one."""
_FINER = 4
"""Times as many micro-batches as planned, at most: simulating them takes as much longer."""
_MOVES = (1, -1, 2, -2, 4, -4)
"""Units that go to the stage before, or after."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that might run, and what is other in it."""

    plan: Plan
    what: str


def formats_and_cuts(base: Plan, state: LinkState, allowed: Sequence[WireFormat]) -> Iterator[Candidate]:
    """Yield plans with the allowed wire formats on slow cuts, each with several cuts of the batch, alike on all stages.

    The plan's own format is always allowed. Plans that could stop are left out.
    """
    slow = [cut for cut in range(len(base.stages) - 1) if _is_slow(base, cut, state)]
    formats = [None, *(form for form in allowed if any(base.stages[cut].wire_format is not form for cut in slow))]
    for form in formats:
        cut_plan = base if form is None else _with_format(base, slow, form)
        told = "" if form is None else f"{form} on cut {', '.join(map(str, slow))}"
        if form is not None:
            yield Candidate(plan=cut_plan, what=told)
        for spans, what in _cuts(base):
            plan = _with_spans(cut_plan, [spans] * len(base.stages))
            if plan is not None:
                yield Candidate(plan=plan, what=f"{told}, {what}" if told else what)


def by_stage(plan: Plan) -> Iterator[Candidate]:
    """Yield plans with finer or coarser micro-batches on one stage."""
    for number, stage in enumerate(plan.stages):
        for spans, what in ((halved(stage.micro_batches), "finer"), (_pairs(stage.micro_batches), "coarser")):
            rows = [spans if k == number else other.micro_batches for k, other in enumerate(plan.stages)]
            recut = None if spans == stage.micro_batches else _with_spans(plan, rows)
            if recut is not None:
                yield Candidate(plan=recut, what=f"{what} micro-batches on stage {number}")


def moved_units(plan: Plan) -> Iterator[Candidate]:
    """Yield plans with some units moved over one cut; what was recomputed of them is no longer."""
    for cut in range(len(plan.stages) - 1):
        before, after = plan.stages[cut], plan.stages[cut + 1]
        for move in _MOVES:
            edge = before.end_unit + move
            if not before.first_unit < edge < after.end_unit:
                continue
            stages = (
                *plan.stages[:cut],
                _with_units(before, before.first_unit, edge),
                _with_units(after, edge, after.end_unit),
                *plan.stages[cut + 2 :],
            )
            yield Candidate(plan=replace(plan, stages=stages, hints=None), what=f"cut {cut} behind unit {edge - 1}")


def _is_slow(plan: Plan, cut: int, state: LinkState) -> bool:
    pairs = ((a.devices[0], b.devices[0]) for a in plan.stages[cut].replicas for b in plan.stages[cut + 1].replicas)
    return any(min(state.speed(a, b), state.speed(b, a)) < 1 for a, b in pairs)


def _with_format(plan: Plan, cuts: Sequence[int], form: WireFormat) -> Plan:
    stages = tuple(
        replace(stage, wire_format=form) if number in cuts else stage for number, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, hints=None)


def _with_units(stage: Stage, first: int, end: int) -> Stage:
    recompute = tuple(unit for unit in stage.recompute if first <= unit < end)
    return replace(stage, first_unit=first, end_unit=end, recompute=recompute)


def _with_spans(plan: Plan, rows: Sequence[tuple[Span, ...]]) -> Plan | None:
    """Return the plan with other micro-batches by stage; None if a replica could not hold them."""
    stages = zip(plan.stages, rows, strict=True)
    try:
        recut = replace(plan, hints=None, stages=tuple(replace(stage, micro_batches=spans) for stage, spans in stages))
    except ValueError:
        return None  # a replica's limit is under its largest part
    return None if check_limits(recut) else recut


def _cuts(plan: Plan) -> Iterator[tuple[tuple[Span, ...], str]]:
    """Yield cuts of the batch: equal, and with small ones first, last, or both."""
    total = plan.global_batch
    size = max(span.size for stage in plan.stages for span in stage.micro_batches)
    most = _FINER * max(len(stage.micro_batches) for stage in plan.stages)
    for factor, divisor in _SIZES:
        inner = min(total, max(1, size * factor // divisor))
        if total > most * inner:
            continue
        small = max(1, inner // 4)
        for first, last in ((False, False), (True, True), (False, True)) if inner > 1 else ((False, False),):
            sizes = tapered_sizes(total, inner, small=small, first=first, last=last)
            what = f"micro-batches of {inner}" + (f", small {'at both ends' if first else 'last'}" if last else "")
            yield _spans(sizes), what


def _spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple(Span(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _pairs(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(Span(spans[k].lo, spans[min(k + 1, len(spans) - 1)].hi) for k in range(0, len(spans), 2))
