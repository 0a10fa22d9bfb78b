"""Machines to rent: single ones first, then more of a kind, then two places over their egress; each is planned for.

What a choice takes and costs at least is known from data sheets alone (`candidates.LeastCosts`). Choices are gone
through by how near to the frontier of these bounds they are; what a planned one beats in both time and money is left
out. The number of plans is bounded by the devices in them, not by the clock: the same question has the same answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace

from spantrain.app.planning.protection import with_keepers
from spantrain.app.profiling.describe import described_profile
from spantrain.app.renting.candidates import Candidate, LeastCosts, cluster_text, paired, single_offers
from spantrain.app.renting.choice import RentGoal, RentOutcome, RentRow, frontier, layers
from spantrain.config.cluster_file import parse_cluster
from spantrain.config.files.problems import did_you_mean
from spantrain.config.prices import PriceFile
from spantrain.core.cluster import Cluster
from spantrain.core.money.prices import Market, Offer
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.cost.analytic import analytic_profile
from spantrain.cost.memory import MemoryCost
from spantrain.cost.money import Prices
from spantrain.cost.moving import moved
from spantrain.errors import InfeasiblePlanError, PlanError, ProfileError
from spantrain.planner.assembly.recompute import proposals_of
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator, link_loads
from spantrain.planner.engine.outcome import PlanOptions, PlanOutcome
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import light_plan
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY, strategies
from spantrain.recovery.policy import holds_all
from spantrain.sim.availability import PREPARED_S, detect_s

REPLACED_S = 600.0
"""Until another machine stands in the place of one that was taken away: an assumption."""
CHECKPOINT_S = 600.0
"""Between two checkpoints, to which a run goes back where nobody else holds what is lost: on average by half of it."""
_EFFORT = 48.0
"""What may be planned for, in plans for one host; see `_effort`."""
_ONE_BY_ONE = 32
"""Devices up to which `auto` looks at each of them, or at each host."""
_PAIRED = 5
"""Choices of the frontier that are tried together with each other."""
_MOST_LOST = 0.8
"""A choice that loses more of its time is none."""

Shape = tuple[tuple[Offer, int], ...]


class RentRequest(Record):
    """What is to be trained, and what there is to rent."""

    model: ModelSpec
    job: JobSpec
    prices: PriceFile
    goal: RentGoal
    dtype: str
    options: PlanOptions = field(default_factory=PlanOptions)
    """Quotas, kinds, places or providers to leave out, and what plans may do."""
    progress: Callable[[int, int, str], None] = lambda _done, _total, _text: None


def rent(request: RentRequest) -> RentOutcome:
    """Find what to rent, and plan for it as `spantrain plan` does: its figures are those of that plan.

    Raises:
        InfeasiblePlanError: nothing on offer can hold the model, or nothing keeps the limit.
        PlanError: nothing is on offer, or nothing of the name that is to be left out or has a quota.
    """
    return _Search(request).run()


class _Search:
    def __init__(self, request: RentRequest) -> None:
        self._request, self._goal = request, request.goal
        asked, listed = request.options.constraints, request.prices.table.offers
        _check_names(asked, listed)
        most: dict[tuple[str | None, str], int] = {}
        for quota in asked.quotas:
            most[quota.site, quota.kind] = min(quota.count, most.get((quota.site, quota.kind), quota.count))
        self._quotas = {kind: count for (site, kind), count in most.items() if site is None}
        offers = (
            replace(offer, most=min(offer.most, most.get((offer.place, offer.kind), offer.most)))
            for offer in listed
            if not {offer.place, offer.provider, offer.kind} & set(asked.leave_out)
        )
        self._all = list(single_offers(list(offers), self._quotas))
        if not self._all:
            raise PlanError(
                "nothing is on offer: the file has no offers, or --leave-out and --quota leave none of them"
            )
        self._constraints = replace(asked, leave_out=(), quotas=(), min_samples_per_s=None)
        first = described_profile(self._cluster(self._all[0]), request.model, dtype=request.dtype)
        self._graph = first.graph
        self._bounds = LeastCosts(first.graph, request.dtype, request.prices)
        memory = MemoryCost(first, request.job.optimizer, request.dtype)
        self._state_bytes = memory.state_bytes(range(len(first.graph.units)))
        self._planned: dict[Shape, tuple[Plan, Profile] | None] = {}
        """The plan for machines, however they are had."""
        self._spent, self._looked_at = 0.0, 0
        self.rows: dict[Candidate, RentRow] = {}
        self.refusal = f"its state takes {format_bytes(self._state_bytes)}, which no machines of two offers have"

    def run(self) -> RentOutcome:
        """Go through what there is."""
        self._try([found for found in self._all if found.is_one_node], _EFFORT / 3)
        self._try(self._all, _EFFORT * 0.8)
        near = [row.candidate for row in frontier(list(self.rows.values()))]
        near += [row.candidate for row in sorted(self.rows.values(), key=self._goal.rank)]
        # Where no offer alone holds the model, two may: the most that can be had of each.
        largest = {candidate.parts[0].offer: candidate for candidate in self._all}
        near += self._by_layers([] if near else list(largest.values()))
        self._try(list(paired(list(dict.fromkeys(near))[:_PAIRED], self._quotas)), _EFFORT)
        if not self.rows:
            raise InfeasiblePlanError(f"nothing on offer can train {self._request.model.name}: {self.refusal}")
        full: dict[Shape, PlanOutcome] = {}
        while (chosen := self._goal.best(self.rows.values())).candidate.shape not in full:
            full[chosen.candidate.shape] = self._in_full(chosen.candidate)
        self._goal.check(chosen)
        rows, candidate = list(self.rows.values()), chosen.candidate
        return RentOutcome(
            goal=self._goal,
            chosen=chosen,
            one_node=min((row for row in rows if row.candidate.is_one_node), key=self._goal.rank, default=None),
            frontier=frontier(rows),
            planned=sum(found is not None for found in self._planned.values()),
            looked_at=self._looked_at,
            cluster_text=cluster_text(candidate, self._request.prices),
            profile=described_profile(self._cluster(candidate), self._request.model, dtype=self._request.dtype),
            in_full=full[candidate.shape],
        )

    def _in_full(self, candidate: Candidate) -> PlanOutcome:
        """Plan for a candidate as `spantrain plan` does: what its machines come to is then of that plan."""
        self._request.progress(0, 1, f"{candidate.what}, in full")
        profile = described_profile(self._cluster(candidate), self._request.model, dtype=self._request.dtype)
        options = replace(self._request.options, constraints=self._constraints)
        found = make_plan(profile, self._request.job, options)
        self._planned[candidate.shape] = found.plan, profile
        alike = [one for one in self.rows if one.shape == candidate.shape]
        self.rows |= {one: row for one in alike if (row := self._row(one)) is not None}
        return found

    def _try(self, candidates: Sequence[Candidate], effort: float) -> None:
        """Plan for candidates as far as the effort goes: the most promising first, those that take long last."""
        self._looked_at += sum(found not in self.rows for found in candidates)
        memory = {name: kind.memory_bytes for name, kind in self._bounds.kinds.items()}
        able = [
            found
            for found in candidates
            if sum(part.devices * memory[part.offer.kind] for part in found.parts) > self._state_bytes
        ]
        ranked = sorted(self._by_layers(able), key=lambda found: _effort(found) > _EFFORT / 4)
        for done, candidate in enumerate(ranked):
            if candidate in self.rows or self._is_beaten(candidate):
                continue
            if candidate.shape not in self._planned and self._spent + _effort(candidate) > effort:
                continue
            self._request.progress(done, len(ranked), candidate.what)
            row = self._row(candidate)
            if row is not None:
                self.rows[candidate] = row

    def _by_layers(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates by how many frontiers of bounds lie before theirs, in each the cheapest first."""
        costs = ((self._bounds.sample_usd(found), self._bounds.sample_s(found), found) for found in candidates)
        return [found for layer in layers(costs) for found in layer]

    def _is_beaten(self, candidate: Candidate) -> bool:
        """Whether a choice that was planned for is better in time and money than this one can be."""
        hours = self._bounds.sample_s(candidate) * self._goal.samples / 3600
        usd = self._bounds.sample_usd(candidate) * self._goal.samples
        rows = list(self.rows.values())
        if candidate.is_one_node:
            rows = [row for row in rows if row.candidate.is_one_node]
        return any(row.hours <= hours and row.usd <= usd for row in rows)

    def _cluster(self, candidate: Candidate) -> Cluster:
        return parse_cluster(cluster_text(candidate, self._request.prices), source="what is on offer")

    def _plan(self, candidate: Candidate) -> tuple[Plan, Profile] | None:
        """Return the best plan for the machines; None where the model does not fit on them, or some stand idle."""
        self._spent += _effort(candidate)
        model, dtype = self._request.model, self._request.dtype
        profile = analytic_profile(self._cluster(candidate), model, self._graph, dtype=dtype)
        evaluator = Evaluator(profile, self._request.job)
        asked = PlanRequest(profile=profile, job=self._request.job, constraints=self._constraints, evaluate=evaluator)
        try:
            proposals = proposals_of(strategies()[DEFAULT_STRATEGY].propose, asked, improves=True)
        except InfeasiblePlanError as error:
            self.refusal = str(error)
            return None
        found = [(evaluator(one.plan).step_s, one.plan) for one in proposals if evaluator(one.plan).fits]
        if not found:
            return None
        _, plan = min(found, key=lambda entry: entry[0])
        if len({profile.cluster.device_by_name[name].host for name in plan.devices}) < len(profile.cluster.hosts):
            return None  # fewer machines do as much
        return evaluator.bucketed(plan), profile

    def _row(self, candidate: Candidate) -> RentRow | None:
        """Return what a choice comes to; None where nothing can be trained on it."""
        shape = candidate.shape
        if shape not in self._planned:
            self._planned[shape] = self._plan(candidate)
        planned = self._planned[shape]
        if planned is None:
            return None
        plan, profile = planned
        step_s = predict(plan, profile).step_s
        lost = self._lost_ratio(candidate, plan, profile, step_s)
        if lost > _MOST_LOST:
            self.refusal = f"{candidate.what} would lose {lost:.1%} of its time to preemptions, over {_MOST_LOST:.0%}"
            return None
        goal, batch = self._goal, self._request.job.global_batch
        steps = goal.samples / batch
        hours = steps * step_s / (1 - lost) / 3600
        rent_usd = hours * candidate.usd_per_hour(self._bounds.kinds)
        prices, egress_usd = Prices(profile.cluster, self._request.prices.table), 0.0
        rented = {part.offer.place for part in candidate.parts if part.price.is_rented}
        for way, load in link_loads(plan, profile).items():  # of the whole run, tier by tier
            source, _, target = way.partition("->")
            if source in rented and target in profile.cluster.site_by_name:
                egress, far = prices.egress(source, target)
                egress_usd += egress.usd(far, load.size_bytes * steps)
        return RentRow(
            candidate=candidate,
            plan=plan,
            step_s=step_s,
            samples_per_s=batch / step_s * (1 - lost),
            lost_ratio=lost,
            hours=hours,
            rent_usd=rent_usd,
            egress_usd=egress_usd,
            usd_per_million=(rent_usd + egress_usd) / goal.shown_amount * 1e6,
        )

    def _lost_ratio(self, candidate: Candidate, plan: Plan, profile: Profile, step_s: float) -> float:
        """Return the part of the time that preemptions cost."""
        per_s = 0.0
        for part in candidate.parts:
            rate = part.price.preemptions_per_hour
            if part.market is Market.SPOT and rate:
                host, optimizer = f"{part.offer.place}-{part.offer.kind}-0", self._request.job.optimizer
                cost_s = loss_of_host_s(plan, profile, host, optimizer, step_s)
                per_s += part.hosts * rate / 3600 * cost_s
        return per_s / (1 + per_s)


