"""`auto` by counts of alike devices: for many devices, and for what Megatron-like frameworks run.

The search is `planner.strategies.pools`; here its best plans are given devices and simulated, and the simulator ranks
them. Without a restriction they follow the job's order of work, with in-flight limits as memory allows, and
tensor-parallel groups only where they are allowed. `Restriction.MEGATRON` is what Sailor plans for (Strati et al., SOSP
2025, section 3): 1F1B, micro-batches of one size that divide the global batch, as many replicas in every stage, groups
inside hosts.
"""

from collections.abc import Iterator, Sequence

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.request import PlanRequest, Proposal, Restriction
from spantrain.planner.strategies.pools.costs import Goal, PoolPlan
from spantrain.planner.strategies.pools.profile_costs import ProfilePools
from spantrain.planner.strategies.pools.search import PoolSearch, RankedPlan
from spantrain.planner.strategies.score import Score, Scorer

_SIMULATED, _ACTIONS = 8, 50_000
"""Plans that are simulated at most, and actions in them, one pipeline of each sort; a device costs as much as one."""
_PROPOSED = 4
_MAX_DEGREE = 8
_INSIDE_UP_TO = 64
"""Devices up to which pipelines inside hosts are searched for, too; with more, stages fill hosts anyway."""


def restricted_proposals(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans of the restricted form.

    Raises:
        InfeasiblePlanError: nothing of that form fits into memory.
        ProfileError: the profile lacks a timing or a link.
    """
    found = pool_proposals(request)
    if not found:
        refusal = infeasible(request.profile, request.job, request.devices)
        raise InfeasiblePlanError(f"nothing that --restrict {request.restriction} allows fits; unrestricted: {refusal}")
    return found


def pool_proposals(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans by counts of alike devices, best first; none if nothing of that form fits.

    Raises:
        ProfileError: the profile lacks a timing or a link.
    """
    restricted = request.restriction is Restriction.MEGATRON
    divides_tensors = restricted or request.constraints.tensor_parallel
    goal = Goal.of(request.objective, request.constraints, request.job.global_batch)
    scorer, rows = Scorer(request), list[tuple[Score, Proposal]]()
    for inside in (False, True):
        costs = ProfilePools(request, most_degree=_MAX_DEGREE if divides_tensors else 1, inside_hosts=inside)
        if inside and (len(request.devices) > _INSIDE_UP_TO or max(pool.host_size for pool in costs.pools) == 1):
            break
        ranked = PoolSearch(costs, goal, divides=restricted, deep=not restricted).ranked()
        for entry in _to_simulate(ranked, costs):
            plan = costs.plan(entry.plan)
            scored = scorer.score(plan)
            if scored is not None and scored[1].fits:
                reasons = (_reason(entry.plan, len(ranked), restricted=restricted),)
                rows.append((scored[0], Proposal(plan=plan, own_estimate_s=entry.plan.estimate_s, reasons=reasons)))
    rows.sort(key=lambda row: row[0])
    proposals = [proposal for _, proposal in rows]
    site = request.profile.cluster.device_by_name
    alone = [one for one in proposals if len({site[name].site for name in one.plan.devices}) == 1]
    return (
        *proposals[:_PROPOSED],
        *(one for one in alone[:1] if all(one is not other for other in proposals[:_PROPOSED])),
    )


def _to_simulate(ranked: Sequence[RankedPlan], costs: ProfilePools) -> Iterator[RankedPlan]:
    """Yield the best plans as far as their actions go, the first one and the best inside one site in any case."""
    inside, left = False, _ACTIONS
    for number, entry in enumerate(ranked):
        plan = entry.plan
        pipelines = plan.pipelines()
        alone = len({costs.pools[member.pool].site for members in pipelines for member in members}) == 1
        needed = 3 * len(plan.stages) * plan.micro_batches * len(pipelines) + sum(plan.devices_by_pool.values())
        if not number or (alone and not inside) or (number < _SIMULATED and needed <= left):
            inside, left = inside or alone, left - needed
            yield entry


def _reason(plan: PoolPlan, count: int, *, restricted: bool) -> str:
    degrees = sorted({member.tp_degree for stage in plan.stages for member in stage.members})
    groups = "" if degrees == [1] else f", tensor-parallel groups of {' and '.join(map(str, degrees))}"
    form = "Megatron-like plans" if restricted else "plans by counts of alike devices"
    stages = f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    return (
        f"Best of {count} {form} that were reckoned to the micro-batch: {stages} of {plan.width} replicas{groups}, "
        f"{plan.micro_batches} micro-batches of {plan.micro_batch} samples each."
    )
