"""What a plan would do under each schedule, links as they are or following a trace: time, memory, money and energy."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from spantrain.app.planning.plan_files import check_fits_profile, under_schedule, with_room_for_two
from spantrain.config.files.text_files import write_atomically
from spantrain.config.traces.network_traces import Changes, NetworkTrace
from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.cost.held_sizes import HeldBytes, divisions_of
from spantrain.cost.memory import MemoryCost
from spantrain.cost.money import Energy, Money
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.engine.evaluate import spent_in_step
from spantrain.planner.engine.predict import costs_of, predict, with_best_order
from spantrain.schedule.layout import CutLayout, check_limits, minimum_in_flight
from spantrain.schedule.render.perfetto import perfetto_json
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.stale import STALE_STEPS, simulate_stale


def calm_run_s(plan: Plan, profile: Profile, steps: int) -> float:
    """Return what so many steps should take on the normal network."""
    return steps * predict(plan, profile).step_s


def simulate_traced(plan: Plan, profile: Profile, steps: int, speeds: Mapping[str, SpeedTrace]) -> SimulationResult:
    """Simulate a plan while links change; those that it does not use do not matter."""
    options = SimulationOptions(trace=False, link_speed=speeds, spares_links=True)
    return simulate(plan, costs_of(plan, profile), steps=max(1, steps), options=options)


_MAX_TIGHTENINGS = 12
"""How often in-flight limits are lowered until what is simulated stays within the bytes."""


class SimulateRequest(Record):
    """What to simulate."""

    plan: Plan
    profile: Profile
    schedules: tuple[str, ...]
    memory_limit_bytes: int | None = None
    """What every device may hold; None: the plan's own in-flight limits, and the devices' own memory."""
    steps: int = 3
    changes: Changes = field(default_factory=Changes)
    """Speeds of devices and links over the simulated steps; each must be one that the plan uses."""
    network_trace: NetworkTrace | None = None
    """How links change, as `spantrain train` takes it; those that the plan does not use do not matter."""
    optimizer: str = "adamw"
    """As `cost.memory` names it: `momentum` is SGD with momentum."""
    staleness: int = 0
    """1: steps overlap (`sim.stale`), with room for two (`app.planning.plan_files`); no bound is known for them."""


class ScheduleOutcome(Record):
    """One schedule. Where it cannot run there is a reason, and no figures."""

    schedule: str
    reason: str = ""
    step_s: float | None = None
    lower_bound_s: float | None = None
    """Seconds that no order of work can beat."""
    ratio_to_bound: float | None = None
    samples_per_s: float | None = None
    step_ends_s: tuple[float, ...] = ()
    """Ends of all simulated steps, since the first one's begin."""
    bubble_ratio: tuple[float, ...] = ()
    """By stage, the mean over its devices: the part of the step in which they wait."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device."""
    peak_held: Mapping[str, HeldBytes] = field(default_factory=dict)
    """By device: what held the peak."""
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device: its memory, or what it was limited to."""
    over_limit: tuple[str, ...] = ()
    """Devices whose peak is over that."""
    in_flight_limits: Mapping[str, int] = field(default_factory=dict)
    """By leader of a replica: the samples that it may hold, as simulated."""
    money_per_step: float | None = None
    """US dollars by list prices; None where a device has no price."""
    money: Money | None = None
    joules_per_step: float | None = None
    energy: Energy | None = None


class SimulationReport(Record):
    """All schedules that were asked for."""

    schedules: Mapping[str, ScheduleOutcome]
    results: Mapping[str, SimulationResult]
    """Results of those that can run."""


def run_simulation(request: SimulateRequest) -> SimulationReport:
    """Simulate a plan under each schedule.

    Raises:
        PlanError: the plan is of another model or cluster than the profile; or the only schedule asked for cannot run.
        ProfileError: the profile lacks what the plan needs.
        UsageError: changes are of devices or links that the plan does not use.
        InfeasiblePlanError: the memory limit holds no micro-batch of some device, or no schedule can run.
    """
    check_fits_profile(request.plan, request.profile)
    if request.staleness:
        request = replace(request, plan=with_room_for_two(request.plan, request.profile, request.optimizer))
    case = _Case(request)
    outcomes: dict[str, ScheduleOutcome] = {}
    results: dict[str, SimulationResult] = {}
    for name in request.schedules:
        try:
            plan, results[name] = case.run(name)
            outcomes[name] = case.outcome(name, plan, results[name])
        except (PlanError, ScheduleError, InfeasiblePlanError) as error:
            outcomes[name] = ScheduleOutcome(schedule=name, reason=str(error))
    if not results:
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes.values())
        raise InfeasiblePlanError(f"cannot run {' or '.join(outcomes)}: {'; '.join(reasons)}")
    return SimulationReport(schedules=outcomes, results=results)


class _Case:
    """A plan and a limit, the same for all schedules."""

    def __init__(self, request: SimulateRequest) -> None:
        self._request = request
        self._memory = MemoryCost(request.profile, request.optimizer, request.plan.dtype, staleness=request.staleness)
        self._sizes = self._memory.plan_held_sizes(request.plan)
        link_speed = request.changes.link_speed
        if request.network_trace is not None:  # parts of the run are parts of its length without a change
            one = request.schedules[0] if len(request.schedules) == 1 else None
            plan, profile = under_schedule(request.plan, one), request.profile
            link_speed = request.network_trace.on(plan.cluster, calm_run_s(plan, profile, request.steps))
        self._options = SimulationOptions(
            held_sizes=self._sizes,
            device_speed=request.changes.device_speed,
            link_speed=link_speed,
            spares_links=request.network_trace is not None,
        )
        limited = request.memory_limit_bytes
        self._plan = request.plan if limited is None else _limited(request.plan, self._memory, limited)
        own = {device.name: device.memory_bytes for device in request.profile.cluster.devices}
        self._limit_bytes = {
            device: own[device] if limited is None else min(own[device], limited) for device in request.plan.devices
        }

    def run(self, schedule: str) -> tuple[Plan, SimulationResult]:
        """Return the plan with the in-flight limits that keep the bytes, and what it does.

        Limits are first what fits beside two buffered messages of each kind. Where more messages wait than that, and
        a limit was asked for, they are lowered until the bytes are kept, as far as the pipeline can still run.
        """
        plan, result = self._simulate(self._plan, schedule)
        if self._request.memory_limit_bytes is None:
            return plan, result
        for _ in range(_MAX_TIGHTENINGS):
            over = self._over_limit(result)
            tighter = self._tightened(plan, result, over) if over else plan
            if tighter == plan:
                break
            plan, result = self._simulate(tighter, schedule)
        return plan, result

    def outcome(self, schedule: str, plan: Plan, result: SimulationResult) -> ScheduleOutcome:
        """Return the figures of a simulated schedule."""
        costs = ProfileCosts(self._request.profile, plan)
        bound_s = None if self._request.staleness else step_bound_s(plan, costs)
        _, energy, money = spent_in_step(self._request.profile.cluster, result, costs)
        return ScheduleOutcome(
            schedule=schedule,
            step_s=result.step_s,
            lower_bound_s=bound_s,
            ratio_to_bound=result.step_s / bound_s if bound_s else None,
            samples_per_s=result.samples_per_s,
            step_ends_s=result.step_ends_s,
            bubble_ratio=tuple(
                statistics.fmean(result.bubble_ratio[device] for device in stage.devices) for stage in plan.stages
            ),
            peak_bytes=result.peak_bytes,
            peak_held={device: memory.peak for device, memory in result.memory.items()},
            limit_bytes=self._limit_bytes,
            over_limit=tuple(self._over_limit(result)),
            in_flight_limits=_limits_by_leader(plan),
            money_per_step=money.total_usd,
            money=money,
            joules_per_step=energy.total_j,
            energy=energy,
        )

    def _simulate(self, plan: Plan, schedule: str) -> tuple[Plan, SimulationResult]:
        """Simulate a plan; one whose limits are not its own has no order of work of its own either."""
        plan = under_schedule(plan, schedule)
        if plan.stages != self._request.plan.stages:
            plan = with_best_order(plan, self._request.profile)
        stale = self._request.staleness > 0
        run = simulate_stale if stale else simulate
        return plan, run(
            plan,
            ProfileCosts(self._request.profile, plan),
            steps=max(self._request.steps, STALE_STEPS) if stale else self._request.steps,
            options=self._options,
        )

    def _over_limit(self, result: SimulationResult) -> list[str]:
        return [device for device, size in result.peak_bytes.items() if size > self._limit_bytes[device]]

    def _tightened(self, plan: Plan, result: SimulationResult, over: Iterable[str]) -> Plan:
        """Return the plan with lower limits where too much was held: of those that sent it, or of the device itself."""
        needed = minimum_in_flight(CutLayout.of(plan))
        limits = [[replica.in_flight_limit for replica in stage.replicas] for stage in plan.stages]
        for device in over:
            crew = plan.crew_of(device)
            stage, number = crew.numbers[0], crew.replica_index(device)
            memory = result.memory[device]
            excess = memory.peak_bytes - self._limit_bytes[device]
            sizes = self._sizes[device]
            senders = plan.stages[stage - 1].replicas if stage > 0 else ()
            can_wait = sum(limits[stage - 1]) - sum(needed[stage - 1]) if senders else 0
            if memory.peak.received_bytes > memory.peak.activation_bytes and can_wait > 0:
                fewer = math.ceil(excess / max(sizes.input_bytes_per_sample, 1) / len(senders))
                for sender in range(len(senders)):
                    limits[stage - 1][sender] = max(needed[stage - 1][sender], limits[stage - 1][sender] - fewer)
            else:
                fewer = math.ceil(excess / max(sizes.activation_bytes_per_sample, 1))
                limits[stage][number] = max(needed[stage][number], 1, limits[stage][number] - fewer)
        return plan.with_limits(limits)


def _limits_by_leader(plan: Plan) -> dict[str, int]:
    limits = Counter[str]()
    for stage in plan.stages:
        limits.update({replica.devices[0]: replica.in_flight_limit for replica in stage.replicas})
    return dict(limits)


def _limited(plan: Plan, memory: MemoryCost, limit_bytes: int) -> Plan:
    """Return the plan with the in-flight limits that so many bytes on every device allow.

    Raises:
        InfeasiblePlanError: they do not hold one micro-batch of some device; all such devices are named.
    """
    if plan.interleaved:
        raise InfeasiblePlanError("--memory-limit is not for interleaved plans; leave it out")
    problems: list[str] = []
    divisions = divisions_of(plan)

    def limit(stage: Stage, number: int) -> int:
        devices = stage.replicas[number].devices
        largest = stage.largest_of(number)
        fits = memory.limit_in(stage, number, divisions, limit_bytes=limit_bytes)
        if fits < largest:
            needs = {name: memory.need(stage.units, name, largest, largest, divisions[name]) for name in devices}
            device, need = max(needs.items(), key=lambda entry: entry[1].peak_bytes)
            problems.append(
                f"{device} needs {format_bytes(need.peak_bytes)} ({need.peak_bytes} bytes) for "
                f"{largest} samples (state {format_bytes(need.state_bytes)}, activations "
                f"{format_bytes(need.activation_bytes)}, buffers {format_bytes(need.buffer_bytes)}, operations at work "
                f"{format_bytes(need.working_bytes)}, framework {format_bytes(need.framework_bytes)})"
            )
        return max(1, fits)

    limits = [[limit(stage, number) for number in range(len(stage.replicas))] for stage in plan.stages]
    if problems:
        raise InfeasiblePlanError(
            f"--memory-limit {format_bytes(limit_bytes)} ({limit_bytes} bytes) does not hold one micro-batch: "
            f"{'; '.join(problems)}; allow more, or plan with smaller micro-batches or more stages"
        )
    limited = plan.with_limits(limits)
    stops = check_limits(limited)
    if stops:
        raise InfeasiblePlanError(f"--memory-limit {format_bytes(limit_bytes)} stops the pipeline: {'; '.join(stops)}")
    return limited


def write_simulated_trace(result: SimulationResult, path: Path) -> None:
    """Write the trace of a simulation for Perfetto, with the memory of each device as a counter track.

    Raises:
        UsageError: it cannot be written there.
    """
    page = perfetto_json(result.trace)
    starts = [*(i.start_s for i in result.trace.intervals), *(f.sent_s for f in result.trace.flows)]
    process = {e["args"]["name"]: e["pid"] for e in page["traceEvents"] if e["name"] == "process_name"}
    origin_s = min(starts, default=0.0)
    page["traceEvents"] += [
        {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": process[device],
            "ts": round(max(0.0, time_s - origin_s) * 1e6, 3),
            "args": {"bytes": size_bytes},
        }
        for device, memory in result.memory.items()
        if device in process
        for time_s, size_bytes in memory.timeline
    ]
    write_atomically(path, json.dumps(page))
