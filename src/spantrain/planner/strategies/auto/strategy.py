"""Ours: devices, order, cuts, replicas, shares and micro-batches chosen together, guided by bounds and the simulator.

1. Starts: chains of sites and kinds, divided into stages and units by a dynamic programme (`orders`); on few
   devices, where memory is short or devices are to be kept, the plans of `spantrain-dp` and `spantrain` too.
2. From the best few, descent along what is expected of a plan: a device moved, added, dropped or exchanged, stages
   merged, split or reordered, cuts moved, other micro-batches and shares (`moves`). Expected are the terms of a
   proven lower bound of the objective (`cuts`), taken of the slowest replicas in the place of the fastest: under
   the `critical-path` order that is mostly near the simulated time, for some microseconds for a plan.
3. Simulation of what could still be the best, most promising first, corrected by how far simulation was over what was
   expected of like plans (in the end by half of that), and the less of these the more were simulated in vain; around
   each new best the search goes on. A plan whose bound is over the best is never simulated.

Where they are allowed by name: tensors divided inside hosts (`tensor`) and, as `spantrain` has it, inside sites;
state divided among the replicas of a stage (`allowed`); cuts between sites rounded (`allowed`).

Of many devices (more than `_MANY`) that are mostly alike only the counts are searched over (`pools`), of others
these too; so it is where only what Megatron-like frameworks run is wanted.

Memory is a hard limit throughout: in-flight limits are what fits, and a plan that does not fit has no bound. The number
of simulations is limited by the number of actions in them, so that the same request always has the same answer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

from spantrain.core.quantities import format_seconds
from spantrain.core.shares import StateSharding
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.request import Objective, PlanRequest, Proposal, Restriction
from spantrain.planner.strategies.auto.allowed import (
    DIVISIONS,
    fewest_bytes,
    is_short,
    offloaded_proposals,
    rounded_proposal,
    rounded_where_cut,
    sharded_proposals,
)
from spantrain.planner.strategies.auto.cuts import Cutter
from spantrain.planner.strategies.auto.moves import Moves, blocks_of, grid_of, site_distances
from spantrain.planner.strategies.auto.orders import chains, divided, evened, separate, undivided
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.pools import pool_proposals, restricted_proposals
from spantrain.planner.strategies.auto.search import Searcher, SimulatedPlan, best_of_parts, lowest
from spantrain.planner.strategies.auto.shape import PlanShape, ShapeBuilder, shape_of
from spantrain.planner.strategies.auto.tensor import divided_proposals
from spantrain.planner.strategies.pools.profile_costs import find_pools
from spantrain.planner.strategies.score import Score, Scorer, looks_of, scored, sites_of, weights_of
from spantrain.planner.strategies.spantrain.strategy import spantrain
from spantrain.planner.strategies.spantrain_dp.strategy import candidates


@dataclass(frozen=True)
class _Reasons:
    """Why sites are in a plan or out of it, by what a search has seen."""

    request: PlanRequest
    search: Searcher
    chosen: SimulatedPlan

    def lines(self) -> tuple[str, ...]:
        """Return a sentence for each site: why it is in or out; then what the search did."""
        bounds, count = [entry.bound for entry in self.search.pool.entries.values()], len(self.search.simulated)
        did = f"{count} plans were simulated."
        if bounds:
            best = self._figure(min(bounds).value)
            did = f"{len(bounds)} plans were bounded, {count} simulated, the best bound is {best}."
        return (*(self._of_site(site.name) for site in self.request.profile.cluster.sites), did)

    def _of_site(self, site: str) -> str:
        here = {device.name for device in self.request.profile.cluster.devices_at(site)}
        allowed = set(self.request.devices)
        used = [name for name in self.chosen.plan.devices if name in here]
        if not allowed & here:
            return f"{site} is out: it was to be left out."
        if not used:
            return f"{site} is out: " + self._compared(lambda devices: not here.isdisjoint(devices), "with it")
        stages = [
            f"{stage.first_unit}-{stage.end_unit - 1}" if len(stage.units) > 1 else str(stage.first_unit)
            for stage in self.chosen.plan.stages
            if set(stage.devices) & set(used)
        ]
        head = f"{site} is in with {len(used)} of {len(here)} devices (units {', '.join(stages)}): "
        if allowed <= here:
            why = "it is the only site."
        elif {site, *here} & {*self.request.constraints.keep}:
            why = "it was to be kept."
        else:
            why = self._compared(here.isdisjoint, "without it")
        if len(used) == len(here & allowed):
            return head + why
        more = self._compared(lambda devices: len(set(devices) & here) > len(used), "with more of it")
        return f"{head}{why} {more[0].upper()}{more[1:]}"

    def _compared(self, fits: Callable[[tuple[str, ...]], bool], what: str) -> str:
        """Say what the best simulated plan of some kind comes to, else what no plan looked at can be under."""
        simulated = min((found.score for found in self.search.simulated if fits(found.plan.devices)), default=None)
        if simulated is not None:
            return f"the best plan {what} that was simulated takes {self._against(simulated)}."
        bounds = ((entry.bound, shape.devices) for shape, entry in self.search.pool.entries.items())
        bound = min((bound for bound, devices in bounds if fits(devices)), default=None)
        if bound is not None:
            return f"of the plans {what} that were looked at none can be under {self._against(bound)}."
        return f"no plan {what} fits into memory."

    def _against(self, other: Score) -> str:
        chosen = self.chosen.score
        percent = 100 * (other.value / chosen.value - 1) if 0 < chosen.value < float("inf") else None
        more = "" if percent is None else f", {abs(percent):.0f} % {'less' if percent < 0 else 'more'}"
        return f"{self._figure(other.value)}{more}{', and breaks a limit' if other.broken > chosen.broken else ''}"

    def _figure(self, value: float) -> str:
        match self.request.objective:
            case Objective.THROUGHPUT:
                return f"{format_seconds(value)} a step"
            case Objective.COST:
                return f"{value:.4g} USD a step"
            case Objective.ENERGY:
                return f"{value:.4g} J a sample"


_STARTS, _STARTS_OF_A_SIZE, _STARTS_OF_MANY = 3, 2, 2
_TIMES_WHERE_SHORT = 3
_NEAR = 1.15
"""The best of a micro-batch size is a start if at most this much over the least of all is expected of it."""
_ROUNDS = 12
_WAYS = (StateSharding.ZERO1, *DIVISIONS)
_WORTH_DIVIDING = 1.05
"""Plans whose replicas divide the optimizer's state are so much better, since a lost device costs more in them."""
_ACTIONS, _ACTIONS_BY_DEVICE, _ACTIONS_OF_MANY, _MANY = 60_000, 6_000, 8_000, 32
"""Actions that may be simulated: on up to `_MANY` devices so many and so many for each, on more so many."""
_PROPOSED, _POLISHED = 8, 8
_NEAR_THE_BEST = 1.15
"""On few devices, how near the best of all the plans of sites are that are searched by themselves."""
_MICRO_BATCHES_OF_MANY = 64
_EVEN = 2
_EXACT_UP_TO = 4
_TAKEN_OVER = 2
_ALIKE, _MAX_POOLS, _FEW, _TOO_MANY = 16, 20, 128, 512
"""Devices of a kind and site, on average, from which on only their counts are searched; how many such pools may be
searched over beside blocks of devices, or how few devices; and devices that are too many for blocks."""


