"""Predict a plan: the event simulator with the costs of a profile."""

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.memory import MemoryCost
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate

__all__ = ["costs_of", "optimizer_state", "predict"]


def costs_of(plan: Plan, profile: Profile) -> ProfileCosts:
    """Return what everything in a step of a plan costs, as training predicts it and validation checks it."""
    return ProfileCosts(profile, plan)


def optimizer_state(job: TrainJob) -> str:
    """Return the job's optimizer by the state that it keeps, as `cost.memory` names it."""
    return "momentum" if job.optimizer == "sgd" and job.momentum else job.optimizer


def predict(
    plan: Plan, profile: Profile, schedule: str | None = None, *, optimizer: str | None = None
) -> SimulationResult:
    """Return what a plan should do under a schedule (default: its own); with an optimizer, bytes over time as well."""
    sizes = {} if optimizer is None else MemoryCost(profile, optimizer, plan.dtype).plan_held_sizes(plan)
    return simulate(
        plan,
        costs_of(plan, profile),
        schedule=schedule or plan.schedule,
        options=SimulationOptions(held_sizes=sizes),
    )
