"""Ours: devices, order, cuts, replicas, shares and micro-batches chosen together, guided by bounds and the simulator.

1. Starts: chains of sites and kinds, divided into stages and units by a dynamic programme (`auto_orders`); on few
   devices the plans of `spantrain-dp` too.
2. From the best few, descent along a proven lower bound of the objective (`auto_bound`): a device moved, added, dropped
   or exchanged, stages merged, split or reordered, cuts moved, other micro-batches and shares (`auto_moves`). Under the
   `critical-path` order the simulated time mostly equals the bound, so that this descent is worth far more than its
   price of some microseconds for a plan.
3. Simulation of what could still be the best, by rising bound, corrected by how far simulation was over the bound for
   the same stages; around each new best the search goes on. A plan whose bound is over the best is never simulated.

Memory is a hard limit throughout: in-flight limits are what fits, and a plan that does not fit has no bound. The number
of simulations is limited by the number of actions in them, so that the same request always has the same answer.
"""

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.explain import infeasible
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.auto_blocks import blocks_of, grid_of, site_distances
from spantrain.planner.strategies.auto_cuts import Cutter
from spantrain.planner.strategies.auto_moves import Moves
from spantrain.planner.strategies.auto_orders import chains, divided, evened
from spantrain.planner.strategies.auto_parts import PartCosts
from spantrain.planner.strategies.auto_reasons import reasons_of
from spantrain.planner.strategies.auto_score import Score, Scorer
from spantrain.planner.strategies.auto_search import Searcher, lowest
from spantrain.planner.strategies.auto_shape import Shape, ShapeBuilder, shape_of
from spantrain.planner.strategies.auto_weights import weights_of
from spantrain.planner.strategies.spantrain_dp import candidates
from spantrain.planner.tables import Tables

__all__ = ["auto"]

_STARTS, _STARTS_OF_A_SIZE, _STARTS_OF_MANY = 4, 2, 2
_TIMES_WHERE_SHORT = 3
_NEAR = 1.25
"""The best of a micro-batch size is a start if its bound is at most this much over the least of all."""
_ROUNDS = 12
_ACTIONS, _ACTIONS_BY_DEVICE, _ACTIONS_OF_MANY, _MANY = 10_000, 1_000, 8_000, 32
"""Actions that may be simulated: on up to `_MANY` devices so many and so many for each, on more so many."""
_PROPOSED = 4
_MICRO_BATCHES_OF_MANY = 64
_EVEN = 2
_EXACT_UP_TO = 4


def auto(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans found, best first.

    Raises:
        InfeasiblePlanError: nothing fits into memory.
        ProfileError: the profile lacks a timing or a link.
    """
    search = _searcher(request)
    best = search.best
    if best is None:
        raise infeasible(Tables(request.profile, request.job), request.devices)
    ranked = sorted(search.simulated, key=lambda found: found.score)
    proposals = []
    for found in ranked[:_PROPOSED]:
        known = search.pool.entries.get(found.shape) if found.shape is not None else None
        reasons = reasons_of(request, search, found) if found is best else ()
        proposals.append(Proposal(plan=found.plan, own_estimate_s=None if known is None else known[1], reasons=reasons))
    return tuple(proposals)


def _searcher(request: PlanRequest) -> Searcher:
    """Run the search."""
    profile, job, devices = request.profile, request.job, request.devices
    many, sizes = len(devices) > _MANY, job.micro_batch_sizes()
    if many:
        sizes = tuple(size for size in sizes if job.global_batch <= _MICRO_BATCHES_OF_MANY * size)
    weights = weights_of(profile.cluster, request.objective, job.global_batch)
    costs = PartCosts(request, weights, grid_of(len(profile.graph.units)), exact_sums=len(devices) <= _EXACT_UP_TO)
    blocks = blocks_of(profile, devices, costs)
    moves, cutter = Moves(costs, blocks.blocks, blocks.classes, sizes), Cutter(costs)
    budget = _ACTIONS_OF_MANY if many else _ACTIONS + _ACTIONS_BY_DEVICE * len(devices)
    builder = ShapeBuilder(request, costs, "auto")
    search = Searcher(cutter, moves, builder, Scorer(request), budget)
    sites = [blocks.sites[group[0]] for group in blocks.groups]
    rows = chains(blocks.groups, sites, site_distances(profile, blocks), many_devices=many)
    solved = [search.pool.add(cutter.solved(size, divided(costs, moves, rows, size))) for size in sizes]
    if len(devices) <= _EXACT_UP_TO:
        _take_over(request, search)
    if many:
        even = [search.pool.add(cutter.solved(size, evened(moves, rows, size))) for size in sizes]
        for _, shape in sorted((row for found in even for row in found), key=lambda row: row[0])[:_EVEN]:
            search.simulate(shape)
    for shape in _starts(solved, builder, many=many):
        search.descend(shape, _ROUNDS)
    search.simulate_promising()
    return search


def _starts(solved: list[list[tuple[Score, Shape]]], builder: ShapeBuilder, *, many: bool) -> list[Shape]:
    """Return where to descend from: the best of all, and the best of each micro-batch size if they are near.

    More of them where memory is short: there bounds are loose, and a small change often does not fit.
    """
    rows = sorted((row for found in solved for row in found), key=lambda row: row[0])
    if many or not rows:
        return lowest(rows, _STARTS_OF_MANY)
    most = _NEAR * rows[0][0].value
    times = _TIMES_WHERE_SHORT if builder.memory_is_short(rows[0][1]) else 1
    of_sizes = [row for found in solved for row in found[: times * _STARTS_OF_A_SIZE]]
    near = [shape for score, shape in of_sizes if score.broken > 0 or score.value <= most]
    return list(dict.fromkeys([*lowest(rows, times * _STARTS), *near]))


def _take_over(request: PlanRequest, search: Searcher) -> None:
    """Simulate the best plans of `spantrain-dp`."""
    try:
        found = candidates(request.profile, request.job, request.devices_within_quotas, limit=2)
    except InfeasiblePlanError:
        return
    for proposal in found:
        search.take(proposal.plan, shape_of(proposal.plan))