def auto(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans found, best first; of what must be allowed by name, only what is better than all else.

    Raises:
        InfeasiblePlanError: nothing fits into memory.
        ProfileError: the profile lacks a timing or a link.
    """
    if request.restriction is not Restriction.NONE:
        return restricted_proposals(request)
    try:
        found = _on_devices(request)
    except InfeasiblePlanError:
        if not (offloaded := offloaded_proposals(request, Score(math.inf, math.inf))):
            raise
        return offloaded
    few = len(request.devices) <= _MANY
    return (*offloaded_proposals(request, min(score for score, _ in scored(request, found))), *found) if few else found


def _on_devices(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans found whose state is on the devices."""
    by_counts: tuple[Proposal, ...] = ()
    if _may_count(request):
        pools, count = len(list(find_pools(request))), len(request.devices)
        alone = count >= _ALIKE * pools or count > _TOO_MANY
        by_counts = _with_best_sites(request, pool_proposals(request))
        by_counts += tuple(rounded_where_cut(request, by_counts))
        if by_counts and (alone or (pools > _MAX_POOLS and count > _FEW)):
            return by_counts
    try:
        proposals = _by_device(request)
    except InfeasiblePlanError:
        if not by_counts:
            raise
        return by_counts
    if not by_counts:
        return _with_best_sites(request, proposals, _NEAR_THE_BEST)
    return tuple(proposal for _, proposal in scored(request, (*proposals, *by_counts)))


def _with_best_sites(request: PlanRequest, found: tuple[Proposal, ...], near: float = math.inf) -> tuple[Proposal, ...]:
    """Add what is found on the best single sites by themselves, where that may be more: if they are small.

    Only of sites whose best plan takes at most `near` times what the best of all does.
    """
    rows = scored(request, found)
    rows = [row for row in rows if row[0] <= Score(rows[0][0].broken, near * rows[0][0].value)]
    firsts = {looks_of(entry.plan, score.value): sites_of(entry.plan) for score, entry in reversed(rows)}
    sites = dict.fromkeys(site for own in reversed(firsts.values()) if len(own) == 1 for site in own)
    for number, site in enumerate(sites):
        inside = _inside(request, site)
        if inside is not None and (number == 0 or len(inside.devices) <= _MANY):
            with suppress(InfeasiblePlanError):
                found = (*found, *_on_devices(inside))
    return tuple(proposal for _, proposal in scored(request, found))


def _inside(request: PlanRequest, site: str) -> PlanRequest | None:
    """Return what a site by itself is searched by; None where there is none else, or counting is as good there."""
    own, limits = request.profile.cluster.device_by_name, request.constraints
    others = {own[name].site for name in request.devices} - {site}
    if not others or limits.keep or len(request.profile.cluster.devices_at(site)) > _FEW:
        return None
    inside = replace(request, constraints=replace(limits, leave_out=(*limits.leave_out, *sorted(others))))
    by_counts = len(inside.devices) > _MANY and len(inside.devices) >= _ALIKE * len(list(find_pools(inside)))
    return None if by_counts else inside


def _by_device(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the best plans that the search over devices, or blocks of them, finds."""
    of_spantrain = cache(partial(_of_spantrain, request))
    search = _searcher(request, of_spantrain=of_spantrain)
    best, more = search.best, tuple[Proposal, ...]()
    if request.dividing:
        # Those of `spantrain` may divide tensors over the hosts of a site, too, where the network is fast.
        allowed = request.constraints.tensor_parallel.allows_plan
        in_sites = (one for one in of_spantrain() if one.plan.divides_tensors and allowed(one.plan))
        more = (*divided_proposals(request, None if best is None else best.score), *in_sites)
    if request.constraints.sharded_state and request.divides_updates:
        others = [_searcher(request, state_sharding=sharding).best for sharding in DIVISIONS]
        plans = [found.plan for found in others if found is not None]
        more += sharded_proposals(request, search.scorer, None if best is None else best.score, plans, _WAYS)
    elif request.divides_updates and (best is None or is_short(best.plan)):
        more += _with_divided_updates(request, search.scorer, best)
    if best is None and not more:
        raise infeasible(request.profile, request.job, request.devices)
    if best is None:
        return more
    rows: list[tuple[Score, Proposal]] = []
    for found in (*search.unlike(_PROPOSED), *search.firsts()):
        known = search.pool.entries.get(found.shape) if found.shape is not None else None
        reasons = _Reasons(request, search, found).lines() if found is best else ()
        estimate_s = None if known is None else known.expected_s
        rows.append((found.score, Proposal(plan=found.plan, own_estimate_s=estimate_s, reasons=reasons)))
    units = len(request.profile.graph.units)
    if len(request.devices) <= _MANY and units < len(grid_of(units)):
        # Its tables grow with the cube of the units (213 of them: over a minute).
        whole = (proposal for proposal in of_spantrain() if not proposal.plan.divides_tensors)
        rows = sorted((*rows, *scored(request, whole)), key=lambda row: row[0])
    proposals = [*more, *(proposal for _, proposal in rows)]
    if fewest_bytes(request.constraints.wire_formats) is not WireFormat.NATIVE:
        proposals += _rounded(request, search.scorer, best)
    return tuple(proposals)


def _with_divided_updates(request: PlanRequest, scorer: Scorer, best: SimulatedPlan | None) -> tuple[Proposal, ...]:
    """Return the best plan whose replicas divide state, if nothing else fits, or all else is worse."""
    if best is not None:
        return sharded_proposals(request, scorer, best.score, [best.plan], _WAYS, _WORTH_DIVIDING)
    found = _searcher(request, state_sharding=StateSharding.ZERO1).best
    return sharded_proposals(request, scorer, None, [] if found is None else [found.plan], _WAYS)


def _of_spantrain(request: PlanRequest) -> tuple[Proposal, ...]:
    """Return the plans of `spantrain`, none where nothing fits: they compete, whatever the search found."""
    with suppress(InfeasiblePlanError):
        return spantrain(request, partial(request.constraints.tensor_parallel.allows, request.profile.cluster))
    return ()


def _may_count(request: PlanRequest) -> bool:
    """Whether to search over counts of devices: with many of them, and nothing asked for that it does not know."""
    limits, job = request.constraints, request.job
    others = job.micro_batches or job.fewest_samples or limits.keep
    return len(request.devices) > _MANY and not others and request.objective is not Objective.ENERGY


def _rounded(request: PlanRequest, scorer: Scorer, best: SimulatedPlan) -> list[Proposal]:
    """Search again with cuts between sites rounded; return the best such plan if it is worth it."""
    allowed = request.constraints.wire_formats
    search = _searcher(request, fewest_bytes(allowed))
    if search.best is None:
        return []
    rounded = search.best.score, search.best.plan
    found = rounded_proposal(scorer, best.score, rounded, request.objective, allowed)
    if found is None:
        return []
    return [replace(found, reasons=(*found.reasons, *_Reasons(request, search, search.best).lines()))]


def _searcher(
    request: PlanRequest,
    wire_format: WireFormat = WireFormat.NATIVE,
    state_sharding: StateSharding = StateSharding.NONE,
    of_spantrain: Callable[[], Sequence[Proposal]] = tuple,
) -> Searcher:
    """Run the search; `wire_format` is that of cuts between sites, `state_sharding` that of several replicas.

    `of_spantrain`: the plans of `spantrain`, which are asked for where they may be starts.
    """
    profile, job, devices = request.profile, request.job, request.devices
    many, sizes = len(devices) > _MANY, job.micro_batch_sizes()
    if many:
        sizes = tuple(size for size in sizes if job.global_batch <= _MICRO_BATCHES_OF_MANY * size)
    costs = PartCosts(
        request, weights_of(profile.cluster, request.objective, job.global_batch), grid_of(len(profile.graph.units)),
        exact_sums=len(devices) <= _EXACT_UP_TO, wire_format=wire_format, state_sharding=state_sharding,
    )  # fmt: skip
    blocks = blocks_of(profile, devices, costs)
    moves, cutter = Moves(costs, blocks.blocks, blocks.classes, sizes), Cutter(costs)
    budget = _ACTIONS_OF_MANY if many else _ACTIONS + _ACTIONS_BY_DEVICE * len(devices)
    builder = ShapeBuilder(request, costs, "auto")
    search = Searcher(cutter, moves, builder, Scorer(request), budget)
    sites = [blocks.sites[group[0]] for group in blocks.groups]
    rows = chains(blocks.groups, sites, site_distances(profile, blocks), many_devices=many)
    solved = []
    for size in sizes:
        pipelines = [*divided(costs, moves, rows, size), *undivided(moves, rows, size)]
        if not many:
            pipelines += separate(moves, rows, size)
        solved.append(search.pool.add(cutter.solved(size, pipelines)))
    best = min((row for found in solved for row in found[:1]), default=None, key=lambda row: row[0])
    short = not many and best is not None and builder.memory_is_short(best[1])
    hard = short or (not many and bool(request.constraints.keep))
    plain = wire_format is WireFormat.NATIVE and state_sharding is StateSharding.NONE
    if plain and (len(devices) <= _EXACT_UP_TO or hard):
        _take_over(request, search, frozenset(costs.grid), of_spantrain if hard else None)
    if many:
        even = [search.pool.add(cutter.solved(size, evened(moves, rows, size))) for size in sizes]
        for _, shape in sorted((row for found in even for row in found), key=lambda row: row[0])[:_EVEN]:
            search.simulate(shape)
    for shape in _starts(solved, short=short, many=many):
        search.descend(shape, _ROUNDS)
    search.simulate_promising()
    if not many:
        for shape in best_of_parts(profile.cluster, solved):
            search.simulate(search.descend(shape, _ROUNDS))
        search.polish(_POLISHED)
    return search


def _starts(solved: list[list[tuple[Score, PlanShape]]], *, short: bool, many: bool) -> list[PlanShape]:
    """Return where to descend from: the best of all, and the best of each micro-batch size if they are near.

    More of them where memory is short: there bounds are loose, and a small change often does not fit.
    """
    rows = sorted((row for found in solved for row in found), key=lambda row: row[0])
    if many or not rows:
        return lowest(rows, _STARTS_OF_MANY)
    most = _NEAR * rows[0][0].value
    times = _TIMES_WHERE_SHORT if short else 1
    of_sizes = [row for found in solved for row in found[: times * _STARTS_OF_A_SIZE]]
    near = [shape for score, shape in of_sizes if score.broken > 0 or score.value <= most]
    return list(dict.fromkeys([*lowest(rows, times * _STARTS), *near]))


def _take_over(
    request: PlanRequest, search: Searcher, grid: frozenset[int], of_spantrain: Callable[[], Sequence[Proposal]] | None
) -> None:
    """Simulate the best plans of `spantrain-dp`; where those of `spantrain` are given, these too, and go on from there.

    The search goes on only from plans whose cuts lie on its grid. Where that leaves units out, `spantrain` is not
    asked: its tables grow with the cube of the units (213 of them: over a minute), and its cuts would seldom lie there.
    """
    found: list[Proposal] = []
    with suppress(InfeasiblePlanError):
        found += candidates(request.profile, request.job, request.devices_within_quotas, limit=_TAKEN_OVER)
    if of_spantrain is not None and len(grid) > len(request.profile.graph.units):
        found += of_spantrain()[:_TAKEN_OVER]
    for proposal in found:
        shape = shape_of(proposal.plan)
        if shape is not None and not grid.issuperset(shape.begins):
            shape = None
        if not proposal.plan.divides_tensors:
            search.take(proposal.plan, shape)
        if shape is not None and of_spantrain is not None:
            search.descend(shape, _ROUNDS)
