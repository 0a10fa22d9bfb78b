"""`auto` by counts of alike devices: for many devices, and for what Megatron-like frameworks run.

The search is `planner.strategies.pools`; here its best plans are given devices and simulated, and the simulator ranks
them. Without a restriction they follow the job's order of work, with in-flight limits as memory allows, and
tensor-parallel groups only where they are allowed. `Restriction.MEGATRON` is what Sailor plans for (Strati et al., SOSP
2025, section 3): 1F1B, micro-batches of one size that divide the global batch, as many replicas in every stage, groups
inside hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.request import PlanRequest, Proposal, Restriction
from spantrain.planner.strategies.pools.costs import Goal, PoolPlan
from spantrain.planner.strategies.pools.profile_costs import ProfilePools
from spantrain.planner.strategies.pools.search import PoolSearch, RankedPlan, contenders
from spantrain.planner.strategies.score import Score, Scorer, best_inside, few_of_each, sites_of

_SIMULATED, _ACTIONS, _SHARED = 8, 50_000, 20_000_000
"""Plans that are simulated at most, in all and inside each of the best sites; actions in them, one pipeline of each
sort (a device costs as much as one); and, of plans on several sites, actions times pipelines."""
_PROPOSED = 4
_NEAR, _OF_A_DEPTH = 1.25, 2
"""Plans inside the best site that take at most so many times the best, so many of each number of stages."""
_MAX_DEGREE = 8
_DIVIDED_UP_TO = 256
"""Devices up to which groups that divide tensors are searched for, too, where devices by themselves do."""
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
    """Propose the best plans by counts of alike devices, best first, then those inside the best sites; none if nothing
    of that form fits.

    Raises:
        ProfileError: the profile lacks a timing or a link.
    """
    restricted, scorer = request.restriction is Restriction.MEGATRON, Scorer(request)
    rows = _rows(request, scorer, _MAX_DEGREE if restricted else 1)
    rows.sort(key=lambda row: row[0])
    dividing = None if restricted or not request.dividing else _where_divided(request, rows)
    if dividing is not None:
        worth = request.constraints.tensor_parallel.worth
        divided = _rows(dividing, scorer, _MAX_DEGREE)
        rows += [row for row in divided if not rows or row[0].is_clearly_under(rows[0][0], worth)]
        rows.sort(key=lambda row: row[0])
    found, inside = [one for _, one in rows[:_PROPOSED]], best_inside(rows, lambda one: one.plan)
    if inside:
        # More sites push out all but the best of each; what comes behind may gain more in pipelines of other depths.
        best, most = sites_of(inside[0].plan), Score(rows[0][0].broken, _NEAR * rows[0][0].value)
        there = (one for score, one in rows if score <= most and sites_of(one.plan) == best)
        inside += few_of_each(there, lambda one: len(one.plan.stages), each=_OF_A_DEPTH, most=_SIMULATED)
    return tuple({id(one): one for one in (*found, *inside)}.values())


def _where_divided(request: PlanRequest, rows: Sequence[tuple[Score, Proposal]]) -> PlanRequest | None:
    """Return where groups that divide tensors are searched for: of very many devices, inside the best site."""
    if not rows or len(request.devices) <= _DIVIDED_UP_TO:
        return request
    cluster, limits = request.profile.cluster, request.constraints
    best = next((site for _, one in rows if len(sites_of(one.plan)) == 1 for site in sites_of(one.plan)), None)
    others = sorted({cluster.device_by_name[name].site for name in request.devices} - {best})
    if best is None or any(name in limits.keep for name in others):
        return None
    inside = replace(request, constraints=replace(limits, leave_out=(*limits.leave_out, *others)))
    return inside if len(inside.devices) <= _DIVIDED_UP_TO else None


def _rows(request: PlanRequest, scorer: Scorer, most_degree: int) -> list[tuple[Score, Proposal]]:
    """Return the best plans that fit, with tensor-parallel groups of at most so many devices."""
    restricted = request.restriction is Restriction.MEGATRON
    goal = Goal.of(request.objective, request.constraints, request.job.global_batch)
    rows = list[tuple[Score, Proposal]]()
    for inside in (False, True):
        costs = ProfilePools(request, most_degree=most_degree, inside_hosts=inside)
        if inside and (len(request.devices) > _INSIDE_UP_TO or max(pool.host_size for pool in costs.pools) == 1):
            break
        ranked = PoolSearch(costs, goal, divides=restricted, deep=not restricted).ranked()
        for entry in _to_simulate(ranked, costs):
            plan = costs.plan(entry.plan)
            scored = scorer.score(plan)
            if scored is not None and scored[1].fits:
                reasons = (_reason(entry.plan, len(ranked), restricted=restricted),)
                rows.append((scored[0], Proposal(plan=plan, own_estimate_s=entry.plan.estimate_s, reasons=reasons)))
    return rows


def _to_simulate(ranked: Sequence[RankedPlan], costs: ProfilePools) -> Iterator[RankedPlan]:
    """Yield the best plans as far as their actions go, those on as many sites together; the first in any case.

    Pipelines over several sites wait for each other's messages, so each of their actions costs the more, the more of
    them there are.
    """
    left: dict[int | frozenset[str], int] = {}
    together = _SHARED
    for number, entry in enumerate(contenders(costs, ranked, _SIMULATED)):
        plan = entry.plan
        sites = frozenset(costs.pools[pool].site for pool in plan.devices_by_pool)
        of = sites if len(sites) == 1 else len(sites)
        needed = 3 * len(plan.stages) * plan.micro_batches * len(plan.pipelines()) + sum(plan.devices_by_pool.values())
        shared = needed * plan.width if len(sites) > 1 else 0
        if not number or ((of not in left or needed <= left[of]) and shared <= together):
            left[of] = left.get(of, _ACTIONS) - needed
            together -= shared
            yield entry


def _reason(plan: PoolPlan, count: int, *, restricted: bool) -> str:
    degrees = sorted({member.tp_degree for stage in plan.stages for member, _ in stage.runs})
    groups = "" if degrees == [1] else f", tensor-parallel groups of {' and '.join(map(str, degrees))}"
    form = "Megatron-like plans" if restricted else "plans by counts of alike devices"
    stages = f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    return (
        f"Best of {count} {form} that were reckoned to the micro-batch: {stages} of {plan.width} replicas{groups}, "
        f"{plan.micro_batches} micro-batches of {plan.micro_batch} samples each."
    )
