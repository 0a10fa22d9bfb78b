"""The other way over a slow boundary: each site trains by itself, an outer optimizer joins them every H steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from spantrain.app.evaluate import Evaluator
from spantrain.core.outer import OuterGroup, OuterPlan
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.spans import equal_spans
from spantrain.cost.network import NetworkCost
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.job import JobSpec
from spantrain.planner.outer import Exchange, best_join, exchange_of
from spantrain.planner.request import Constraints, Evaluation
from spantrain.planner.strategies.spantrain_dp import candidates

__all__ = ["OuterOutcome", "PairRates", "join_sites", "pair_rates", "sites_of"]

Evaluated = tuple[Plan, Evaluation]
PairRates = Mapping[frozenset[str], float]
"""Samples per second by two sites."""
_TRIED = 2
"""Of the plans inside a site, so many of the fastest are tried with the site's part of the batch."""
_SEARCHED = 4
"""Plans that a site's own search proposes, where the outer optimizer may be chosen."""
_NOT_ALLOWED = "only with --allow-outer: it does not compute what one device would"


@dataclass(frozen=True, kw_only=True)
class OuterOutcome:
    """Sites joined by an outer optimizer, with the plan of each."""

    outer: OuterPlan
    plans: Mapping[str, Evaluated]
    """By site."""

    @property
    def leading(self) -> Evaluated:
        """The plan of the site that does most samples in a step."""
        return max(self.plans.values(), key=lambda entry: entry[0].global_batch)


def sites_of(plan: Plan) -> frozenset[str]:
    """Return the sites that a plan uses."""
    return frozenset(plan.cluster.device_by_name[name].site for name in plan.devices)


def join_sites(
    profile: Profile,
    job: JobSpec,
    constraints: Constraints,
    seen: Iterable[Evaluated],
    *,
    inner_steps: int,
    allowed: bool,
) -> OuterOutcome | None:
    """Return the best set of sites for an outer optimizer, by the plans inside them that were simulated.

    Where it may be chosen (`allowed`), every site is also searched with its part of the batch. None if no two sites can
    train the model by themselves.
    """
    inside = _inside_sites(seen)
    if len(inside) < 2:
        return None
    network, parameter_bytes = NetworkCost(profile), profile.graph.parameter_bytes
    speeds = {site: entries[0][1].samples_per_s for site, entries in inside.items()}
    leaders = {site: entries[0][0].devices[0] for site, entries in inside.items()}
    joined = best_join(network, speeds, leaders, parameter_bytes, job.global_batch, inner_steps)
    if joined is None:
        return None
    plans = {}
    for site, samples in joined.samples.items():
        found = _local(profile, replace(job, global_batch=samples, micro_batches=()), inside[site], search=allowed)
        if found is None:
            return None
        plans[site] = found
    exchange = exchange_of(network, [plan.devices[0] for plan, _ in plans.values()], parameter_bytes)
    outer = _described(plans, exchange, inner_steps, job.global_batch)
    reason = _not_to_be_chosen(profile, constraints, outer) if allowed else _NOT_ALLOWED
    return OuterOutcome(outer=replace(outer, allowed=allowed, reason=reason), plans=plans)


def pair_rates(profile: Profile, job: JobSpec, seen: Iterable[Evaluated], inner_steps: int) -> PairRates:
    """Return the samples per second of every two sites joined by an outer optimizer.

    Each site is taken to be as fast with its part of the global batch as with all of it. Sites in which no plan that
    fits was simulated are left out.
    """
    inside = _inside_sites(seen)
    network, parameter_bytes = NetworkCost(profile), profile.graph.parameter_bytes
    found = {}
    for pair in combinations(inside, 2):
        speeds = {site: inside[site][0][1].samples_per_s for site in pair}
        leaders = {site: inside[site][0][0].devices[0] for site in pair}
        joined = best_join(network, speeds, leaders, parameter_bytes, job.global_batch, inner_steps)
        if joined is not None:
            found[frozenset(pair)] = joined.samples_per_s
    return found


