"""Whether a plan fits over time, too: more messages may wait than its in-flight limits leave room for."""

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES
from spantrain.errors import PlanError, ScheduleError
from spantrain.planner.engine.predict import predict

_UP_TO = 96
"""Devices up to which a plan is simulated with memory over time."""


def over_time(plan: Plan, profile: Profile, optimizer: str) -> tuple[str, ...]:
    """Return a warning for each device that holds more than it has in the simulated step; none for large plans."""
    if len(plan.devices) > _UP_TO:
        return ()
    try:
        peaks = predict(plan, profile, optimizer=optimizer).peak_bytes
    except (PlanError, ScheduleError):
        return ()
    own = plan.cluster.device_by_name
    return tuple(
        f"{name} may hold {format_bytes(size)} at its peak and has {format_bytes(own[name].memory_bytes)}: the order "
        f"of work lets more than {BUFFERED_MICRO_BATCHES} messages of a kind wait there; 1f1b may not."
        for name, size in peaks.items()
        if size > own[name].memory_bytes
    )
