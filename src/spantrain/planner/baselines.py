"""What a plan is shown beside: the best single device and the best single site (DESIGN idea 6)."""

from dataclasses import replace

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.job import JobSpec
from spantrain.planner.spantrain import plan_on_devices

__all__ = ["best_single_device", "best_single_site"]


def best_single_device(profile: Profile, job: JobSpec) -> Plan | str:
    """Return the best plan on one device, or the reason why none can hold the model."""
    allowed = job.allowed_devices(profile.cluster)
    alike: dict[tuple[str, int, str], tuple[str, ...]] = {}
    for name in allowed:
        device = profile.cluster.device_by_name[name]
        alike.setdefault((device.kind, device.memory_bytes, device.backend), (name,))
    return _best(profile, job, tuple(alike.values()), "best-single-device")


def best_single_site(profile: Profile, job: JobSpec) -> Plan | str:
    """Return the best plan inside one site, by the same planner, or the reason why none fits."""
    allowed = set(job.allowed_devices(profile.cluster))
    sites = []
    for site in profile.cluster.sites:
        devices = tuple(device.name for device in profile.cluster.devices_at(site.name) if device.name in allowed)
        if devices:
            sites.append(devices)
    return _best(profile, job, tuple(sites), "best-single-site")


def _best(profile: Profile, job: JobSpec, choices: tuple[tuple[str, ...], ...], strategy: str) -> Plan | str:
    plans, refusals = [], []
    for devices in choices:
        try:
            plans.append(plan_on_devices(profile, job, devices).plan)
        except InfeasiblePlanError as error:
            refusals.append(str(error))
    if not plans:
        return refusals[0]
    best = min(plans, key=lambda plan: plan.prediction.step_s if plan.prediction else float("inf"))
    return replace(best, strategy=strategy)