def _inside_sites(seen: Iterable[Evaluated]) -> dict[str, list[Evaluated]]:
    """Return the plans that fit and stay inside a site, by site, the fastest first."""
    found: dict[str, list[Evaluated]] = {}
    for plan, evaluation in seen:
        sites = sites_of(plan)
        if evaluation.fits and len(sites) == 1:
            found.setdefault(next(iter(sites)), []).append((plan, evaluation))
    for entries in found.values():
        entries.sort(key=lambda entry: entry[1].step_s)
    return found


def _local(profile: Profile, job: JobSpec, known: Sequence[Evaluated], *, search: bool) -> Evaluated | None:
    """Return the best plan of a site for its part of the batch."""
    evaluate = Evaluator(profile, job)
    plans = [cut for plan, _ in known[:_TRIED] for cut in _with_batch(plan, job.global_batch)]
    if search:
        devices = dict.fromkeys(name for plan, _ in known for name in plan.devices)
        try:
            plans += [entry.plan for entry in candidates(profile, job, tuple(devices), limit=_SEARCHED)]
        except InfeasiblePlanError:
            plans += []
    found = []
    for plan in plans:
        try:
            found.append((plan, evaluate(plan)))
        except (PlanError, ScheduleError):
            continue
    fitting = [entry for entry in found if entry[1].fits]
    return min(fitting, key=lambda entry: entry[1].step_s, default=None)


def _with_batch(plan: Plan, samples: int) -> Iterator[Plan]:
    """Yield the plan for another global batch, with micro-batches of its own size and of half of it."""
    size = min(samples, max(span.size for span in plan.stages[0].micro_batches))
    for smaller in dict.fromkeys((size, max(1, size // 2))):
        spans = equal_spans(samples, smaller)
        stages = tuple(replace(stage, micro_batches=spans) for stage in plan.stages)
        # A replica may get no sample of such small micro-batches; then it has no part in them.
        try:
            made = replace(plan, global_batch=samples, stages=stages, hints=None)
        except ValueError:
            continue
        if all(stage.replica_spans(index) for stage in stages for index in range(len(stage.replicas))):
            yield made


def _described(plans: Mapping[str, Evaluated], exchange: Exchange, inner_steps: int, global_batch: int) -> OuterPlan:
    groups = tuple(
        OuterGroup(
            name=site,
            devices=plan.devices,
            global_batch=plan.global_batch,
            step_s=evaluation.step_s,
            stages=_in_short(plan),
        )
        for site, (plan, evaluation) in plans.items()
    )
    outer = OuterPlan(
        groups=groups,
        inner_steps=inner_steps,
        exchange_s=exchange.seconds,
        server=exchange.server,
        samples_per_s=0.0,
        allowed=False,
    )
    return replace(outer, samples_per_s=inner_steps * global_batch / outer.round_s)


def _in_short(plan: Plan) -> str:
    rows = [f"{stage.first_unit}-{stage.end_unit - 1} on {'+'.join(stage.devices)}" for stage in plan.stages]
    return f"units {' | '.join(rows)}"


def _not_to_be_chosen(profile: Profile, constraints: Constraints, outer: OuterPlan) -> str:
    """Return which limits it breaks; empty if none."""
    devices = tuple(name for group in outer.groups for name in group.devices)
    broken = constraints.broken_by_devices(profile.cluster, devices)
    rate, wanted, most_s = outer.samples_per_s, constraints.min_samples_per_s, constraints.max_step_s
    if wanted is not None and rate < wanted:
        broken.append(f"{rate:.4g} samples/s, at least {wanted:g} wanted")
    if most_s is not None and outer.global_batch / rate > most_s:
        broken.append(f"{outer.global_batch / rate:.4g} s for a global batch, at most {most_s:g} wanted")
    if constraints.max_usd_per_step is not None or constraints.max_usd_per_hour is not None:
        broken.append("its money is not reckoned, and limits on money are set")
    return "; ".join(broken)
