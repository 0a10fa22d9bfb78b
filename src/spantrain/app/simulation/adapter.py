"""Steps of a plan over links that change, with an adapter, simulated: what each took, and what was decided."""

from itertools import accumulate

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
from spantrain.core.records import Record
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.predict import costs_of
from spantrain.sim.adaptive import simulate_adapting


class SimulatedStep(Record):
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


class AdapterOutcome(Record):
    """All steps."""

    adapter: str
    network_trace: str
    calm_step_s: float
    """Seconds of a step of the first plan on links as they are described."""
    total_s: float
    """Seconds of all steps, with going over to other plans."""
    steps: tuple[SimulatedStep, ...]


class _PatientPlanner:
    """Plans when the answer is asked for: in a simulation nobody waits."""

    def __init__(self, plan: Plan, profile: Profile, optimizer: str) -> None:
        self._plan, self._profile, self._optimizer = plan, profile, optimizer
        self._state: LinkState | None = None

    def ask(self, state: LinkState) -> None:
        """Keep the question."""
        self._state = state

    def answer(self) -> Plan | None:
        """Return the plan for what was asked last, once."""
        state, self._state = self._state, None
        if state is None:
            return None
        try:
            return plan_again(slowed_profile(self._profile, state), self._plan, self._optimizer)
        except InfeasiblePlanError:
            return None


def simulate_adapter(
    plan: Plan, profile: Profile, trace: NetworkTrace, *, adapter: str, steps: int, optimizer: str
) -> AdapterOutcome:
    """Simulate steps one by one, with the adapter that the runtime would use.

    Args:
        plan: the first one.
        profile: that it was made from.
        trace: how links change.
        adapter: as `spantrain train --adapter` names it.
        steps: how many.
        optimizer: as `cost.memory` names it: it decides what moves with a unit.

    Raises:
        PlanError: the plan is of another model or cluster than the profile, or cannot run.
        ProfileError: the profile lacks what the plan needs.
        ConfigError: the trace does not fit the cluster.
    """
    check_fits_profile(plan, profile)
    calm_s = calm_run_s(plan, profile, steps)
    forecast = ProfileForecast(plan, profile, optimizer)
    done = simulate_adapting(
        plan,
        lambda candidate: costs_of(candidate, profile),
        steps=steps,
        link_speed=trace.on(plan.cluster, calm_s),
        boundary=make_boundary(adapter, plan, forecast, AutoSettings(), _PatientPlanner(plan, profile, optimizer)),
        local=adapter,
        move_s=forecast.move_s,
    )
    plans = accumulate(int(one.reason != "") for one in done)
    shown = (SimulatedStep(**{**vars(one), "plan": number}) for one, number in zip(done, plans, strict=True))
    return AdapterOutcome(
        adapter=adapter,
        network_trace=trace.text,
        calm_step_s=calm_s / steps,
        total_s=done[-1].begun_s + done[-1].step_s,
        steps=tuple(shown),
    )
