"""Predict a plan: the event simulator with the costs of a profile; and find the order of work that it should follow.

A plan may not fit over time where more messages wait than its in-flight limits leave room for (`over_time`).
"""

from collections.abc import Mapping
from dataclasses import replace

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.cost.held_sizes import HeldSizes
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost
from spantrain.cost.replicas import ReplicaCost
from spantrain.errors import PlanError, ScheduleError
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import Limited, SearchEffort, taper, with_hints
from spantrain.sim.stale import simulate_stale


def costs_of(plan: Plan, profile: Profile, replicas: ReplicaCost | None = None) -> ProfileCosts:
    """Return what everything in a step of a plan costs, as training predicts it and validation checks it.

    `replicas` of the same profile and dtype save working them out again for each of many plans.
    """
    return ProfileCosts(profile, plan, replicas=replicas)


def predict(plan: Plan, profile: Profile, *, optimizer: str | None = None, staleness: int = 0) -> SimulationResult:
    """Return what a plan should do; with an optimizer, bytes over time as well.

    With staleness, steps overlap (`sim.stale`).
    """
    sizes = {} if optimizer is None else _held_sizes(plan, profile, optimizer, staleness)
    run = simulate_stale if staleness else simulate
    return run(plan, costs_of(plan, profile), options=SimulationOptions(held_sizes=sizes))


def _held_sizes(plan: Plan, profile: Profile, optimizer: str, staleness: int = 0) -> Mapping[str, HeldSizes]:
    return MemoryCost(profile, optimizer, plan.dtype, staleness=staleness).plan_held_sizes(plan)


def with_best_order(plan: Plan, profile: Profile, *, effort: SearchEffort | None = None) -> Plan:
    """Return the plan with the order of work for `critical-path` that a search finds; others have an order already."""
    if plan.schedule != "critical-path":
        return replace(plan, hints=None)
    return with_hints(plan, costs_of(plan, profile), effort=effort)


def with_best_spans(
    plan: Plan, profile: Profile, *, effort: SearchEffort | None = None, limited: Limited | None = None
) -> Plan:
    """Return the plan with the micro-batches and the order for `critical-path` that a search finds.

    `limited` gives other micro-batches in-flight limits (`sim.search.search.taper`). Where samples depend on each
    other, micro-batches stay: others would give other losses.
    """
    if plan.schedule != "critical-path" or profile.graph.fewest_samples(range(len(profile.graph.units))):
        return with_best_order(plan, profile, effort=effort)
    return taper(plan, costs_of(plan, profile), effort=effort, limited=limited)


_UP_TO = 96
"""Devices up to which a plan is simulated with memory over time."""


def over_time(plan: Plan, profile: Profile, optimizer: str) -> tuple[str, ...]:
    """Return a warning for each device that holds more than it has in the simulated step; none for large plans."""
    if len(plan.devices) > _UP_TO:
        return ()
    try:
        options = SimulationOptions(held_sizes=_held_sizes(plan, profile, optimizer), trace=False)
        peaks = simulate(plan, costs_of(plan, profile), steps=1, options=options).peak_bytes
    except (PlanError, ScheduleError):
        return ()
    own = plan.cluster.device_by_name
    return tuple(
        f"{name} may hold {format_bytes(size)} at its peak and has {format_bytes(own[name].memory_bytes)}: the order "
        f"of work lets more than {BUFFERED_MICRO_BATCHES} messages of a kind wait there; 1f1b may not."
        for name, size in peaks.items()
        if size > own[name].memory_bytes
    )
