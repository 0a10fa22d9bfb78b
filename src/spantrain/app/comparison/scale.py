"""Keep a scaled-down model's ratios of compute to traffic those of the model that it stands for (DESIGN section 7).

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
import statistics
from dataclasses import dataclass

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import AnalyticLaw

FULL_SIZE = {
    "gpt2-tiny": "gpt2-small",
    "gpt2-mini": "gpt2-small",
    "bert-small-tiny": "bert-small",
    "resnet-tiny": "resnet-50",
    "efficientnet-tiny": "efficientnet-b1",
}
"""What a scaled-down model of the catalog stands for."""

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_MANY = 1024
"""Samples of a micro-batch in which what an operation costs besides its samples is gone."""
_LEAST_BATCH, _MOST_BATCH = 8, 256
_LEAST_RATE_BYTES_PER_S = 50e3
"""Under it a single packet of the testbed, of up to 60 kB, holds a link for more than a second."""
_LONGEST_LATENCY_S = 0.1
"""Beyond it connections spend their time finding out how long the way is."""
_ASTEROID_BATCH, _ASTEROID_RESNET_BATCH, _SPANTRAIN_BATCH = 2048, 256, 128
_PIXELS_224 = 49
"""Asteroid's images for ResNet-50 have so many times the pixels of ours, and as many times the work and the cuts."""
_BERT_TOKENS = 32
"""Asteroid's samples of text; work and cuts go with them, parameters do not."""


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What compute weighs beside traffic."""

    cuts: float
    sums: float
    latency: float
    """Zero where there is one site: what its hosts have between them is too short to be emulated."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """What makes a small model weigh on a network as a large one does."""

    full_size: str
    """The model that it stands for."""
    full_global_batch: float
    """That model's, in samples of its size here."""
    global_batch: int
    network_speed: float
    """Part of the cluster's rates that links get."""
    latency_scale: float
    """What latencies are multiplied by."""
    full: Ratios
    """Of the large model on the cluster at life's speed."""
    here: Ratios
    """Of the small one on the emulated cluster."""
    bounded: tuple[str, ...] = ()
    """What could not be made alike, and why."""

    @property
    def text(self) -> str:
        """Say it in a line."""
        pairs = ((name, getattr(self.here, name), getattr(self.full, name)) for name in ("cuts", "sums", "latency"))
        said = ", ".join(f"{name} {here:.3g} (there {full:.3g})" for name, here, full in pairs)
        bounds = "".join(f"; {text}" for text in self.bounded)
        return f"like {self.full_size} with {self.full_global_batch:.4g} samples a step; compute over {said}{bounds}"


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


def likeness(
    cluster: Cluster,
    speed: float,
    graph: UnitGraph,
    full_graph: UnitGraph,
    full_size: str,
    full_global_batch: float,
    global_batch: int | None = None,
) -> Likeness | None:
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
    wanted = full_global_batch * (graph.parameter_bytes / full_graph.parameter_bytes) / (cut / full_cut)
    global_batch = _global_batch(wanted, len(cluster.devices), global_batch, bounded)
    latency_s = _longest_latency_s(cluster)
    stretched = global_batch * own_s / (full_global_batch * full_s)
    latency_scale = _latency_scale(stretched, latency_s, bounded)
    return Likeness(
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
        sums=batch * sample_s * rate_bytes_per_s / graph.parameter_bytes,
        latency=latency_s / (batch * sample_s),
    )


def sample_seconds(cluster: Cluster, graph: UnitGraph, speed: float) -> float:
    """Return the seconds of one sample more, forward and backward, where all devices share the samples."""
    return 1.0 / sum(1.0 / _device_seconds(cluster, device, graph, speed) for device in cluster.devices)


def _device_seconds(cluster: Cluster, device: Device, graph: UnitGraph, speed: float) -> float:
    law = AnalyticLaw(kind=cluster.kind_by_name[device.kind], speed=speed, dtype="float32")
    more, less = (sum(law.stage_seconds(graph.units, op, samples) for op in _OPS) for samples in (2 * _MANY, _MANY))
    return (more - less) / _MANY


def slowest_rate(cluster: Cluster) -> float | None:
    """Return the least rate between sites and inside those of several hosts, bytes per second; None: there is none."""
    rates = [link.bandwidth_bytes_per_s for link in cluster.links]
    rates += [site.bandwidth_bytes_per_s for site in cluster.sites if len(site.hosts) > 1]
    return min(rates, default=None)


def _middle_cut(graph: UnitGraph) -> float:
    return statistics.median([unit.cut_bytes_per_sample for unit in graph.units[:-1]] or [0])


def _longest_latency_s(cluster: Cluster) -> float:
    return max((link.latency_s for link in cluster.links), default=0.0)


def _network_speed(wanted: float, rate: float, bounded: list[str]) -> float:
    least = _LEAST_RATE_BYTES_PER_S / rate
    if wanted >= least:
        return wanted
    bounded.append(
        f"the slowest link keeps {_LEAST_RATE_BYTES_PER_S * 8e-6:g} Mbit/s, {least / wanted:.2g} times too much"
    )
    return least


def _global_batch(wanted: float, devices: int, given: int | None, bounded: list[str]) -> int:
    """Return a batch near the one wanted that divides evenly among the devices."""
    least, most = math.ceil(_LEAST_BATCH / devices) * devices, max(1, _MOST_BATCH // devices) * devices
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
