"""The setting of a comparison: a cluster cut down to what this machine can emulate, and how far that is from life."""

from dataclasses import dataclass, replace

from spantrain.app.comparison.scale import Likeness, slowest_rate
from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, Site
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.errors import ConfigError

_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SAMPLES = 2
"""Of the micro-batch that compute is compared with traffic at."""
_BURST_PARTS = 2.5
"""While all devices compute at once, real computation may take so many times the part that it may take on average: it
still hides in the emulated time, since that is ten times as long."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What was changed of a cluster so that this machine can emulate it."""

    devices: int
    devices_before: int
    emulated_speed: float
    network_speed: float
    """Part of the cluster's rates that its links have, inside sites too."""
    compute_to_traffic: float | None
    """Seconds of one sample on the fastest device over those of its smallest cut on the slowest link."""
    latency_scale: float = 1.0
    """What the latencies of links between sites were multiplied by."""
    like: Likeness | None = None
    """The full-size model whose ratios of compute to traffic were kept; None: links are as they were asked for."""

    @property
    def text(self) -> str:
        """Say it in a line."""
        return "; ".join(filter(None, (self.changes, self.ratio if self.like is None else self.like.text)))

    @property
    def changes(self) -> str:
        """Say what was changed."""
        devices = f"{self.devices} of {self.devices_before} devices; at {self.emulated_speed:.3g} of their kinds' speed"
        links = "" if self.network_speed == 1.0 else f"; links at {self.network_speed:.3g} of their rates"
        return devices + links + ("" if self.latency_scale == 1.0 else f" and {self.latency_scale:.3g} times as far")

    @property
    def ratio(self) -> str:
        """Say what compute weighs beside traffic; nothing where nothing is sent."""
        if self.compute_to_traffic is None:
            return ""
        return (
            f"a sample computes {self.compute_to_traffic:.3g} times as long on the fastest device as its smallest cut "
            "takes on the slowest link"
        )


def cut_down(cluster: Cluster, devices_per_site: int | None) -> Cluster:
    """Return the cluster with so many devices at each site, taken from its hosts in turn; hosts left empty are gone."""
    if devices_per_site is None:
        return cluster
    if devices_per_site < 1:
        raise ConfigError(f"--devices-per-site must be at least 1, got {devices_per_site}")
    kept: set[str] = set()
    for site in cluster.sites:
        rows = [cluster.host_by_name[name].devices for name in site.hosts]
        turns = [row[turn] for turn in range(max(map(len, rows))) for row in rows if turn < len(row)]
        kept.update(turns[:devices_per_site])
    hosts = tuple(replace(host, devices=tuple(name for name in host.devices if name in kept)) for host in cluster.hosts)
    left = tuple(host for host in hosts if host.devices)
    names = {host.name for host in left}
    return replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name in kept),
        hosts=left,
        sites=tuple(replace(site, hosts=tuple(name for name in site.hosts if name in names)) for site in cluster.sites),
    )


def with_bandwidth(cluster: Cluster, bandwidth_bytes_per_s: float | None) -> Cluster:
    """Return the cluster with this rate on all links between sites; with one site only, between its hosts."""
    if bandwidth_bytes_per_s is None:
        return cluster
    if not cluster.links:
        sites = (replace(site, bandwidth_bytes_per_s=bandwidth_bytes_per_s) for site in cluster.sites)
        return replace(cluster, sites=tuple(sites))
    links = (replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s) for link in cluster.links)
    return replace(cluster, links=tuple(links))


def at_network_speed(cluster: Cluster, speed: float) -> Cluster:
    """Return the cluster with all rates times this, inside sites, between them, and of their lines."""
    if not speed > 0:
        raise ConfigError(f"--network-speed must be positive, got {speed}")
    if speed == 1.0:
        return cluster
    links = (replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * speed) for link in cluster.links)
    return replace(cluster, links=tuple(links), sites=tuple(_site_at(site, speed) for site in cluster.sites))


def _site_at(site: Site, speed: float) -> Site:
    up, down = site.uplink_bandwidth_bytes_per_s, site.downlink_bandwidth_bytes_per_s
    return replace(
        site,
        bandwidth_bytes_per_s=site.bandwidth_bytes_per_s * speed,
        uplink_bandwidth_bytes_per_s=None if up is None else up * speed,
        downlink_bandwidth_bytes_per_s=None if down is None else down * speed,
    )


def with_latencies(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with the latencies of its links times this, jitter with them."""
    links = (replace(link, latency_s=link.latency_s * scale, jitter_s=link.jitter_s * scale) for link in cluster.links)
    return replace(cluster, links=tuple(links))


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


def compute_to_traffic(cluster: Cluster, graph: UnitGraph) -> float | None:
    """Return seconds of a sample on the fastest device over those of its smallest cut on the slowest link."""
    rate = slowest_rate(cluster)
    cuts = [unit.cut_bytes_per_sample for unit in graph.units[:-1]]
    if rate is None or not cuts:
        return None
    seconds = min(_sample_s(cluster, device, graph, speed=cluster.emulated_speed) for device in cluster.devices)
    return seconds * rate / min(cuts)


def batch_for(devices: int) -> int:
    """Return a global batch that divides evenly among the devices and into many micro-batches.

    >>> batch_for(4), batch_for(6), batch_for(22)
    (32, 48, 88)
    """
    return devices * (8 if devices <= 8 else 4)


def _sample_s(cluster: Cluster, device: Device, graph: UnitGraph, *, speed: float) -> float:
    law = AnalyticLaw(kind=cluster.kind_by_name[device.kind], speed=speed, dtype="float32")
    return sum(law.stage_seconds(graph.units, op, _SAMPLES) for op in _OPS) / _SAMPLES
