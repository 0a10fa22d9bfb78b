"""Plans with what must earn its place: state divided (ZeRO) or in a host's memory, and cuts between sites rounded.

For divided state there are more searches, in each of which every stage with several replicas divides its state in
one way. In the best plan of each, then every stage takes the way that suits it, whole state included. Beside them stand
the plans of `zero2` and `fsdp`, so that the answer is none worse. It pays where memory is short; and where sums of
gradients are long: here they go on beside the actions, and only the last micro-batch's is waited for. Replicas that
divide gradients do each action together, in an order that is fixed before (`schedule.joint`).

For rounded cuts, the best plan of a search in which every cut between sites is sent in the fewest bytes that are
allowed is taken; then each cut goes back to the most exact format that costs little by it. Rounding is not exact, so it
must earn its place on every cut that keeps it, and so must each step to fewer bits.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.cost.memory import MemoryCost
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.assembly.assemble import with_limits
from spantrain.planner.request import Objective, PlanRequest, Proposal
from spantrain.planner.strategies.baselines import data_parallel, offload
from spantrain.planner.strategies.score import Score, Scorer
from spantrain.schedule.joint import has_fixed_order, joint_refusal
from spantrain.schedule.registry import splits_backward

DIVISIONS = (StateSharding.ZERO2, StateSharding.ZERO3)
_FIXED_ORDER = "1f1b"
_WORTH_OFFLOADING, _HOPELESS = 1.05, 1.15
"""Such plans are so much better, since what goes to and from a host is reckoned, not measured; a device of which the
largest micro-batches make plans so much worse is not looked at further."""


def sharded_proposals(
    request: PlanRequest,
    scorer: Scorer,
    whole: Score | None,
    found: Iterable[Plan],
    ways: Sequence[StateSharding],
    worth: float = 1.0,
) -> tuple[Proposal, ...]:
    """Return the best plan with divided state if it is better than the best with whole state.

    Args:
        request: what is to be planned.
        scorer: of its plans.
        whole: of the best plan with whole state; None: there is none.
        found: plans from which it goes on.
        ways: to divide state.
        worth: how many times better it has to be.
    """
    search = _Ways(request, scorer, (StateSharding.NONE, *ways))
    rows = [row for plan in found if (row := search.improved(plan)) is not None]
    for sharding in ways:
        with suppress(InfeasiblePlanError):
            rows += [row for entry in data_parallel(request, sharding) if (row := search.scored(entry.plan))]
    rows = [row for row in rows if any(stage.state_sharding is not StateSharding.NONE for stage in row[1].stages)]
    rows = [row for row in rows if (whole is None or row[0] < whole) and not joint_refusal(row[1])]
    if whole is not None:
        rows = [row for row in rows if row[0].broken < whole.broken or row[0].value * worth <= whole.value]
    if not rows:
        return ()
    score, plan = min(rows, key=lambda row: row[0])
    reasons = [
        f"Stage {index}: its replicas divide {stage.state_sharding.divided} ({stage.state_sharding.value})."
        for index, stage in enumerate(plan.stages)
        if stage.state_sharding is not StateSharding.NONE
    ]
    if whole is not None and whole.broken == score.broken:
        reasons.append(f"With whole state the best plan is {100 * (whole.value / score.value - 1):.1f} % worse.")
    reasons.append("A device that is lost there takes its part of that state along: all go back to a checkpoint.")
    return (Proposal(plan=replace(plan, strategy="auto"), own_estimate_s=None, reasons=tuple(reasons)),)


def offloaded_proposals(request: PlanRequest, best: Score) -> tuple[Proposal, ...]:
    """Return plans with state in a host's memory, best first, where they are clearly better than the best without."""
    found, hopeless, scorer = list[tuple[Score, Proposal]](), set[str](), Scorer(request)
    with suppress(InfeasiblePlanError):
        # The largest micro-batches, which mostly take least, show whether a device is worth more than a look.
        for proposal in reversed(offload(request, known=True)):
            (device,) = proposal.plan.devices
            row = None if device in hopeless else scorer.score(proposal.plan)
            if row is None:
                continue
            if row[0].is_clearly_under(best, _WORTH_OFFLOADING):
                fits = best.broken <= row[0].broken
                other = f"the best is {100 * (best.value / row[0].value - 1):.1f} % worse" if fits else "none fits"
                reason = f"{device} has its state in its host's memory (by data sheets); of plans without that {other}."
                found.append((row[0], replace(proposal, reasons=(reason,))))
            elif row[0].value > _HOPELESS * best.value and not proposal.plan.stages[0].recompute:
                hopeless.add(device)
    return tuple(proposal for _, proposal in sorted(found, key=lambda row: row[0]))


