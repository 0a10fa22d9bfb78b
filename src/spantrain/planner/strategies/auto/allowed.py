"""Plans whose stages divide state among their replicas (ZeRO), where that is allowed.

Two more searches, in each of which every stage with several replicas divides its state in one way. In the best plan of
each, then every stage takes the way that suits it, whole state included. Beside them stand the plans of `zero2` and
`fsdp`, so that the answer is none worse. It pays where memory is short; and where sums of gradients are long: here they
go on beside the actions, and only the last micro-batch's is waited for.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from spantrain.core.plan import Plan, Replica, StateSharding
from spantrain.cost.memory import Division, MemoryCost
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.auto.score import Score, Scorer
from spantrain.planner.strategies.baselines import data_parallel
from spantrain.schedule.registry import splits_backward

DIVISIONS = (StateSharding.ZERO2, StateSharding.ZERO3)
_PARTS = {
    StateSharding.ZERO2: "gradients and optimizer state",
    StateSharding.ZERO3: "parameters, gradients and optimizer state",
}


def sharded_proposals(
    request: PlanRequest, scorer: Scorer, whole: Score | None, found: Iterable[Plan]
) -> tuple[Proposal, ...]:
    """Return the best plan with divided state if it is better than the best with whole state.

    `found` are plans that divide state, from which it goes on.
    """
    search = _Ways(request, scorer)
    rows = [row for plan in found if (row := search.improved(plan)) is not None]
    for sharding in DIVISIONS:
        with suppress(InfeasiblePlanError):
            rows += [row for entry in data_parallel(request, sharding) if (row := search.scored(entry.plan))]
    rows = [row for row in rows if _divides(row[1]) and (whole is None or row[0] < whole)]
    if not rows:
        return ()
    score, plan = min(rows, key=lambda row: row[0])
    reasons = [
        f"Stage {index}: its replicas divide {_PARTS[stage.state_sharding]} ({stage.state_sharding.value})."
        for index, stage in enumerate(plan.stages)
        if stage.state_sharding is not StateSharding.NONE
    ]
    if whole is not None and whole.broken == score.broken:
        reasons.append(f"With whole state the best plan is {100 * (whole.value / score.value - 1):.1f} % worse.")
    reasons.append("Training does not divide state yet.")
    return (Proposal(plan=replace(plan, strategy="auto"), own_estimate_s=None, reasons=tuple(reasons)),)


class _Ways:
    """Tries the ways in which each stage of a plan may have its state."""

    def __init__(self, request: PlanRequest, scorer: Scorer) -> None:
        self._memory = MemoryCost(request.profile, request.job.optimizer, request.job.dtype)
        self._scorer = scorer

    def scored(self, plan: Plan) -> tuple[Score, Plan] | None:
        """Return a plan with its score; None if it cannot run."""
        found = self._scorer.score(plan)
        return None if found is None else (found[0], plan)

    def improved(self, plan: Plan) -> tuple[Score, Plan] | None:
        """Return a plan with the best way for each stage, stage by stage."""
        best = self.scored(plan)
        for index, stage in enumerate(plan.stages):
            for sharding in StateSharding if len(stage.replicas) > 1 else ():
                other = None if best is None else self._changed(best[1], index, sharding)
                row = None if other is None else self.scored(other)
                if row is not None and best is not None and row[0] < best[0]:
                    best = row
        return best

    def _changed(self, plan: Plan, index: int, sharding: StateSharding) -> Plan | None:
        """Return a plan with the state of one stage divided in another way; None if it is so or does not fit."""
        stage = plan.stages[index]
        if stage.state_sharding is sharding:
            return None
        replicas: list[Replica] = []
        division = Division(
            state_sharding=sharding, replicas=len(stage.replicas), splits=splits_backward(plan.schedule)
        )
        for number, replica in enumerate(stage.replicas):
            sizes = [span.size for span in stage.replica_spans(number)]
            limit = self._memory.in_flight_limit_for(
                stage.units, replica.devices[0], sum(sizes), max(sizes), division=division
            )
            if limit < max(sizes):
                return None
            replicas.append(replace(replica, in_flight_limit=limit))
        other = replace(stage, replicas=tuple(replicas), state_sharding=sharding)
        return replace(plan, stages=(*plan.stages[:index], other, *plan.stages[index + 1 :]))


def _divides(plan: Plan) -> bool:
    return any(stage.state_sharding is not StateSharding.NONE for stage in plan.stages)
