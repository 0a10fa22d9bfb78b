"""Several steps over links that change, with the adapters that the runtime uses: between steps and in them.

Steps are simulated one by one, each from the moment at which the one before ended: a barrier lies between them. What an
adapter answers to the reports of a step is taken at the end of the next one where it has to simulate first, as live,
where it may keep nobody waiting.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from spantrain.adaptation.boundary import BoundaryAdapter, PlanReplacement
from spantrain.adaptation.local import LocalAdapter
from spantrain.adaptation.network_state import LinkState, Pair
from spantrain.adaptation.registry import LocalAdapters, make_local
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.errors import PlanError, ProfileError
from spantrain.sim.costs import ChangedTransfers, StepCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.search.search import SearchEffort, recuts, taper
from spantrain.sim.transfers import TransferCost


def slowed_costs(costs: StepCosts, state: LinkState) -> StepCosts:
    """Return other costs, with messages between stages over links as they are now; all else is as it was.

    Sums inside a stage keep their seconds: monitors hear of messages between stages only.
    """

    def slowed(source: str, target: str, transfer: TransferCost) -> TransferCost:
        speed = state.speed(source, target)
        return transfer if speed == 1 else replace(transfer, occupancy_s=transfer.occupancy_s / speed)

    return costs if state.calm else ChangedTransfers(costs, slowed)


CostsOf = Callable[[Plan], StepCosts]
MoveSeconds = Callable[[Plan, Plan, LinkState], float]
_EFFORT = SearchEffort(max_runs=30, max_actions=15_000)
"""About half a second."""
_TO_LEARN = 2
"""Steps after which devices know what their links, and their own work, take."""


def stay(before: Plan, after: Plan, state: LinkState) -> float:  # noqa: ARG001 - the same with any links
    """Return the seconds of going over to a plan where units may not move: none, or never."""
    units = [[(stage.first_unit, stage.end_unit) for stage in plan.stages] for plan in (before, after)]
    return 0.0 if units[0] == units[1] else float("inf")


class SimulatedForecast:
    """What the adapter asks, answered by the simulator with given costs."""

    def __init__(self, costs_of: CostsOf, *, move_s: MoveSeconds = stay) -> None:
        self._costs_of = costs_of
        self._move_s = move_s

    def step_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step; infinite where the plan cannot run, or a size was not measured."""
        try:
            return simulate(plan, self._costs(plan, state), steps=1, options=SimulationOptions(trace=False)).step_s
        except (PlanError, ProfileError):
            return math.inf

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        """Return the rates that monitors would report, in bytes per second."""
        local = {name: make_local("off", plan, name) for name in plan.leaders}
        options = SimulationOptions(trace=False, local=local)
        simulate(plan, self._costs(plan, state), steps=1, options=options)
        return {
            (name, link.peer): link.bytes_per_s
            for name, adapter in local.items()
            for link in adapter.reports()
            if link.bytes_per_s is not None
        }

    def adapted_s(self, plan: Plan, state: LinkState) -> float:
        """Return the seconds of a step on links that were calm before, with what devices then do by themselves."""
        local = {name: make_local("auto", plan, name) for name in plan.leaders}
        calm, slow = (self._costs(plan, links) for links in (LinkState(), state))
        offset_s = 0.0
        for costs in (calm, slow):
            clocks = dict.fromkeys(local, offset_s)
            options = SimulationOptions(trace=False, local=local, clock_offset_s=clocks)
            result = simulate(plan, costs, steps=_TO_LEARN, options=options)
            offset_s = result.step_ends_s[-1]
        return result.step_s

    def tuned(self, plan: Plan, state: LinkState) -> Plan:
        """Return the plan with the micro-batches, and the order of work, that a short search finds; in its schedule."""
        costs = self._costs(plan, state)
        if plan.schedule == "critical-path":
            return taper(plan, costs, effort=_EFFORT)
        return min((plan, *recuts(plan)), key=lambda candidate: self.step_s(candidate, state))

    def move_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        """Return the seconds that it takes to go over to a plan; infinite where that cannot be done."""
        return self._move_s(before, after, state)

    def _costs(self, plan: Plan, state: LinkState) -> StepCosts:
        return slowed_costs(self._costs_of(plan), state)


class AdaptedStep(Record):
    """One step of a simulated run."""

    step: int
    begun_s: float
    step_s: float
    plan: Plan
    """The plan that it ran under."""
    reason: str = ""
    """Why its plan is not that of the step before."""
    recuts: int = 0
    """Micro-batches more than planned, on all devices."""


def simulate_adapting(
    plan: Plan,
    costs_of: CostsOf,
    *,
    steps: int,
    link_speed: Mapping[str, SpeedTrace],
    boundary: BoundaryAdapter | None = None,
    local: str = "off",
    move_s: MoveSeconds = stay,
) -> tuple[AdaptedStep, ...]:
    """Run steps; links are named as costs name them, their speeds go by the seconds since the first step's begin.

    `boundary` decides between steps; `local` is the name of what devices do by themselves (`adaptation.registry`).
    Going over to a plan takes `move_s`.
    """
    done: list[AdaptedStep] = []
    now_s, pending, reason = 0.0, None, ""
    kept = {name: LocalAdapters(local, name) for name in plan.devices}
    adapters: Mapping[str, LocalAdapter] = {name: kept[name].under(plan) for name in plan.leaders}
    for step in range(steps):
        step_s, recuts = _run(plan, costs_of(plan), adapters, link_speed, now_s)
        done.append(AdaptedStep(step=step, begun_s=now_s, step_s=step_s, plan=plan, reason=reason, recuts=recuts))
        now_s, reason = now_s + step_s, ""
        taken: PlanReplacement | None = pending
        pending = None
        if taken is None and boundary is not None:
            reports = {name: adapter.reports() for name, adapter in adapters.items()}
            pending = boundary.advise(step, plan, reports, step_s)
            if pending is not None and not pending.simulated:
                taken, pending = pending, None
        if taken is not None:
            now_s += move_s(plan, taken.plan, LinkState())
            plan, reason = taken.plan, taken.reason
            adapters = {name: kept[name].under(plan) for name in plan.leaders}
    return tuple(done)


def _run(
    plan: Plan,
    costs: StepCosts,
    adapters: Mapping[str, LocalAdapter],
    link_speed: Mapping[str, SpeedTrace],
    now_s: float,
) -> tuple[float, int]:
    """Return the seconds of a step that begins now, and how many micro-batches it had more than planned."""
    # On a clock that begins with the step.
    speeds = {
        name: replace(trace, changes=tuple((at_s - now_s, speed) for at_s, speed in trace.changes))
        for name, trace in link_speed.items()
    }
    options = SimulationOptions(
        trace=False, link_speed=speeds, spares_links=True, local=adapters, clock_offset_s=dict.fromkeys(adapters, now_s)
    )
    result = simulate(plan, costs, steps=1, options=options)
    ran = sum(action.op.value == "F" for order in result.orders.values() for action in order)
    planned = sum(len(stage.replica_spans(k)) for stage in plan.stages for k in range(len(stage.replicas)))
    return result.step_s, ran - planned
