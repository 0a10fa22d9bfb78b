"""Fit a comparison's setting to this machine: how many devices, how fast, on what links, with what batch."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from spantrain.app.comparison.scale import FULL_SIZE, Likeness, likeness, paper_batch
from spantrain.app.comparison.setting import (
    Scale,
    at_network_speed,
    batch_for,
    compute_to_traffic,
    cut_down,
    devices_at_once,
    fitting_devices_per_site,
    with_bandwidth,
    with_latencies,
)
from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.slowing import sound_speed
from spantrain.core.cluster import Cluster
from spantrain.core.units import ModelSpec
from spantrain.errors import UsageError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.request import JobSpec

AUTOMATIC, NONE = "auto", "none"
_DEVICES_PER_CORE = 4
"""More worker processes than that spend their time on waiting for a processor."""


@dataclass(frozen=True, kw_only=True)
class SettingOverrides:
    """What of a setting is asked for; the rest is fitted."""

    global_batch: int | None = None
    """None: as `like` has it, else eight samples for each of up to eight devices, four for each of more."""
    devices_per_site: int | None = None
    """None: so many that this machine carries them."""
    bandwidth_bytes_per_s: float | None = None
    """Of all links between sites; in a cluster of one site, between its hosts."""
    network_speed: float | None = None
    """All rates times this; None: as `like` has it, else 1."""
    emulated_speed: float | None = None
    """None: as fast as this machine can emulate, at most the cluster's own."""
    like: str = AUTOMATIC
    """The model whose ratios of compute to traffic are kept; `auto`: what a scaled-down model of the catalog stands
    for; `none`: links stay as they are."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A setting that this machine can emulate."""

    cluster: Cluster
    global_batch: int
    scale: Scale


def fit(cluster: Cluster, model: ModelSpec, overrides: SettingOverrides, real_s: Callable[[], float]) -> Fitted:
    """Return what this machine can emulate of a cluster, and what that left of it.

    Args:
        cluster: all of its devices are emulated.
        model: that is to be trained.
        overrides: what is not to be fitted.
        real_s: measures the seconds of forward and backward of one sample on one processor of this machine.

    Raises:
        ConfigError: there is no such model to be like, or a number is out of range.
    """
    cores = len(os.sched_getaffinity(0))
    kept = _fewer(with_bandwidth(cluster, overrides.bandwidth_bytes_per_s), overrides.devices_per_site, cores)
    fitting = _Fitting(kept, model, overrides)
    speed = overrides.emulated_speed
    if speed is None:
        once_s = real_s()
        first = sound_speed(kept, fitting.graph, once_s)
        speed = sound_speed(kept, fitting.graph, once_s, at_once=fitting.at_once(first, cores))
    fitted, batch, like = fitting.at(speed)
    scale = Scale(
        devices=len(kept.devices),
        devices_before=len(cluster.devices),
        emulated_speed=speed,
        network_speed=fitting.network_speed(like),
        compute_to_traffic=compute_to_traffic(fitted, fitting.graph),
        latency_scale=1.0 if like is None else like.latency_scale,
        like=like,
    )
    return Fitted(cluster=fitted, global_batch=batch, scale=scale)


def _fewer(cluster: Cluster, devices_per_site: int | None, cores: int) -> Cluster:
    if devices_per_site is None:
        devices_per_site = fitting_devices_per_site(cluster, cores * _DEVICES_PER_CORE)
    return cut_down(cluster, devices_per_site)


class _Fitting:
    """The same cluster and model at various speeds."""

    def __init__(self, cluster: Cluster, model: ModelSpec, overrides: SettingOverrides) -> None:
        self._cluster, self._model, self._overrides = cluster, model, overrides
        self.graph = described_profile(cluster, model).graph
        self._full = _full_size(model, overrides.like)
        self._full_graph = None if self._full is None else described_profile(cluster, self._full).graph

    def at(self, speed: float) -> tuple[Cluster, int, Likeness | None]:
        """Return the cluster with devices of this speed and links that go with it, the batch, and what is alike."""
        like = self._like(speed)
        cluster = at_network_speed(self._cluster, self.network_speed(like))
        if like is not None:
            cluster = with_latencies(cluster, like.latency_scale)
        batch = self._overrides.global_batch
        if batch is None:
            batch = batch_for(len(cluster.devices)) if like is None else like.global_batch
        return replace(cluster, emulated_speed=speed), batch, like

    def network_speed(self, like: Likeness | None) -> float:
        """Return the part of their rates that links get."""
        if self._overrides.network_speed is not None:
            return self._overrides.network_speed
        return 1.0 if like is None else like.network_speed

    def at_once(self, speed: float, cores: int) -> float:
        """Return how many devices share a processor at this speed; where links go with it, also at any other."""
        cluster, batch, like = self.at(speed)
        samples_per_s = None if like is None else self._planned_samples_per_s(cluster, batch)
        return devices_at_once(cluster, self.graph, cores, samples_per_s)

    def _planned_samples_per_s(self, cluster: Cluster, batch: int) -> float | None:
        profile = described_profile(cluster, self._model)
        try:
            planned = make_plan(profile, JobSpec(global_batch=batch))
        except UsageError:
            return None
        return planned.samples_per_s_predicted

    def _like(self, speed: float) -> Likeness | None:
        """Return how to be like the full-size model; not where links, and so the rest, are asked for as they are."""
        if self._full is None or self._full_graph is None or self._overrides.network_speed is not None:
            return None
        batch = paper_batch(self._cluster.name, self._full.name, self._full.sequence_length)
        name, chosen = self._full.name, self._overrides.global_batch
        return likeness(self._cluster, speed, self.graph, self._full_graph, name, batch, chosen)


def _full_size(model: ModelSpec, like: str) -> ModelSpec | None:
    if like == NONE:
        return None
    if like != AUTOMATIC:
        return resolve_model(like)
    return resolve_model(FULL_SIZE[model.name]) if model.name in FULL_SIZE else None
