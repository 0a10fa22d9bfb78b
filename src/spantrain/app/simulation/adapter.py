"""Steps of a plan over links that change, with an adapter, simulated: what each took, and what was decided."""

from dataclasses import dataclass, field

from spantrain.adaptation.boundary import AutoSettings
from spantrain.adaptation.network_state import LinkState
from spantrain.adaptation.registry import make_boundary
from spantrain.app.adaptation.adapt import ProfileForecast
from spantrain.app.adaptation.replan import plan_again, slowed_profile
from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.app.simulation.simulate import calm_run_s
from spantrain.config.traces.network_traces import NetworkTrace
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.engine.predict import costs_of
from spantrain.sim.adaptive import simulate_adapting


@dataclass(frozen=True, kw_only=True)
class AdapterRequest:
    """What to simulate."""

    plan: Plan
    profile: Profile
    network_trace: NetworkTrace
    adapter: str
    """As `spantrain train --adapter` names it."""
    steps: int
    optimizer: str = "adamw"
    """As `cost.memory` names it: it decides what moves with a unit."""
    allow_wire: tuple[WireFormat, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step."""

    step: int
    begun_s: float
    step_s: float
    plan: int
    """How many plans took over before it."""
    recuts: int
    """Micro-batches more than its plan has, on all devices: cut in mid-step."""
    reason: str = ""
    """Why its plan took over, where it is the first step under it."""


@dataclass(frozen=True, kw_only=True)
class AdapterOutcome:
    """All steps."""

    adapter: str
    network_trace: str
    calm_step_s: float
    """Seconds of a step of the first plan on links as they are described."""
    total_s: float
    """Seconds of all steps, with going over to other plans."""
    steps: tuple[SimulatedStep, ...]
    plans: tuple[Plan, ...] = field(default=())
    """Plans that ran, in order."""


class _PatientPlanner:
    """Plans when the answer is asked for: in a simulation nobody waits."""

    def __init__(self, request: AdapterRequest) -> None:
        self._request = request
        self._state: LinkState | None = None

    def ask(self, state: LinkState) -> None:
        """Keep the question."""
        self._state = state

    def answer(self) -> Plan | None:
        """Return the plan for what was asked last, once."""
        state, self._state = self._state, None
        if state is None:
            return None
        request = self._request
        try:
            return plan_again(
                slowed_profile(request.profile, state), request.plan, request.optimizer, request.allow_wire
            )
        except InfeasiblePlanError:
            return None


def simulate_adapter(request: AdapterRequest) -> AdapterOutcome:
    """Simulate steps one by one, with the adapter that the runtime would use.

    Raises:
        PlanError: the plan is of another model or cluster than the profile, or cannot run.
        ProfileError: the profile lacks what the plan needs.
        ConfigError: the trace does not fit the cluster.
    """
    check_fits_profile(request.plan, request.profile)
    plan, profile = request.plan, request.profile
    calm_s = calm_run_s(plan, profile, request.steps)
    forecast = ProfileForecast(plan, profile, request.optimizer)
    settings = AutoSettings(allowed=request.allow_wire)
    done = simulate_adapting(
        plan,
        lambda candidate: costs_of(candidate, profile),
        steps=request.steps,
        link_speed=request.network_trace.on(plan.cluster, calm_s),
        boundary=make_boundary(request.adapter, plan, forecast, settings, _PatientPlanner(request)),
        local=request.adapter,
        move_s=forecast.move_s,
    )
    plans: list[Plan] = [plan]
    steps: list[SimulatedStep] = []
    for step in done:
        if step.reason:
            plans.append(step.plan)
        number = len(plans) - 1
        steps.append(
            SimulatedStep(
                step=step.step,
                begun_s=step.begun_s,
                step_s=step.step_s,
                plan=number,
                recuts=step.recuts,
                reason=step.reason,
            )
        )
    return AdapterOutcome(
        adapter=request.adapter,
        network_trace=request.network_trace.text,
        calm_step_s=calm_s / request.steps,
        total_s=done[-1].begun_s + done[-1].step_s,
        steps=tuple(steps),
        plans=tuple(plans),
    )
