"""Fit a comparison's setting to this machine: how many devices, how fast, on what links, with what batch.

Keep a scaled-down model's ratios of compute to traffic those of the model that it stands for (DESIGN section 7).

Of the small model, a sample computes so long and sends so much; of the large one, on devices and links of life's speed,
it computes and sends something else. Three ratios say what weighs how much:

    cuts     seconds that a sample computes, over seconds of its middle cut on the slowest link
    sums     seconds that a global batch computes, over seconds of all parameters on the slowest link
    latency  the longest way between sites, over seconds that a global batch computes

Seconds of compute are those of all devices sharing the work, by their kinds' law, for one sample more in a large
micro-batch: the fixed costs of an action are left out. Links are slowed until `cuts` is the large model's; then the
global batch is chosen for `sums`, and latencies are stretched for `latency`. Where a bound keeps one of them from its
value, the scale says so. Bounds on links, on latency and on small batches leave traffic lighter than it is in life, so
what is slow here for its traffic is slower there; the one on large batches leaves sums heavier.
"""

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.slowing import sound_speed
from spantrain.core.cluster import Cluster, Device
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.errors import UsageError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.request import JobSpec
from spantrain_studies.comparison.figures import (
    Ratios,
    Scale,
    ScaleMatch,
    at_network_speed,
    cut_down,
    slowest_rate,
    with_bandwidth,
    with_latencies,
)

FULL_SIZE = {
    "gpt2-tiny": "gpt2-small",
    "gpt2-mini": "gpt2-small",
    "bert-small-tiny": "bert-small",
    "resnet-tiny": "resnet-50",
    "efficientnet-tiny": "efficientnet-b1",
}
"""What a scaled-down model of the catalog stands for."""

_SAMPLES = 2
"""Samples of the micro-batch that compute is compared with traffic at."""
_BURST_PARTS = 2.5
"""While all devices compute at once, real computation may take so many times the part that it may take on average: it
still hides in the emulated time, since that is ten times as long."""
_MIN_BATCH, _MAX_BATCH = 8, 256
_MIN_RATE_BYTES_PER_S = 50e3
"""Under it a single packet of the testbed, of up to 60 kB, holds a link for more than a second."""
_LONGEST_LATENCY_S = 0.1
"""Beyond it connections spend their time finding out how long the way is."""
_ASTEROID_BATCH, _ASTEROID_RESNET_BATCH, _SPANTRAIN_BATCH = 2048, 256, 128
_PIXELS_224 = 49
"""Asteroid's images for ResNet-50 have so many times the pixels of ours, and as many times the work and the cuts."""
_BERT_TOKENS = 32
"""Asteroid's samples of text; work and cuts go with them, parameters do not."""


def paper_batch(preset: str, full_size: str, sequence_length: int | None) -> float:
    """Return the global batch that a cluster's paper trains with, in samples of the size that the catalog's have.

    Asteroid (section 5.2): 2048, and 256 for ResNet-50 on images of 224 x 224. The SpanTrain paper's is 128
    (`docs/paper-tables.md`), which is also taken for GPT-2 on Asteroid's clusters, and for all others.

    >>> paper_batch("asteroid-b-100", "efficientnet-b1", None), paper_batch("laptop", "gpt2-small", 512)
    (2048.0, 128.0)
    """
    if not preset.startswith("asteroid") or full_size.startswith("gpt2"):
        return float(_SPANTRAIN_BATCH)
    if full_size == "resnet-50":
        return float(_ASTEROID_RESNET_BATCH * _PIXELS_224)
    if full_size == "bert-small" and sequence_length is not None:
        return _ASTEROID_BATCH * _BERT_TOKENS / sequence_length
    return float(_ASTEROID_BATCH)


