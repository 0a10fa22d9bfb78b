"""Predict a plan: the event simulator with the costs of a profile."""

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationResult, simulate

__all__ = ["predict"]


def predict(plan: Plan, profile: Profile, schedule: str | None = None) -> SimulationResult:
    """Return what a plan should do under a schedule (default: its own)."""
    return simulate(plan, ProfileCosts(profile, plan), schedule=schedule or plan.schedule)
