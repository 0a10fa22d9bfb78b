"""What a plan is shown beside: the best single device and the best single site (DESIGN idea 6)."""

from dataclasses import replace

from spantrain.core.plan import Alternative, Plan
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.job import JobSpec
from spantrain.planner.spantrain import plan_on_devices

__all__ = ["alternatives", "best_single_device", "best_single_site"]


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


def alternatives(profile: Profile, job: JobSpec) -> tuple[Alternative, ...]:
    """Return both baselines as a plan's alternatives."""
    found = []
    for name, plan in (
        ("best single device", best_single_device(profile, job)),
        ("best single site", best_single_site(profile, job)),
    ):
        if isinstance(plan, str):
            found.append(Alternative(name=name, devices=(), step_s=None, samples_per_s=None, reason=plan))
            continue
        assert plan.prediction is not None
        found.append(
            Alternative(
                name=name,
                devices=plan.devices,
                step_s=plan.prediction.step_s,
                samples_per_s=plan.prediction.samples_per_s,
                reason=plan.reasons[0],
            )
        )
    return tuple(found)


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