def scale_match(
    cluster: Cluster,
    speed: float,
    graph: UnitGraph,
    full_graph: UnitGraph,
    full_size: str,
    full_global_batch: float,
    global_batch: int | None = None,
) -> ScaleMatch | None:
    """Return how links, global batch and latencies are to be scaled; None where nothing crosses a link.

    Args:
        cluster: with life's links; its own `emulated_speed` is what life's devices run at.
        speed: of the emulated devices, over their kinds'.
        graph: of the small model.
        full_graph: of the one that it stands for.
        full_size: its name.
        full_global_batch: samples of its step.
        global_batch: of the small one, where it is not to be chosen.
    """
    rate = slowest_rate(cluster)
    cut, full_cut = _middle_cut(graph), _middle_cut(full_graph)
    if rate is None or not cut or not full_cut:
        return None
    own_s, full_s = sample_seconds(cluster, graph, speed), sample_seconds(cluster, full_graph, cluster.emulated_speed)
    bounded: list[str] = []
    network_speed = _network_speed((full_s / full_cut) / (own_s / cut), rate, bounded)
    wanted = full_global_batch * (graph.trained_bytes / full_graph.trained_bytes) / (cut / full_cut)
    global_batch = _global_batch(wanted, len(cluster.devices), global_batch, bounded)
    latency_s = _longest_latency_s(cluster)
    stretched = global_batch * own_s / (full_global_batch * full_s)
    latency_scale = _latency_scale(stretched, latency_s, bounded)
    return ScaleMatch(
        full_size=full_size,
        full_global_batch=full_global_batch,
        global_batch=global_batch,
        network_speed=network_speed,
        latency_scale=latency_scale,
        full=ratios(full_graph, full_s, rate, latency_s, full_global_batch),
        here=ratios(graph, own_s, rate * network_speed, latency_s * latency_scale, global_batch),
        bounded=tuple(bounded),
    )


def ratios(graph: UnitGraph, sample_s: float, rate_bytes_per_s: float, latency_s: float, batch: float) -> Ratios:
    """Return what a model's compute weighs beside its traffic on a link.

    >>> from spantrain.core.units import TensorSpec, Unit
    >>> crossing = TensorSpec(name="x", shape_per_sample=(25,), dtype="float32", bytes_per_sample=100)
    >>> first = Unit(name="a", unit_class="a", parameter_bytes=300, forward_flop_per_sample=1e9, outputs=(crossing,),
    ...              activation_bytes_per_sample=100)
    >>> last = Unit(name="b", unit_class="b", parameter_bytes=500, forward_flop_per_sample=1e9, outputs=(),
    ...             activation_bytes_per_sample=100)
    >>> ratios(UnitGraph(units=(first, last), shared_bytes={}), 0.5, 1000.0, 0.1, 16)
    Ratios(cuts=5.0, sums=10.0, latency=0.0125)
    """
    return Ratios(
        cuts=sample_s * rate_bytes_per_s / _middle_cut(graph),
        sums=batch * sample_s * rate_bytes_per_s / graph.trained_bytes,
        latency=latency_s / (batch * sample_s),
    )


def sample_seconds(cluster: Cluster, graph: UnitGraph, speed: float) -> float:
    """Return the seconds of one sample more, forward and backward, where all devices share the samples."""
    return 1.0 / sum(1.0 / _device_seconds(cluster, device, graph, speed) for device in cluster.devices)


def _device_seconds(cluster: Cluster, device: Device, graph: UnitGraph, speed: float) -> float:
    law = AnalyticLaw(kind=cluster.kind_by_name[device.kind], speed=speed, dtype="float32")
    return law.marginal_seconds(graph.units)


def _middle_cut(graph: UnitGraph) -> float:
    return statistics.median([unit.cut_bytes_per_sample for unit in graph.units[:-1]] or [0])


def _longest_latency_s(cluster: Cluster) -> float:
    return max((link.latency_s for link in cluster.links), default=0.0)


def _network_speed(wanted: float, rate: float, bounded: list[str]) -> float:
    least = _MIN_RATE_BYTES_PER_S / rate
    if wanted >= least:
        return wanted
    bounded.append(
        f"the slowest link keeps {_MIN_RATE_BYTES_PER_S * 8e-6:g} Mbit/s, {least / wanted:.2g} times too much"
    )
    return least


