"""Chooses the micro-batches of a plan together with the order of work: fine or coarse, and small at the ends."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spantrain.core.plan import Plan
from spantrain.core.span import Span, tapered_sizes
from spantrain.errors import ProfileError
from spantrain.schedule.layout import check_limits
from spantrain.sim.bounds.bound import step_bound_s
from spantrain.sim.costs import StepCosts
from spantrain.sim.search.search import SearchEffort, quick_s, simulated_s, with_hints

_TURNS = 2
"""Over all stages, when single ones are cut otherwise."""
_KEPT = 2
"""Cuts of the batch for which orders of work are searched."""
_ORDER_MAY_GAIN = 1.05
"""Cuts of the batch are left out that are slower by more than that before orders of work are searched."""
_WORTH = 1e-3
"""Other micro-batches must gain more than this part of the step."""


def taper(plan: Plan, costs: StepCosts, *, effort: SearchEffort | None = None) -> Plan:
    """Return the plan with the micro-batches, and the hints, that make its step shortest under `critical-path`.

    Candidates are the plan's own micro-batches, finer and coarser equal ones, and equal ones whose first or last is cut
    up into small pieces that fill and drain the pipeline, the same for all stages; then single stages get finer or
    coarser ones as long as that helps. In-flight limits, in samples, are kept, so finer micro-batches go further with
    the same memory; what each action costs by itself speaks against them. Sizes not known to the costs are left out.
    """
    effort = effort or SearchEffort()
    best = with_hints(plan, costs, effort=effort)
    best_s = simulated_s(best, costs)
    share = effort.part(1 / _KEPT)
    own_s = quick_s(plan, costs)
    others = [entry for entry in _quick(plan, costs, effort) if entry[1].stages != plan.stages]
    ranked = sorted((entry for entry in others if entry[0] < _ORDER_MAY_GAIN * own_s), key=lambda entry: entry[0])
    for _, candidate in ranked[:_KEPT]:
        best_s, best = _better(best_s, best, candidate, costs, share)
    quicker = [candidate.stages for seconds, candidate in ranked[:1] if seconds < own_s]
    for start in dict.fromkeys([best.stages, *quicker]):
        unlike = _by_stage(replace(plan, stages=start, hints=None), costs, effort)
        if unlike.stages != start:
            best_s, best = _better(best_s, best, unlike, costs, share)
    return best


def _better(best_s: float, best: Plan, other: Plan, costs: StepCosts, effort: SearchEffort) -> tuple[float, Plan]:
    """Return the better of the best so far and another cut with the order found for it, if any order could be."""
    enough_s = best_s * (1 - _WORTH)
    if step_bound_s(other, costs) >= enough_s:
        return best_s, best
    ordered = with_hints(other, costs, effort=effort)
    other_s = simulated_s(ordered, costs)
    return (other_s, ordered) if other_s < enough_s else (best_s, best)


def _by_stage(plan: Plan, costs: StepCosts, effort: SearchEffort) -> Plan:
    """Return the plan with finer or coarser micro-batches in single stages, where some plain rule is quicker so."""
    best_s, changed, turns = quick_s(plan, costs), True, 0
    while changed and turns < _TURNS:
        changed, turns = False, turns + 1
        for stage in range(len(plan.stages)):
            for recut in (_halves, _pairs):
                spans = recut(plan.stages[stage].micro_batches)
                micro_batches = [spans if k == stage else other.micro_batches for k, other in enumerate(plan.stages)]
                found = _timed(plan, micro_batches, costs, effort)
                if found is not None and found[0] < best_s * (1 - _WORTH):
                    (best_s, plan), changed = found, True
    return plan


def _halves(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return each span cut in the middle."""
    middles = [span.lo + span.size // 2 for span in spans]
    return tuple(
        part
        for span, middle in zip(spans, middles, strict=True)
        for part in ((Span(span.lo, middle), Span(middle, span.hi)) if span.size > 1 else (span,))
    )


def _pairs(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return each two spans as one."""
    return tuple(Span(spans[k].lo, spans[min(k + 1, len(spans) - 1)].hi) for k in range(0, len(spans), 2))


def _quick(plan: Plan, costs: StepCosts, effort: SearchEffort) -> Iterator[tuple[float, Plan]]:
    """Yield other cuts of the batch that can run, each with the seconds of the best of some plain rules."""
    for spans in dict.fromkeys(_cuts(plan)):
        found = _timed(plan, [spans] * len(plan.stages), costs, effort)
        if found is not None:
            yield found


def _timed(
    plan: Plan, micro_batches: Sequence[tuple[Span, ...]], costs: StepCosts, effort: SearchEffort
) -> tuple[float, Plan] | None:
    """Return seconds and plan with other micro-batches, by stage; None if it cannot run, or is too large to search."""
    actions = 3 * sum(len(stage.replicas) * len(spans) for stage, spans in zip(plan.stages, micro_batches, strict=True))
    candidate = _recut(plan, micro_batches) if effort.runs(actions) else None
    try:
        return None if candidate is None else (quick_s(candidate, costs), candidate)
    except ProfileError:
        return None  # a size was not measured


def recuts(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with other cuts of the batch, the same on all stages: finer and coarser ones that can run."""
    for spans in dict.fromkeys(_cuts(plan)):
        candidate = _recut(plan, [spans] * len(plan.stages))
        if candidate is not None and candidate.stages != plan.stages:
            yield candidate


def _recut(plan: Plan, micro_batches: Sequence[tuple[Span, ...]]) -> Plan | None:
    """Return the plan with other micro-batches, by stage; None if it cannot run."""
    stages = zip(plan.stages, micro_batches, strict=True)
    try:
        candidate = replace(
            plan, hints=None, stages=tuple(replace(stage, micro_batches=spans) for stage, spans in stages)
        )
    except ValueError:
        return None  # a replica's limit is under its largest part
    return None if check_limits(candidate) else candidate


def _cuts(plan: Plan) -> Iterator[tuple[Span, ...]]:
    size = max(span.size for span in plan.stages[0].micro_batches)
    total = plan.global_batch
    for denominator, factor in ((1, 1), (1, 2), (2, 1), (4, 1), (8, 1)):
        inner = size * factor // denominator
        small = max(1, inner // 4)
        for first, last in ((False, False), (True, True), (True, False)) if inner > 1 else ((False, False),):
            yield _spans(tapered_sizes(total, max(1, inner), small=small, first=first, last=last))


def _spans(sizes: list[int]) -> tuple[Span, ...]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple(Span(end - size, end) for end, size in zip(ends, sizes, strict=True))
