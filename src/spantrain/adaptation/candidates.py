"""Which plans are looked at when links have changed: near the one made for calm links, on the same devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spantrain.adaptation.network_state import LinkState
from spantrain.core.plan import Plan, Stage, WireFormat

_MOVES = (1, -1, 2, -2, 4, -4)
"""Units that go to the stage before, or after."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that might run, and what is other in it."""

    plan: Plan
    what: str


def with_formats(base: Plan, state: LinkState, allowed: Sequence[WireFormat]) -> Iterator[Candidate]:
    """Yield the plan with each of the allowed wire formats on its slow cuts, where it has another there."""
    slow = [cut for cut in range(len(base.stages) - 1) if _is_slow(base, cut, state)]
    for form in allowed:
        if any(base.stages[cut].wire_format is not form for cut in slow):
            yield Candidate(plan=_with_format(base, slow, form), what=f"{form} on cut {', '.join(map(str, slow))}")


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
