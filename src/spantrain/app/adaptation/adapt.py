"""The adapter of a run: what it asks of costs, memory and the simulator, and how its answers reach the devices."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from spantrain.adaptation.boundary import AutoSettings, BoundaryAdapter
from spantrain.adaptation.network_state import LinkState, Pair
from spantrain.adaptation.registry import make_boundary
from spantrain.app.adaptation.replan import BackgroundPlanner, slowed_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.shares import StateSharding
from spantrain.cost.memory import MemoryCost
from spantrain.cost.moving import state_bytes
from spantrain.cost.replicas import ReplicaCost
from spantrain.planner.engine.predict import costs_of
from spantrain.planner.strategies.interleaved import rooms_of
from spantrain.runtime.control.requests import DeviceReport
from spantrain.runtime.coordinator.advice import Advice
from spantrain.sim.adaptive import SimulatedForecast
from spantrain.sim.costs import StepCosts
from spantrain.sim.search.interleaved import with_interleaved_order

_ORDERED_UP_TO = 2_000
"""Actions of a step up to which the order of an interleaved plan is searched: that takes some sixteen simulations."""
_SWITCH_S = 0.1
"""Seconds of a change that moves parameters, besides their way: new groups, new optimizer state."""


class ProfileForecast(SimulatedForecast):
    """What plans would do by a profile; one that does not fit into a device's memory cannot run."""

    def __init__(self, plan: Plan, profile: Profile, optimizer: str) -> None:
        """Take the plan that was made for calm links: what it needs is allowed in any case."""
        self._profile = profile
        self._optimizer = optimizer
        self._replicas = ReplicaCost(profile, plan.dtype)
        self._memory = MemoryCost(profile, optimizer, plan.dtype)
        own = plan.cluster.device_by_name
        planned = self._memory.plan_peak_bytes(plan)
        self._limit_bytes = {name: max(own[name].memory_bytes, planned[name]) for name in plan.devices}
        self._slow: tuple[LinkState, Profile, ReplicaCost] | None = None
        """The last state in which there were replicas."""
        super().__init__(lambda other: costs_of(other, profile, self._replicas), move_s=self._moving_s)

    def step_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step; infinite where the plan cannot run or does not fit."""
        peaks = self._memory.plan_peak_bytes(plan)
        if any(peaks[name] > limit for name, limit in self._limit_bytes.items()):
            return math.inf
        return super().step_s(plan, state)

    def tuned(self, plan: Plan, state: LinkState) -> Plan:
        """Return the plan with the micro-batches, and the order of work, that a short search finds; in its schedule.

        Interleaved plans keep their micro-batches; long orders are left to whoever plans anew.
        """
        actions = 3 * sum(len(stage.replicas) * len(stage.micro_batches) for stage in plan.stages)
        if not plan.interleaved or actions > _ORDERED_UP_TO:
            return super().tuned(plan, state)
        rooms = rooms_of(plan, self._memory)
        found = None if rooms is None else with_interleaved_order(plan, self._costs(plan, state), rooms)
        return plan if found is None else found

    def _costs(self, plan: Plan, state: LinkState) -> StepCosts:
        """Return what a step costs on these links: messages as the state has them, sums as its slowest links allow."""
        if state.calm or all(len(stage.replicas) == 1 for stage in plan.stages):
            return super()._costs(plan, state)
        if self._slow is None or self._slow[0] != state:
            profile = slowed_profile(self._profile, state)
            self._slow = state, profile, ReplicaCost(profile, plan.dtype)
        return costs_of(plan, *self._slow[1:])

    def _moving_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        """Return the seconds of going over to a plan: parameters and optimizer state of units go to devices without.

        What leaves one site, or comes to one, shares its line: those seconds add up.
        """
        had = {unit: stage.devices for stage in before.stages for unit in stage.units}
        sizes: Counter[Pair] = Counter()
        for stage in after.stages:
            for unit, device in product(stage.units, stage.devices):
                if device not in had[unit]:  # it comes from the first device that has it
                    sizes[had[unit][0], device] += state_bytes(self._profile.graph.units[unit], self._optimizer)
        network, place = self._replicas.groups.network, before.cluster.device_by_name
        lines_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (source, target), size in sizes.items():
            taken_s = network.transfer_seconds(source, target, size) / state.speed(source, target)
            lines_s["from", place[source].site] += taken_s
            lines_s["to", place[target].site] += taken_s
        return _SWITCH_S + max(lines_s.values()) if lines_s else 0.0


class PlanAdviser:
    """The adapter between steps, as the coordinator asks it."""

    def __init__(self, boundary: BoundaryAdapter, planner: BackgroundPlanner) -> None:
        self._boundary = boundary
        self._planner = planner

    def close(self) -> None:
        """End what is at work beside the run."""
        self._planner.close()

    def advise(self, step: int, plan: Plan, reports: Mapping[str, DeviceReport]) -> Advice | None:
        """Return what should run instead of the plan that has run this step, or None to leave it."""
        links = {name: report.links for name, report in reports.items()}
        taken_s = max(report.duration_s for report in reports.values())
        proposal = self._boundary.advise(step, plan, links, taken_s)
        return None if proposal is None else Advice(plan=proposal.plan, reason=proposal.reason)


def adviser_of(plan: Plan, profile: Profile, job: TrainJob, calm_plan: Plan | None = None) -> PlanAdviser | None:
    """Return who looks for better plans in a run that begins with this one, in its own schedule; None: nobody does.

    `calm_plan` is the one that was made for links as planned, where this is another. Nobody looks where the job says
    so, where there is one stage only, and where training cannot change plans: sites that train by themselves, and state
    divided among replicas.
    """
    sharded = any(stage.state_sharding is not StateSharding.NONE for stage in plan.stages)
    if len(plan.stages) == 1 or plan.outer is not None or sharded:
        return None
    base = plan if calm_plan is None else replace(calm_plan, generation=plan.generation)
    forecast = ProfileForecast(base, profile, job.optimizer_state)
    planner = BackgroundPlanner(profile, base, job.optimizer_state, job.allow_wire)
    boundary = make_boundary(job.adapter, base, forecast, AutoSettings(allowed=job.allow_wire), planner)
    return None if boundary is None else PlanAdviser(boundary, planner)
