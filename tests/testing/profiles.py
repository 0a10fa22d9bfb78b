"""Parts of profiles that nobody measured: where they come from, and links that are just as they are described."""

from dataclasses import replace
from itertools import permutations

from spantrain.core.cluster import Cluster
from spantrain.core.profile import LinkMeasurement, Provenance

PROVENANCE = Provenance(
    created="2026-01-01T00:00:00Z",
    spantrain_version="0",
    torch_version="0",
    machine="none",
    method="made up",
    compute_s=0.0,
    network_s=0.0,
)


def exact_links(cluster: Cluster, *, payload_bytes: int = 1, rounds: int = 1) -> tuple[LinkMeasurement, ...]:
    """Every pair of devices, measured one at a time and without an error.

    Inside a host nothing waits for the way: tiny models would be worth one device alone.
    """
    pairs = permutations((device.name for device in cluster.devices), 2)
    measured = (
        replace(LinkMeasurement.described(cluster, *pair), payload_bytes=payload_bytes, rounds=rounds) for pair in pairs
    )
    host = {device.name: device.host for device in cluster.devices}
    return tuple(replace(link, latency_s=0.0) if host[link.source] == host[link.target] else link for link in measured)