def _global_batch(wanted: float, devices: int, given: int | None, bounded: list[str]) -> int:
    """Return a batch near the one wanted that divides evenly among the devices."""
    least, most = math.ceil(_MIN_BATCH / devices) * devices, max(1, _MAX_BATCH // devices) * devices
    nearest = round(wanted / devices) * devices
    found = min(most, max(least, nearest)) if given is None else given
    if not 0.5 < found / wanted < 2.0:
        bounded.append(f"{found} samples a step, where {wanted:.2g} would be alike")
    return found


def _latency_scale(wanted: float, latency_s: float, bounded: list[str]) -> float:
    if not latency_s:
        return 1.0
    most = max(1.0, _LONGEST_LATENCY_S / latency_s)
    if wanted <= most:
        return wanted
    bounded.append(f"no way takes over {most * latency_s * 1e3:.3g} ms, {wanted / most:.2g} times too short")
    return most


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
    """Rate of all links between sites; in a cluster of one site, between its hosts."""
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

    def at(self, speed: float) -> tuple[Cluster, int, ScaleMatch | None]:
        """Return the cluster with devices of this speed and links that go with it, the batch, and what is alike."""
        like = self._like(speed)
        cluster = at_network_speed(self._cluster, self.network_speed(like))
        if like is not None:
            cluster = with_latencies(cluster, like.latency_scale)
        batch = self._overrides.global_batch
        if batch is None:
            batch = batch_for(len(cluster.devices)) if like is None else like.global_batch
        return replace(cluster, emulated_speed=speed), batch, like

    def network_speed(self, like: ScaleMatch | None) -> float:
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

    def _like(self, speed: float) -> ScaleMatch | None:
        """Return how to be like the full-size model; not where links, and so the rest, are asked for as they are."""
        if self._full is None or self._full_graph is None or self._overrides.network_speed is not None:
            return None
        batch = paper_batch(self._cluster.name, self._full.name, self._full.sequence_length)
        name, chosen = self._full.name, self._overrides.global_batch
        return scale_match(self._cluster, speed, self.graph, self._full_graph, name, batch, chosen)


def _full_size(model: ModelSpec, like: str) -> ModelSpec | None:
    if like == NONE:
        return None
    if like != AUTOMATIC:
        return resolve_model(like)
    return resolve_model(FULL_SIZE[model.name]) if model.name in FULL_SIZE else None


def fitting_devices_per_site(cluster: Cluster, most: int) -> int | None:
    """Return how many devices each site may have for no more than `most` in all, at least one; None: they all fit."""
    sizes = [len(cluster.devices_at(site.name)) for site in cluster.sites]
    if sum(sizes) <= most:
        return None
    return max([1] + [count for count in range(1, max(sizes)) if sum(min(size, count) for size in sizes) <= most])


def devices_at_once(cluster: Cluster, graph: UnitGraph, cores: int, samples_per_s: float | None) -> float:
    """Return how many devices as the fastest one share a processor, as far as `sound_speed` has to look at it.

    On average there are as many as it takes for the samples of the quickest method there is. Now and then all compute
    at once, which they may with some more real computation beside.

    Args:
        cluster: all of its devices are emulated.
        graph: of the model.
        cores: processors.
        samples_per_s: of the quickest method, at the cluster's `emulated_speed`; None: taken to be all that all
            devices can do.
    """
    seconds = [_sample_s(cluster, device, graph, speed=cluster.emulated_speed) for device in cluster.devices]
    burst = min(seconds) * sum(1.0 / own_s for own_s in seconds)
    steady = burst if samples_per_s is None else samples_per_s * min(seconds)
    return max(1.0, steady / cores, burst / (cores * _BURST_PARTS))


def batch_for(devices: int) -> int:
    """Return a global batch that divides evenly among the devices and into many micro-batches.

    >>> batch_for(4), batch_for(6), batch_for(22)
    (32, 48, 88)
    """
    return devices * (8 if devices <= 8 else 4)


def _sample_s(cluster: Cluster, device: Device, graph: UnitGraph, *, speed: float) -> float:
    law = AnalyticLaw(kind=cluster.kind_by_name[device.kind], speed=speed, dtype="float32")
    return law.training_seconds(graph.units, _SAMPLES) / _SAMPLES


def compute_to_traffic(cluster: Cluster, graph: UnitGraph) -> float | None:
    """Return seconds of a sample on the fastest device over those of its smallest cut on the slowest link."""
    rate = slowest_rate(cluster)
    cuts = [unit.cut_bytes_per_sample for unit in graph.units[:-1]]
    if rate is None or not cuts:
        return None
    seconds = min(_sample_s(cluster, device, graph, speed=cluster.emulated_speed) for device in cluster.devices)
    return seconds * rate / min(cuts)
