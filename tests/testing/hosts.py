"""Made-up clusters of hosts with several devices, and chains of units that can be divided among them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.units import UnitGraph

HostRow = tuple[str, int]
"""A kind, and how many of them the host has."""


def cluster_of_hosts(
    sites: Mapping[str, Sequence[HostRow]],
    *,
    speed: Mapping[str, float],
    memory_bytes: Mapping[str, int] | int = 8 * 2**30,
    bandwidth: float = 1.25e9,
    between: float = 12.5e6,
) -> Cluster:
    """Hosts are `SITE-0`, `SITE-1`, ...; devices `SITE-0-0`, ...; speeds in TFLOPS, bandwidths in bytes per second."""
    memory = {kind: memory_bytes if isinstance(memory_bytes, int) else memory_bytes[kind] for kind in speed}
    rows = [(site, f"{site}-{number}", *row) for site, hosts in sites.items() for number, row in enumerate(hosts)]
    devices = tuple(
        Device(name=f"{host}-{place}", kind=kind, host=host, site=site, backend="emulated", memory_bytes=memory[kind])
        for site, host, kind, count in rows
        for place in range(count)
    )
    return Cluster(
        name="hosts",
        kinds=tuple(_kind(kind, value, memory[kind]) for kind, value in speed.items()),
        sites=tuple(
            Site(
                name=site,
                hosts=tuple(host for at, host, _, _ in rows if at == site),
                bandwidth_bytes_per_s=bandwidth,
                latency_s=1e-4,
            )
            for site in sites
        ),
        hosts=tuple(
            Host(name=host, site=site, devices=tuple(f"{host}-{place}" for place in range(count)))
            for site, host, _, count in rows
        ),
        devices=devices,
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=between, latency_s=5e-3)
            for a in sites
            for b in sites
            if a != b
        ),
    )


def divisible(graph: UnitGraph) -> UnitGraph:
    """Return a chain whose blocks can be divided among tensor-parallel devices, as a transformer's."""
    units = tuple(replace(unit, tensor_sums=2 if unit.unit_class == "block" else 0) for unit in graph.units)
    return replace(graph, units=units)


def _kind(name: str, speed: float, memory_bytes: int) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_fp16_flop_per_s=2e12 * speed,
        peak_fp32_flop_per_s=1e12 * speed,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e12,
        power_w=10,
        source="made up",
    )