def _check_names(asked: Constraints, offers: Sequence[Offer]) -> None:
    """Refuse to leave out, or to limit, what is not on offer: most likely it is misspelt."""
    places, kinds = dict.fromkeys(one.place for one in offers), dict.fromkeys(one.kind for one in offers)
    providers = dict.fromkeys(one.provider for one in offers)
    named = [("--leave-out", name, [*places, *kinds, *providers]) for name in asked.leave_out]
    named += [("--quota", quota.kind, list(kinds)) for quota in asked.quotas]
    named += [("--quota", quota.site, list(places)) for quota in asked.quotas if quota.site]
    for option, name, known in named:
        if name not in known:
            raise PlanError(f"{option} {name}: nothing of that name is on offer; {did_you_mean(name, known)}")


def _effort(candidate: Candidate) -> float:
    """Return about what planning for a candidate takes, in plans for one host.

    All devices of several hosts share the hosts' ports, and each plan that is tried is simulated. Of more devices only
    counts are searched over.
    """
    hosts = sum(part.hosts for part in candidate.parts)
    if hosts == 1:
        return 1.0
    return 1 + (hosts * candidate.devices / 10 if candidate.devices <= _ONE_BY_ONE else 3)


def loss_of_host_s(plan: Plan, profile: Profile, host: str, optimizer: str, step_s: float) -> float:
    """Return the seconds that it costs a run of this plan, as it was, in all, that a host is taken away.

    `optimizer` has the name that `cost.memory` gives it.
    """
    gone = set(profile.cluster.host_by_name[host].devices)
    present = frozenset(name for name in profile.cluster.device_by_name if name not in gone)
    if not gone & set(plan.devices):
        return 0.0
    held = with_keepers(plan, profile, optimizer, None)
    holders = present & set(plan.devices)
    goes_back = not holds_all(held, holders)
    again_s = CHECKPOINT_S / 2 if goes_back else step_s / 2
    pause_s = detect_s(alone=not present) + PREPARED_S + again_s
    try:
        light = light_plan(held, profile, present, optimizer=optimizer).plan if present else None
    except (PlanError, ProfileError):
        light = None
    if light is None:
        return pause_s + REPLACED_S
    there_s, _ = moved(profile, optimizer, held, frozenset() if goes_back else holders, light)
    back_s, _ = moved(profile, optimizer, light, frozenset(light.devices), plan)
    slower = max(0.0, 1 - step_s / predict(light, profile).step_s)
    return pause_s + there_s + back_s + slower * REPLACED_S
