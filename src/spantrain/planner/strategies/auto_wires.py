"""Cuts between sites sent in fewer bytes, where that is allowed and worth it.

The best plan of a search in which every cut between sites is rounded is taken; then each cut goes back to its native
format that costs little by it. Rounding is not exact, so it must earn its place on every cut that keeps it.
"""

from dataclasses import replace
from itertools import pairwise

from spantrain.core.plan import Plan, WireFormat
from spantrain.planner.request import Objective, Proposal
from spantrain.planner.strategies.auto_score import Score, Scorer
from spantrain.planner.strategies.auto_search import Found

__all__ = ["rounded_proposal"]

_WORTH = 1.01
"""A native cut must make the plan worse by more than that for the rounded one to stay."""


def rounded_proposal(scorer: Scorer, native: Found, rounded: Found, objective: Objective) -> Proposal | None:
    """Return the best plan with rounded cuts, each of which is worth it; None if the native plan is nearly as good."""
    if not _is_worth(rounded.score, native.score):
        return None
    plan, score, lines = rounded.plan, rounded.score, list[str]()
    for index in range(len(plan.stages) - 1):
        if plan.stages[index].wire_format is WireFormat.NATIVE:
            continue
        other = _with_native_cut(plan, index)
        scored = scorer.score(other)
        if scored is not None and not _is_worth(score, scored[0]):
            plan, score = other, scored[0]
        elif scored is not None:
            lines.append(_gain(plan, index, scored[0].value / score.value))
    if not lines or not _is_worth(score, native.score):
        return None
    what = {Objective.THROUGHPUT: "time", Objective.COST: "money", Objective.ENERGY: "energy"}[objective]
    more = 100 * (native.score.value / score.value - 1)
    lines.append(f"The best plan with nothing rounded takes {more:.1f} % more {what}.")
    return Proposal(plan=plan, own_estimate_s=None, reasons=tuple(lines))


def _is_worth(score: Score, native: Score) -> bool:
    return score.broken < native.broken or (score.broken == native.broken and score.value * _WORTH < native.value)


def _with_native_cut(plan: Plan, index: int) -> Plan:
    stages = list(plan.stages)
    stages[index] = replace(stages[index], wire_format=WireFormat.NATIVE)
    return replace(plan, stages=tuple(stages))


def _gain(plan: Plan, index: int, ratio: float) -> str:
    lower, upper = list(pairwise(plan.stages))[index]
    table = plan.cluster.device_by_name
    places = [", ".join(dict.fromkeys(table[name].site for name in stage.devices)) for stage in (lower, upper)]
    return (
        f"The cut behind stage {index} ({places[0]} to {places[1]}) is rounded to {lower.wire_format.value}: sent as "
        f"it is, the plan would be {100 * (ratio - 1):.1f} % worse."
    )
