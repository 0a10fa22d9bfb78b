"""The other way over a slow boundary: each group trains by itself, an outer optimizer joins them every H steps.

Groups are the first-level ones of `planner.groups`: two sites with a fast link between them are one, a site whose
network is slow inside is several.

After DiLoCo (Douillard et al., 2023): each group takes H inner steps by itself, then the mean of their
pseudo-gradients is an outer step. Kept: the round, and that all parameters go there and back once in it. Not kept: any
claim on how many samples such training needs. Parameters travel as float32, up to the server all at once and down
again; the server is the group's leader that makes this shortest. Groups get parts of the global batch by their speed,
so that their inner steps end together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from spantrain.core.outer.groups import OuterGroup, OuterPlan
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.span import apportion, equal_spans
from spantrain.cost.network import NetworkCost
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.engine.clusters import clusters_of, looks_of
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.groups import DeviceGroup
from spantrain.planner.request import Constraints, Evaluated, JobSpec
from spantrain.planner.strategies.spantrain_dp.strategy import candidates

_BOUNDARIES = 6
"""The most slow boundaries that are told of, the slowest first."""
_ALL_SETS_UP_TO = 8


class Boundary(Record):
    """The way between two first-level groups, in its slower direction, as their first devices have it."""

    groups: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float


class OuterExchange(Record):
    """The exchange at the end of a round."""

    server: str
    seconds: float


class Joined(Record):
    """Groups that train by themselves, with their parts of the global batch."""

    samples: Mapping[str, int]
    """By group."""
    samples_per_s: float
    """If a group's speed were the same for its part as for the whole global batch."""


def exchange_of(network: NetworkCost, leaders: Sequence[str], parameter_bytes: int) -> OuterExchange:
    """Return the quickest exchange between leaders of groups, one of which serves.

    Raises:
        ProfileError: a link between two of them was not measured.
    """
    found = []
    for server in leaders:
        up = [(leader, server) for leader in leaders if leader != server]
        down = [(server, leader) for leader, _ in up]
        seconds = sum(
            max(network.latency_s(*pair) + busy_s for pair, busy_s in zip(pairs, busy, strict=True))
            for pairs in (up, down)
            for busy in (network.busy_together_s(pairs, parameter_bytes),)
        )
        found.append(OuterExchange(server=server, seconds=seconds))
    return min(found, key=lambda exchange: exchange.seconds)


def best_join(
    network: NetworkCost,
    speeds: Mapping[str, float],
    leaders: Mapping[str, str],
    parameter_bytes: int,
    global_batch: int,
    inner_steps: int,
) -> Joined | None:
    """Return the groups (two at least) that do most samples a second; None if no two can share the global batch.

    `speeds` are samples per second by group, `leaders` a device of each that speaks for it. Of many groups, only the
    fastest ones of each number are tried.
    """
    names = sorted(speeds, key=lambda name: -speeds[name])
    if len(names) <= _ALL_SETS_UP_TO:
        sets = [chosen for count in range(2, len(names) + 1) for chosen in combinations(names, count)]
    else:
        sets = [tuple(names[:count]) for count in range(2, len(names) + 1)]
    found = []
    for chosen in sets:
        samples = apportion(global_batch, [speeds[name] for name in chosen])
        if min(samples) == 0:
            continue
        exchange = exchange_of(network, [leaders[name] for name in chosen], parameter_bytes)
        step_s = max(count / speeds[name] for name, count in zip(chosen, samples, strict=True))
        rate = inner_steps * global_batch / (inner_steps * step_s + exchange.seconds)
        found.append(Joined(samples=dict(zip(chosen, samples, strict=True)), samples_per_s=rate))
    return max(found, key=lambda joined: joined.samples_per_s, default=None)


PairRates = Mapping[frozenset[str], float]
"""Samples per second by two groups."""
_TRIED = 2
"""How many of the fastest plans inside a group are tried with the group's part of the batch."""
_SEARCHED = 4
"""Plans that a group's own search proposes: where nothing inside it was simulated, or it may be chosen."""
_MOST_ABLE = 16
"""Groups with plans of their own beyond which no more are searched."""
_SEARCHED_UP_TO = 32
"""Devices of a group, up to which it is searched."""
_NOT_ALLOWED = "only with --allow-outer: it does not compute what one device would"


