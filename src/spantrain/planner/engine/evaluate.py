"""What a plan would do, on the scale that all strategies share: event simulator, memory, money, energy."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from spantrain.config.prices import load_prices
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan, Stage
from spantrain.core.planned.hints import DispatchHints
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.cost.memory import MemoryCost
from spantrain.cost.money import Energy, Money, Prices, energy_of_step, money_of_step
from spantrain.cost.network import NetworkCost
from spantrain.cost.replicas import ReplicaCost
from spantrain.errors import InfeasiblePlanError, ProfileError
from spantrain.planner.assembly.assemble import with_limits
from spantrain.planner.assembly.tuning import with_best_sums
from spantrain.planner.engine.predict import costs_of
from spantrain.planner.request import Evaluation, JobSpec
from spantrain.schedule.registry import splits_backward
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationResult
from spantrain.sim.fold import simulate_whole

PlanKey = tuple[tuple[Stage, ...], str, DispatchHints | None]


class Evaluator:
    """Evaluates plans of one profile and job, each only once, with the settings of gradient sums that suit it best.

    Raises:
        PlanError: an in-flight limit is too small for the plan's static order (when called).
        ScheduleError: the pipeline would stop (when called).
        ProfileError: the profile lacks what the plan needs (when called).
    """

    def __init__(self, profile: Profile, job: JobSpec, heard: Callable[[int], None] | None = None) -> None:
        """Make one; `heard` is told how many plans were simulated, after each."""
        self._profile, self._heard = profile, heard
        self._memory = MemoryCost(profile, job.optimizer, job.dtype)
        self._replicas = cache(partial(ReplicaCost, profile))
        """What replicas cost, by dtype."""
        self._own_bytes = {device.name: device.memory_bytes for device in profile.cluster.devices}
        self._bucketed: dict[PlanKey, PlanKey] = {}
        """What plans are as they are evaluated."""
        self._seen: dict[PlanKey, tuple[Plan, Evaluation, dict[tuple[str, str], int]]] = {}
        """With the bytes that devices send each other in a step."""

    def __call__(self, plan: Plan) -> Evaluation:
        """Return what a plan would do in the steady state."""
        return self._found(plan)[1]

    def bucketed(self, plan: Plan) -> Plan:
        """Return the plan as it was evaluated: with the best buckets in each stage."""
        return replace(plan, stages=self._found(plan)[0].stages)

    def _found(self, plan: Plan) -> tuple[Plan, Evaluation, dict[tuple[str, str], int]]:
        asked = plan_key(plan)
        key = self._bucketed.get(asked, asked)
        if key not in self._seen:
            peaks = self._memory.plan_peak_bytes(plan)
            free_bytes = {device: self._own_bytes[device] - size for device, size in peaks.items()}
            plan = with_best_sums(plan, self._replicas(plan.dtype), free_bytes)
            key = self._bucketed[asked] = plan_key(plan)
            if key not in self._seen:
                self._seen[key] = (plan, *self._evaluate(plan, peaks))
                if self._heard is not None:
                    self._heard(len(self._seen))
        return self._seen[key]

    def limited(self, plan: Plan) -> Plan | None:
        """Return the plan with the in-flight limits that memory allows; None where it does not fit."""
        splits = splits_backward(plan.schedule)
        stages = [with_limits(stage, self._memory, splits) for stage in plan.stages]
        found = tuple(stage for stage in stages if stage is not None)
        return replace(plan, stages=found) if len(found) == len(stages) else None

    def seen(self) -> Iterator[tuple[Plan, Evaluation]]:
        """Yield every plan evaluated so far, as it was evaluated."""
        yield from ((plan, evaluation) for plan, evaluation, _ in self._seen.values())

    def link_loads(self, plan: Plan) -> dict[str, "LinkLoad"]:
        """Return the load of a plan's links between places (`lab->office`) and lines of sites (`lab up`)."""
        _, evaluation, sent = self._found(plan)
        return _loads(NetworkCost(self._profile), sent, evaluation.step_s)

    def _evaluate(self, plan: Plan, peaks: Mapping[str, int]) -> tuple[Evaluation, dict[tuple[str, str], int]]:
        costs = costs_of(plan, self._profile, self._replicas(plan.dtype))
        result = simulate_whole(plan, costs)
        sent, energy, money = spent_in_step(self._profile.cluster, result, costs)
        evaluation = Evaluation(
            step_s=result.step_s,
            samples_per_s=result.samples_per_s,
            usd_per_step=money.total_usd,
            joules_per_sample=energy.total_j / plan.global_batch,
            bubble_ratio=statistics.fmean(result.bubble_ratio.values()),
            peak_bytes=peaks,
            over_memory=tuple(device for device, size in peaks.items() if size > self._own_bytes[device]),
        )
        return evaluation, sent