class _Ways:
    """Tries the ways in which each stage of a plan may have its state."""

    def __init__(self, request: PlanRequest, scorer: Scorer, ways: Sequence[StateSharding]) -> None:
        self._memory = MemoryCost(request.profile, request.job.optimizer, request.job.dtype)
        self._scorer, self._ways = scorer, ways

    def scored(self, plan: Plan) -> tuple[Score, Plan] | None:
        """Return a plan with its score; None if it cannot run. One that divides gradients has a fixed order."""
        if any(stage.divides_gradients for stage in plan.stages) and not has_fixed_order(plan.schedule):
            plan = replace(plan, schedule=_FIXED_ORDER, hints=None)
        found = self._scorer.score(plan)
        return None if found is None else (found[0], plan)

    def improved(self, plan: Plan) -> tuple[Score, Plan] | None:
        """Return a plan with the best way for each stage, stage by stage."""
        best = self.scored(plan)
        for index, stage in enumerate(plan.stages):
            for sharding in self._ways if len(stage.replicas) > 1 else ():
                other = None if best is None else self._changed(best[1], index, sharding)
                row = None if other is None else self.scored(other)
                if row is not None and best is not None and row[0] < best[0]:
                    best = row
        return best

    def _changed(self, plan: Plan, index: int, sharding: StateSharding) -> Plan | None:
        """Return a plan with the state of one stage divided in another way; None if it is so or does not fit."""
        stage = plan.stages[index]
        if stage.state_sharding is sharding or (sharding is StateSharding.ZERO1 and stage.divides_tensors):
            return None
        other = with_limits(replace(stage, state_sharding=sharding), self._memory, splits_backward(plan.schedule))
        if other is None:
            return None
        return replace(plan, stages=(*plan.stages[:index], other, *plan.stages[index + 1 :]))


def fewest_bytes(allowed: Iterable[WireFormat]) -> WireFormat:
    """Return the format that sends the fewest bytes; the native one if nothing else is allowed."""
    order = list(WireFormat)
    return max(allowed, key=order.index, default=WireFormat.NATIVE)


def rounded_between_sites(plan: Plan, form: WireFormat) -> Plan:
    """Return a plan that sends what leaves a site in a wire format."""
    place = plan.cluster.device_by_name
    for index, (lower, upper) in enumerate(pairwise(plan.stages)):
        if len({place[name].site for name in (*lower.devices, *upper.devices)}) > 1:
            plan = _with_cut(plan, index, form)
    return plan


def rounded_where_cut(request: PlanRequest, found: Sequence[Proposal]) -> list[Proposal]:
    """Return the best of some plans with the cuts between sites rounded, if that is allowed and worth it."""
    allowed, scorer = request.constraints.wire_formats, Scorer(request)
    form = fewest_bytes(allowed)
    if form is WireFormat.NATIVE or not found:
        return []
    native, rounded = list[tuple[Score, Plan]](), list[tuple[Score, Plan]]()
    for proposal in found:
        for rows, one in ((native, proposal.plan), (rounded, rounded_between_sites(proposal.plan, form))):
            if (scored := scorer.score(one)) is not None:
                rows.append((scored[0], one))
    if not rounded or not native:
        return []
    (least, _), best = (min(rows, key=lambda row: row[0]) for rows in (native, rounded))
    chosen = rounded_proposal(scorer, least, best, request.objective, allowed)
    return [] if chosen is None else [chosen]


def rounded_proposal(
    scorer: Scorer, native: Score, rounded: tuple[Score, Plan], objective: Objective, allowed: Iterable[WireFormat]
) -> Proposal | None:
    """Return the best plan with rounded cuts, each of which is worth it; None if the native plan is nearly as good."""
    score, plan = rounded
    if not score.is_clearly_under(native):
        return None
    lines = list[str]()
    forms = [form for form in WireFormat if form is WireFormat.NATIVE or form in set(allowed)]
    for index in range(len(plan.stages) - 1):
        native_value = None
        for form in forms[: forms.index(plan.stages[index].wire_format)]:
            other = _with_cut(plan, index, form)
            scored = scorer.score(other)
            if form is WireFormat.NATIVE and scored is not None:
                native_value = scored[0].value
            if scored is not None and not score.is_clearly_under(scored[0]):
                plan, score = other, scored[0]
                break
        if native_value is not None and plan.stages[index].wire_format is not WireFormat.NATIVE:
            lines.append(_gain(plan, index, native_value / score.value))
    if not lines or not score.is_clearly_under(native):
        return None
    what = {Objective.THROUGHPUT: "time", Objective.COST: "money", Objective.ENERGY: "energy"}[objective]
    more = 100 * (native.value / score.value - 1)
    lines.append(f"The best plan with nothing rounded takes {more:.1f} % more {what}.")
    return Proposal(plan=plan, own_estimate_s=None, reasons=tuple(lines))


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


def is_short(plan: Plan) -> bool:
    """Whether memory keeps some device of a plan from holding all its samples at once."""
    return any(
        one.in_flight_limit < stage.samples_of(k) for stage in plan.stages for k, one in enumerate(stage.replicas)
    )