class LocalPlans(Record):
    """A first-level group, and the plans inside it that fit."""

    group: DeviceGroup
    searched: tuple[str, ...]
    """Its devices that a search for it may use; none where they are too many."""
    plans: tuple[Evaluated, ...]
    """The fastest first; empty where none was found."""


class OuterOutcome(Record):
    """Groups joined by an outer optimizer, with the plan of each."""

    outer: OuterPlan
    plans: Mapping[str, Evaluated]
    """By group."""


def local_plans(
    profile: Profile, job: JobSpec, constraints: Constraints, seen: Iterable[Evaluated], evaluate: Evaluator
) -> tuple[LocalPlans, ...]:
    """Return the first-level groups with the plans inside them that were simulated; small ones without are searched."""
    within = set(constraints.devices_within_quotas(profile.cluster))
    groups = clusters_of(profile, constraints.allowed_devices(profile.cluster))
    inside = _inside(groups, (entry for entry in seen if not entry[0].interleaved))
    able = sum(bool(plans) for plans in inside.values())
    known: dict[object, tuple[tuple[str, ...], list[Plan]]] = {}
    found = []
    for group in groups:
        few = len(group.devices) <= _SEARCHED_UP_TO
        devices = tuple(name for name in group.devices if name in within) if few else ()
        plans = inside[group.name]
        if not plans and devices and len(groups) > 1 and able < _MOST_ABLE:
            looks = looks_of(profile.cluster, devices)
            if looks not in known:
                known[looks] = (devices, _proposed(profile, job, devices))
            alike, proposed = known[looks]
            names = dict(zip(alike, devices, strict=True))
            plans = _fitting((_elsewhere(plan, names) for plan in proposed), evaluate)
            able += bool(plans)
        ranked = tuple(sorted(plans, key=lambda entry: entry[1].step_s))
        found.append(LocalPlans(group=group, searched=devices, plans=ranked))
    return tuple(found)


