"""A comparison on real processors: what is refused, and the setting as it is, with nothing slowed or made alike."""

import os

from spantrain.core.cluster import Cluster
from spantrain.errors import ConfigError
from spantrain_studies.comparison.figures import Scale, at_network_speed, cut_down, with_bandwidth
from spantrain_studies.comparison.fit import AUTOMATIC, NONE, Fitted, SettingOverrides, batch_for


def refuse_mixed(cluster: Cluster) -> None:
    """Refuse devices on which methods would not be alike, or torch's cannot run.

    Raises:
        ConfigError: some devices are emulated and others are not, or some are neither emulated nor processors.
    """
    real = [device for device in cluster.devices if not device.emulated]
    others = [f"{device.name} ({device.backend})" for device in real if device.backend != "cpu"]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: methods are compared on processors and on emulated devices; write `backend: cpu` "
            "(with kind cpu, or one of your own) or `backend: emulated` at their hosts in the cluster file"
        )
    if real and len(real) < len(cluster.devices):
        raise ConfigError(
            f"{', '.join(device.name for device in real)}: real devices beside emulated ones, whose time is made up, "
            "make no comparison; write the same backend at all hosts of the cluster file, `emulated` or `cpu`"
        )


def refuse_scaling(cluster: Cluster, overrides: SettingOverrides) -> None:
    """Refuse what cannot be asked of real devices, or of links that are not there.

    Raises:
        ConfigError: a speed or a likeness is asked for, or a rate of links on a single host.
    """
    rates = {"--bandwidth": overrides.bandwidth_bytes_per_s, "--network-speed": overrides.network_speed}
    for option, rate in rates.items():
        if rate is not None and len(cluster.hosts) == 1:
            raise ConfigError(
                f"{option}: all devices are on host {cluster.hosts[0].name}, so nothing crosses a link; leave it out, "
                "or write them as several hosts into the cluster file, whose network is emulated then"
            )
    if overrides.emulated_speed is not None:
        raise ConfigError("--emulated-speed: all devices are real and run as fast as they are; leave it out")
    if overrides.like not in (AUTOMATIC, NONE):
        raise ConfigError(
            f"--like {overrides.like}: real devices cannot be slowed until a small model weighs what a large one does; "
            "leave it out, or give --model the large one"
        )


def as_it_is(cluster: Cluster, overrides: SettingOverrides) -> Fitted:
    """Return the setting of real devices: all of them, at their own speed, links as they are asked for."""
    speed = 1.0 if overrides.network_speed is None else overrides.network_speed
    kept = cut_down(with_bandwidth(cluster, overrides.bandwidth_bytes_per_s), overrides.devices_per_site)
    count = len(kept.devices)
    scale = Scale(
        devices=count,
        devices_before=len(cluster.devices),
        emulated_speed=None,
        network_speed=speed,
        compute_to_traffic=None,
    )
    batch = batch_for(count) if overrides.global_batch is None else overrides.global_batch
    return Fitted(cluster=at_network_speed(kept, speed), global_batch=batch, scale=scale)


def shared_text(devices: int) -> str:
    """Say that devices share processors, if they do.

    >>> shared_text(1)
    ''
    """
    cores = len(os.sched_getaffinity(0))
    if devices <= cores:
        return ""
    return (
        f"{devices} devices share {cores} processors: each computes in one thread, so steps take longer than "
        "on processors of their own, most where all compute at once; --devices-per-site leaves some out"
    )


def emulated_text(cluster: Cluster, network: str) -> str:
    """Return what of a comparison is emulated and what is real; `network` as the session has it."""
    links = "emulated (real TCP through a shaping router)" if network == "testbed" else network
    count, cores = len(cluster.devices), len(os.sched_getaffinity(0))
    devices = (
        f"all {count} emulated, alike for every method (real computation, made-up time)"
        if cluster.emulated
        else f"all {count} real, a process with one thread each, on {cores} processors of this machine"
    )
    return f"devices: {devices}; links: {links}; gradients, losses, messages: real"
