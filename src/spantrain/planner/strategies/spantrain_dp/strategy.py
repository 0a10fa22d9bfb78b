"""`spantrain-dp`: groups, then search, then the few best in full (SpanTrain, Chinese paper, sections 2.2 and 2.3).

Kept: equations 1-5, the dynamic programme over layers and domains, two-level groups, samples divided by capacity inside
a stage. Added: memory as a hard limit, a bound that leaves hopeless candidates unsolved, cuts moved by a finer
estimate. Quotas are kept by leaving devices out before the search begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.cost.step import StepEstimate
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.tables import Tables
from spantrain.planner.explain import infeasible, reasons
from spantrain.planner.groups import Groups, group_devices
from spantrain.planner.job import JobSpec
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.spantrain_dp.build import build_plan, improve_cuts, with_prediction
from spantrain.planner.strategies.spantrain_dp.search import Candidate, SearchResult, search

_PROPOSED = 12
"""How many are simulated."""
_MOST_DEVICES = 128
_BUILD = 96


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    candidate: Candidate
    plan: Plan
    estimate: StepEstimate


def spantrain_dp(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the dozen that its closed form likes best.

    Raises:
        InfeasiblePlanError: nothing fits into memory; the numbers are in the message.
        ProfileError: the profile lacks a timing or a link.
    """
    devices = request.devices_within_quotas
    if len(devices) > _MOST_DEVICES:
        raise InfeasiblePlanError(f"groups devices by pairs, {_MOST_DEVICES} devices at most, got {len(devices)}")
    return candidates(request.profile, request.job, devices, limit=_PROPOSED)


def candidates(profile: Profile, job: JobSpec, devices: Sequence[str], limit: int = 8) -> tuple[Proposal, ...]:
    """Return up to `limit` different plans that use none but some devices, best estimate first.

    Raises:
        InfeasiblePlanError: nothing fits into memory.
    """
    tables, groups = Tables(profile, job), group_devices(profile, devices=devices)
    found, ranked = _rank(tables, groups, devices, limit)
    plans = (_described(tables, groups, found, entry) for entry in ranked)
    return tuple(
        Proposal(plan=plan, own_estimate_s=entry.estimate.step_s, reasons=plan.reasons)
        for plan, entry in zip(plans, ranked, strict=True)
    )


def _rank(
    tables: Tables, groups: Groups, devices: Sequence[str], limit: int
) -> tuple[SearchResult, tuple[_Ranked, ...]]:
    found = search(tables, groups)
    built: list[_Ranked] = []
    for candidate in _varied(found.solved, max(_BUILD, 3 * limit)):
        made = build_plan(tables, candidate)
        if made is not None:
            built.append(_Ranked(candidate=candidate, plan=made[0], estimate=made[1]))
    if not built:
        raise infeasible(tables, devices)
    built.sort(key=lambda entry: entry.estimate.step_s)
    improved: dict[tuple[Stage, ...], _Ranked] = {}
    for entry in built:
        plan, estimate = improve_cuts(tables, entry.candidate, (entry.plan, entry.estimate))
        improved.setdefault(plan.stages, _Ranked(candidate=entry.candidate, plan=plan, estimate=estimate))
        if len(improved) == limit:
            break
    return found, tuple(sorted(improved.values(), key=lambda entry: entry.estimate.step_s))


def _varied(solved: Sequence[Candidate], limit: int) -> list[Candidate]:
    """Take the best, but of one set of slots at most three micro-batch sizes."""
    taken: list[Candidate] = []
    sizes: dict[tuple[tuple[str, ...], ...], int] = {}
    for candidate in solved:
        if sizes.get(candidate.slots, 0) < 3:
            sizes[candidate.slots] = sizes.get(candidate.slots, 0) + 1
            taken.append(candidate)
        if len(taken) >= limit:
            break
    return taken


def _described(tables: Tables, groups: Groups, found: SearchResult, entry: _Ranked) -> Plan:
    """Return the plan with its reasons and what is predicted of it."""
    texts = reasons(groups, found, entry.candidate, (entry.plan, entry.estimate))
    return with_prediction(tables, replace(entry.plan, reasons=texts), entry.estimate)
