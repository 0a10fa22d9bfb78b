"""Cuts between sites sent in fewer bytes, where that is allowed and worth it.

The best plan of a search in which every cut between sites is sent in the fewest bytes that are allowed is taken; then
each cut goes back to the most exact format that costs little by it. Rounding is not exact, so it must earn its place on
every cut that keeps it, and so must each step to fewer bits.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from spantrain.core.plan import Plan, WireFormat
from spantrain.planner.request import Objective, Proposal
from spantrain.planner.strategies.auto.score import Score, Scorer
from spantrain.planner.strategies.auto.search import Found

_WORTH = 1.01
"""A more exact cut must make the plan worse by more than that for the rounded one to stay."""


def fewest_bytes(allowed: Iterable[WireFormat]) -> WireFormat:
    """Return the format that sends the fewest bytes; the native one if nothing else is allowed."""
    order = list(WireFormat)
    return max(allowed, key=order.index, default=WireFormat.NATIVE)


def rounded_proposal(
    scorer: Scorer, native: Found, rounded: Found, objective: Objective, allowed: Iterable[WireFormat]
) -> Proposal | None:
    """Return the best plan with rounded cuts, each of which is worth it; None if the native plan is nearly as good."""
    if not _is_worth(rounded.score, native.score):
        return None
    plan, score, lines = rounded.plan, rounded.score, list[str]()
    forms = [form for form in WireFormat if form is WireFormat.NATIVE or form in set(allowed)]
    for index in range(len(plan.stages) - 1):
        native_value = None
        for form in forms[: forms.index(plan.stages[index].wire_format)]:
            other = _with_cut(plan, index, form)
            scored = scorer.score(other)
            if form is WireFormat.NATIVE and scored is not None:
                native_value = scored[0].value
            if scored is not None and not _is_worth(score, scored[0]):
                plan, score = other, scored[0]
                break
        if native_value is not None and plan.stages[index].wire_format is not WireFormat.NATIVE:
            lines.append(_gain(plan, index, native_value / score.value))
    if not lines or not _is_worth(score, native.score):
        return None
    what = {Objective.THROUGHPUT: "time", Objective.COST: "money", Objective.ENERGY: "energy"}[objective]
    more = 100 * (native.score.value / score.value - 1)
    lines.append(f"The best plan with nothing rounded takes {more:.1f} % more {what}.")
    return Proposal(plan=plan, own_estimate_s=None, reasons=tuple(lines))


def _is_worth(score: Score, native: Score) -> bool:
    return score.broken < native.broken or (score.broken == native.broken and score.value * _WORTH < native.value)


def _with_cut(plan: Plan, index: int, form: WireFormat) -> Plan:
    stages = list(plan.stages)
    stages[index] = replace(stages[index], wire_format=form)
    return replace(plan, stages=tuple(stages))


def _gain(plan: Plan, index: int, ratio: float) -> str:
    lower, upper = list(pairwise(plan.stages))[index]
    table = plan.cluster.device_by_name
    places = [", ".join(dict.fromkeys(table[name].site for name in stage.devices)) for stage in (lower, upper)]
    return (
        f"The cut behind stage {index} ({places[0]} to {places[1]}) is rounded to {lower.wire_format.value}: sent as "
        f"it is, the plan would be {100 * (ratio - 1):.1f} % worse."
    )