def _elsewhere(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the same plan on other devices, by the names of its own."""
    stages = (
        replace(
            stage,
            replicas=tuple(
                replace(replica, devices=tuple(names[name] for name in replica.devices)) for replica in stage.replicas
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def join_groups(
    profile: Profile,
    job: JobSpec,
    constraints: Constraints,
    local: Sequence[LocalPlans],
    *,
    inner_steps: int,
    allowed: bool,
) -> OuterOutcome | None:
    """Return the best set of groups for an outer optimizer, by the plans inside them.

    Where it may be chosen (`allowed`), every group is also searched with its part of the batch. None if no two groups
    can train the model by themselves.
    """
    able = {entry.group.name: entry for entry in local if entry.plans}
    if len(able) < 2:
        return None
    joined = _join_of(profile, job, able.values(), inner_steps)
    if joined is None:
        return None
    plans = {}
    for name, samples in joined.samples.items():
        if samples < job.fewest_samples:
            return None
        part = replace(job, global_batch=samples, micro_batches=())
        found = _with_part(profile, part, able[name], search=allowed)
        if found is None:
            return None
        plans[name] = found
    leaders = [plan.devices[0] for plan, _ in plans.values()]
    exchange = exchange_of(NetworkCost(profile), leaders, profile.graph.trained_bytes)
    outer = _described(plans, exchange, inner_steps, job.global_batch)
    reason = _not_to_be_chosen(profile, constraints, outer) if allowed else _NOT_ALLOWED
    return OuterOutcome(outer=replace(outer, allowed=allowed, reason=reason), plans=plans)


def pair_rates(profile: Profile, job: JobSpec, local: Sequence[LocalPlans], inner_steps: int) -> PairRates:
    """Return the samples per second of every two groups joined by an outer optimizer.

    Each group is taken to be as fast with its part of the global batch as with all of it. Groups without a plan are
    left out.
    """
    pairs = combinations([entry for entry in local if entry.plans], 2)
    joined = {frozenset(e.group.name for e in pair): _join_of(profile, job, pair, inner_steps) for pair in pairs}
    return {names: found.samples_per_s for names, found in joined.items() if found is not None}


def _join_of(profile: Profile, job: JobSpec, local: Iterable[LocalPlans], inner_steps: int) -> Joined | None:
    """Return the best of some groups, by their fastest plans."""
    fastest = {entry.group.name: entry.plans[0] for entry in local}
    speeds = {name: evaluation.samples_per_s for name, (_, evaluation) in fastest.items()}
    leaders = {name: plan.devices[0] for name, (plan, _) in fastest.items()}
    size_bytes = profile.graph.trained_bytes
    return best_join(NetworkCost(profile), speeds, leaders, size_bytes, job.global_batch, inner_steps)


def slow_boundaries(profile: Profile, groups: Iterable[DeviceGroup]) -> tuple[Boundary, ...]:
    """Return the ways between groups, the slowest first, a few at the most; those not measured are left out."""
    found = []
    for a, b in combinations(groups, 2):
        ways = (profile.link(a.devices[0], b.devices[0]), profile.link(b.devices[0], a.devices[0]))
        measured = [way for way in ways if way is not None]
        if len(measured) == 2:
            slower = min(measured, key=lambda way: way.bandwidth_bytes_per_s)
            rate, latency_s = slower.bandwidth_bytes_per_s, slower.latency_s
            found.append(Boundary(groups=(a.name, b.name), bandwidth_bytes_per_s=rate, latency_s=latency_s))
    return tuple(sorted(found, key=lambda way: (way.bandwidth_bytes_per_s, -way.latency_s))[:_BOUNDARIES])


def _inside(groups: Sequence[DeviceGroup], seen: Iterable[Evaluated]) -> dict[str, list[Evaluated]]:
    """Return the plans that fit and stay inside a group, by group."""
    group_of = {device: group.name for group in groups for device in group.devices}
    found: dict[str, list[Evaluated]] = {group.name: [] for group in groups}
    for plan, evaluation in seen:
        names = {group_of.get(device) for device in plan.devices}
        name = next(iter(names))
        if evaluation.fits and len(names) == 1 and name is not None:
            found[name].append((plan, evaluation))
    return found


def _proposed(profile: Profile, job: JobSpec, devices: Sequence[str]) -> list[Plan]:
    """Return the plans that a search on some devices proposes."""
    with suppress(InfeasiblePlanError):
        return [entry.plan for entry in candidates(profile, job, devices, limit=_SEARCHED)]
    return []


def _fitting(plans: Iterable[Plan], evaluate: Evaluator) -> list[Evaluated]:
    """Evaluate plans; return those that fit and can run."""
    found = []
    for plan in plans:
        with suppress(PlanError, ScheduleError):
            found.append((evaluate.bucketed(plan), evaluate(plan)))
    return [entry for entry in found if entry[1].fits]


def _with_part(profile: Profile, job: JobSpec, local: LocalPlans, *, search: bool) -> Evaluated | None:
    """Return the best plan of a group for its part of the batch."""
    plans = [cut for plan, _ in local.plans[:_TRIED] for cut in _with_batch(plan, job.global_batch)]
    if search:
        known = dict.fromkeys(name for plan, _ in local.plans for name in plan.devices)
        plans += _proposed(profile, job, local.searched or tuple(known))
    return min(_fitting(plans, Evaluator(profile, job)), key=lambda entry: entry[1].step_s, default=None)


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
        if all(sizes for stage in stages for sizes in stage.sizes_by_replica):
            yield made


def _described(
    plans: Mapping[str, Evaluated], exchange: OuterExchange, inner_steps: int, global_batch: int
) -> OuterPlan:
    groups = tuple(
        OuterGroup(
            name=name,
            devices=plan.devices,
            global_batch=plan.global_batch,
            step_s=evaluation.step_s,
            stages="units "
            + " | ".join(f"{s.first_unit}-{s.end_unit - 1} on {'+'.join(s.devices)}" for s in plan.stages),
        )
        for name, (plan, evaluation) in plans.items()
    )
    outer = OuterPlan(
        groups=groups, inner_steps=inner_steps, exchange_s=exchange.seconds, server=exchange.server, samples_per_s=0.0
    )
    return replace(outer, samples_per_s=inner_steps * global_batch / outer.round_s)


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
