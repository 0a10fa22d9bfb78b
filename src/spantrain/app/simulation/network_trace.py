"""Links that change while a plan is simulated, from the same traces that the testbed follows."""

from collections.abc import Mapping

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.speed import SpeedTrace
from spantrain.cost.network import NetworkCost
from spantrain.planner.engine.predict import costs_of, predict
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate


def calm_run_s(plan: Plan, profile: Profile, schedule: str, steps: int) -> float:
    """Return what so many steps should take on the normal network."""
    return steps * predict(plan, profile, schedule).step_s


def simulate_traced(
    plan: Plan, profile: Profile, schedule: str, steps: int, speeds: Mapping[str, SpeedTrace]
) -> SimulationResult:
    """Simulate a plan while links change; those that it does not use do not matter."""
    used = used_links(plan, profile, schedule)
    options = SimulationOptions(trace=False, link_speed={name: speed for name, speed in speeds.items() if name in used})
    return simulate(plan, costs_of(plan, profile), steps=max(1, steps), schedule=schedule, options=options)


def used_links(plan: Plan, profile: Profile, schedule: str) -> frozenset[str]:
    """Return the ways between sites, and the sites' lines, that a step's samples take."""
    network = NetworkCost(profile)
    result = simulate(plan, costs_of(plan, profile), steps=1, schedule=schedule, options=SimulationOptions(trace=False))
    return frozenset(
        shared.name for pair in result.link_bytes for shared in network.route(*pair) if shared.between_sites
    )
