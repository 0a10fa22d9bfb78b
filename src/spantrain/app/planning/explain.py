"""What limits a plan and what would help most: plan and profile in, what-ifs by re-simulation out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.app.planning.what_if import Line, line_rate, with_faster_line, with_faster_link, with_more_of
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_seconds
from spantrain.core.speed import SpeedTrace
from spantrain.cost.step import StepCost
from spantrain.planner.engine.evaluate import LinkLoad, link_loads
from spantrain.planner.engine.predict import costs_of, with_best_order
from spantrain.sim.bounds.bound import step_bound_s
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.search import SearchEffort

_TWICE = 2.0
_MATTERS = 0.005
"""A what-if that saves a smaller part of the step is not worth a word."""
_EFFORT = SearchEffort(most_runs=60, most_actions=10_000)
"""For the order of work of each what-if."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The same plan, were one thing otherwise."""

    change: str
    kind: str
    """`link`, `line` (a site's uplink or downlink), `latency`, `more devices`, `faster devices` or `memory`."""
    step_s: float
    times_as_fast: float


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """How a stage spends the step; the mean over its devices."""

    devices: tuple[str, ...]
    busy_ratio: float
    gradient_sum_s: float
    held_by_memory: bool
    """Whether an in-flight limit is under what its samples would fill."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a plan's step is made of."""

    step_s: float
    bound_s: float
    """Seconds that no order of work on these devices and links can beat."""
    limited_by: str
    """The largest of the terms that bound the step, and what the order of work adds."""
    stages: tuple[StageLoad, ...]
    links: Mapping[str, LinkLoad]
    helps: tuple[WhatIf, ...]
    """By how much they help; those that do not are left out."""
    tried: int
    """What-ifs that were simulated."""


def explain_plan(plan: Plan, profile: Profile) -> Explanation:
    """Simulate a plan and everything that one could change about the machines and the network.

    The plan stays as it is but for that one thing and the order of work: planning anew may gain more.

    Raises:
        PlanError: the plan is of another model than the profile.
        ProfileError: the profile lacks what the plan needs.
    """
    check_fits_profile(plan, profile)
    now = _simulate(plan, profile)
    tried = [
        WhatIf(change=change, kind=kind, step_s=step_s, times_as_fast=now.step_s / step_s)
        for kind, change, step_s in _what_ifs(plan, profile)
    ]
    helps = [entry for entry in tried if entry.step_s < now.step_s * (1 - _MATTERS)]
    helps.sort(key=lambda entry: entry.step_s)
    bound_s = step_bound_s(plan, costs_of(plan, profile))
    return Explanation(
        step_s=now.step_s,
        bound_s=bound_s,
        limited_by=_limited_by(plan, profile, now, bound_s),
        stages=_stage_loads(plan, profile, now),
        links=link_loads(plan, profile),
        helps=tuple(helps),
        tried=len(tried),
    )


def _simulate(plan: Plan, profile: Profile, speed: Mapping[str, SpeedTrace] | None = None) -> SimulationResult:
    options = SimulationOptions(trace=False, device_speed=speed or {})
    return simulate(plan, costs_of(plan, profile), steps=1, options=options)


def _limited_by(plan: Plan, profile: Profile, now: SimulationResult, bound_s: float) -> str:
    estimate = StepCost(profile, plan.dtype).estimate(plan)
    text = f"{estimate.bound_by}: its work and the way there and back take at least {format_seconds(estimate.bound_s)}"
    if bound_s < now.step_s * (1 - _MATTERS):
        over = 100 * (now.step_s / bound_s - 1)
        text += f"; the order of work takes {over:.1f} % more than the bound of all orders, {format_seconds(bound_s)}"
    return text


def _stage_loads(plan: Plan, profile: Profile, now: SimulationResult) -> tuple[StageLoad, ...]:
    costs = costs_of(plan, profile)
    return tuple(
        StageLoad(
            devices=stage.devices,
            busy_ratio=sum(now.utilisation[name] for name in stage.devices) / len(stage.devices),
            gradient_sum_s=costs.gradient_sum_s(index),
            held_by_memory=any(
                replica.in_flight_limit < sum(span.size for span in stage.replica_spans(number))
                for number, replica in enumerate(stage.replicas)
            ),
        )
        for index, stage in enumerate(plan.stages)
    )


def _what_ifs(plan: Plan, profile: Profile) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, the change, and the seconds of a step with it."""
    for kind, change, make in (*_network_changes(plan, profile), *_device_changes(plan, profile)):
        other_plan, other_profile = make()
        ordered = with_best_order(other_plan, other_profile, effort=_EFFORT)
        yield kind, change, _simulate(ordered, other_profile).step_s
    for index, stage in enumerate(plan.stages):
        kinds = sorted({plan.cluster.device_by_name[name].kind for name in stage.devices})
        speed = {replica.devices[0]: SpeedTrace(changes=((0.0, _TWICE),)) for replica in stage.replicas}
        change = f"{' and '.join(kinds)} of stage {index} twice as fast ({_few(stage.devices)})"
        yield "faster devices", change, _simulate(plan, profile, speed).step_s


Change = tuple[str, str, Callable[[], tuple[Plan, Profile]]]


def _network_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield each way between or inside sites with twice the bandwidth, and those between with half the latency.

    And each line of a site that the cluster has with twice the bandwidth.
    """
    used = [site.name for site in plan.cluster.sites if any(_site(plan, name) == site.name for name in plan.devices)]
    for number, a in enumerate(used):
        for b in used[number:]:
            way = f"inside {a}" if a == b else f"{a} <-> {b}"
            for kind, change, factors in (
                ("link", f"twice the bandwidth {way}", (_TWICE, 1.0)),
                ("latency", f"half the latency {way}", (1.0, 1 / _TWICE)),
            ):
                if kind == "link" or a != b:
                    yield (
                        kind,
                        change,
                        partial(_on, plan, partial(with_faster_link, profile, (a, b), *factors)),
                    )
    for name in used if len(used) > 1 else ():
        for line in Line:
            if line_rate(plan.cluster.site_by_name[name], line) is not None:
                wider = partial(with_faster_line, profile, name, line, _TWICE)
                yield "line", f"twice the {line} of {name}", partial(_on, plan, wider)


def _device_changes(plan: Plan, profile: Profile) -> Iterator[Change]:
    """Yield one more replica like the last of each kind in each stage, and each stage without its memory's limits."""
    for index, stage in enumerate(plan.stages):
        templates = {plan.cluster.device_by_name[r.devices[0]].kind: r for r in stage.replicas if len(r.devices) == 1}
        for kind, template in templates.items():
            change = f"one more {kind} beside {template.devices[0]} in stage {index}"
            yield (
                "more devices",
                change,
                partial(with_more_of, plan, profile, index, template),
            )
        shares = [sum(span.size for span in stage.replica_spans(number)) for number in range(len(stage.replicas))]
        if any(replica.in_flight_limit < share for replica, share in zip(stage.replicas, shares, strict=True)):
            freed = tuple(
                replace(replica, in_flight_limit=max(share, replica.in_flight_limit))
                for replica, share in zip(stage.replicas, shares, strict=True)
            )
            stages = (*plan.stages[:index], replace(stage, replicas=freed), *plan.stages[index + 1 :])
            other = replace(plan, stages=stages, hints=None)
            yield "memory", f"memory for all samples of stage {index}", partial(_on, other, lambda: profile)


def _on(plan: Plan, profile: Callable[[], Profile]) -> tuple[Plan, Profile]:
    return plan, profile()


def _site(plan: Plan, device: str) -> str:
    return plan.cluster.device_by_name[device].site


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