def plan_key(plan: Plan) -> PlanKey:
    """Return what a plan is evaluated by."""
    return plan.stages, plan.schedule, plan.hints


class LinkLoad(Record):
    """What a step sends over something that several pairs of devices share, in one direction."""

    size_bytes: int
    """In one step, gradient sums included."""
    bandwidth_bytes_per_s: float
    busy_ratio: float
    """Part of the step in which it would be busy at full rate."""


def link_loads(plan: Plan, profile: Profile) -> dict[str, LinkLoad]:
    """Return the load of a plan's links between places (`lab->office`) and lines of sites (`lab up`), by first use."""
    costs = costs_of(plan, profile)
    result = simulate_whole(plan, costs)
    return _loads(NetworkCost(profile), spent_in_step(profile.cluster, result, costs)[0], result.step_s)


def _loads(network: NetworkCost, sent: Mapping[tuple[str, str], int], step_s: float) -> dict[str, LinkLoad]:
    sizes: dict[str, int] = {}
    rates: dict[str, float] = {}
    for pair, size_bytes in sent.items():
        between, *rest = network.route(*pair)
        for way in (between, *(line for line in rest if line.between_sites)):
            sizes[way.name] = sizes.get(way.name, 0) + size_bytes
            rates[way.name] = way.bandwidth_bytes_per_s
    return {
        name: LinkLoad(size_bytes=size, bandwidth_bytes_per_s=rates[name], busy_ratio=size / rates[name] / step_s)
        for name, size in sizes.items()
    }


def spent_in_step(
    cluster: Cluster, result: SimulationResult, costs: ProfileCosts
) -> tuple[Counter[tuple[str, str]], Energy, Money]:
    """Return the bytes that devices send each other in a step, sums at its end included, and what it costs."""
    sent = Counter(result.link_bytes)
    sent.update(costs.end_of_step_bytes())
    busy_s = {device: ratio * result.step_s for device, ratio in result.utilisation.items()}
    energy = energy_of_step(cluster, result.step_s, busy_s=busy_s, sent_bytes=sent)
    prices, joules = load_prices(), energy.by_device
    return sent, energy, money_of_step(cluster, result.step_s, joules_by_device=joules, sent_bytes=sent, prices=prices)


def check_kinds(profile: Profile, devices: Sequence[str], job: JobSpec) -> None:
    """Refuse a profile that lacks the times of a kind of device that may be used.

    Raises:
        ProfileError: kinds and the command that measures them are in the message.
    """
    dtype = job.dtype or profile.dtype
    known = {(timing.unit_class, timing.kind) for timing in profile.timings if timing.dtype == dtype}
    classes = {unit.unit_class for unit in profile.graph.units}
    kinds = dict.fromkeys(profile.cluster.device_by_name[name].kind for name in devices)
    missing = {kind: sorted(unit for unit in classes if (unit, kind) not in known) for kind in kinds}
    lacking = [f"{kind} ({len(units)} of {len(classes)} unit classes)" for kind, units in missing.items() if units]
    if lacking:
        raise ProfileError(
            f"the profile lacks {dtype} times of {profile.model.name} for {', '.join(lacking)}; measure them with "
            f"`spantrain profile --cluster FILE --model {profile.model.name} --dtype {dtype} --out DIR`, or leave "
            "these devices out with --leave-out"
        )


def check_prices(cluster: Cluster, devices: Sequence[str]) -> None:
    """Refuse devices that may be used and of which nobody says what they cost.

    Raises:
        InfeasiblePlanError: it names them, and the fields that would say it.
    """
    lacking = Prices(cluster, load_prices()).lacking(cluster.device_by_name[name] for name in devices)
    if lacking:
        raise InfeasiblePlanError(
            f"money is asked for, and what follows has no price: {', '.join(lacking)}; give it in the cluster file, "
            "give `rented` or `owned` of the kind in a file for --prices, or leave these devices out with --leave-out"
        )
