"""What the demonstration of the outer optimizer is made of: places, links, numbers, and what each process is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.core.quantities import format_bandwidth
from spantrain.models.data.text import read_windows

DATA = "stdlib-text"
"""The standard library's sources."""
LENGTH = 64
"""Bytes of a window that are foretold."""
HUB, MASTER = "hub", "master"
_PORT = 29500
_HUB_BYTES_PER_S = 125e6
_HUB_LATENCY_S = 0.2e-3
_CHUNKS = 256
"""That the text is leased in."""
_FINISH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class DemoCluster:
    """One place that trains a whole copy."""

    name: str
    speed: float
    """Of the fastest one's."""
    bandwidth_bytes_per_s: float
    """Of its link to the hub, each way."""
    latency_s: float


_CLUSTERS = (
    DemoCluster(name="a", speed=1.0, bandwidth_bytes_per_s=20e6 / 8, latency_s=5e-3),
    DemoCluster(name="b", speed=0.9, bandwidth_bytes_per_s=20e6 / 8, latency_s=15e-3),
    DemoCluster(name="c", speed=0.7, bandwidth_bytes_per_s=10e6 / 8, latency_s=25e-3),
    DemoCluster(name="d", speed=0.4, bandwidth_bytes_per_s=5e6 / 8, latency_s=40e-3),
)


@dataclass(frozen=True, kw_only=True)
class OuterDemoOptions:
    """What the demonstration shows."""

    clusters: tuple[DemoCluster, ...] = _CLUSTERS
    shards: tuple[str, ...] = ("s0", "s1")
    inner_steps: int = 16
    seconds: float = 120.0
    """Of training."""
    step_s: float = 0.25
    """Of an inner step of the fastest cluster."""
    batch: int = 8
    """Windows of 64 bytes of an inner step."""
    learning_rate: float = 2e-3
    """Of the inner steps."""
    grace_s: float = 3.0
    """Three quarters of a round of the fastest cluster: nobody waits for the window, and most pushes are in it."""
    momentum: float = 0.5
    """Of the outer step. The default is for rounds that are longer and fewer."""
    network: bool = True
    """Emulate the links; False: all on loopback, unshaped."""
    encrypted: bool = True
    say_every_s: float = 1.0
    """How often the master says how it stands."""


def demo_network(options: OuterDemoOptions) -> Cluster:
    """Return the hub with master and shards, and a site for each cluster, joined to it by a link of its own."""
    hosts_of = {HUB: (MASTER, *options.shards), **{one.name: (host_of(one.name),) for one in options.clusters}}
    link_of = {one.name: one for one in options.clusters}

    def link(source: str, target: str) -> Link:
        ends = [link_of[site] for site in (source, target) if site in link_of]
        return Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=min(one.bandwidth_bytes_per_s for one in ends),
            latency_s=sum(one.latency_s for one in ends),
        )

    return Cluster(
        name="outer-demo",
        kinds=(),
        sites=tuple(
            Site(name=site, hosts=hosts, bandwidth_bytes_per_s=_HUB_BYTES_PER_S, latency_s=_HUB_LATENCY_S)
            for site, hosts in hosts_of.items()
        ),
        hosts=tuple(Host(name=host, site=site, devices=()) for site, hosts in hosts_of.items() for host in hosts),
        devices=(),
        links=tuple(link(source, target) for source, target in permutations(hosts_of, 2)),
    )


def host_of(cluster: str) -> str:
    """Return the host that a cluster's process runs on."""
    return f"{cluster}-0"


def master_order(options: OuterDemoOptions, state: Path, address: str, *, port: int = _PORT) -> Mapping[str, Any]:
    """Return what the master is told; it listens on an address of its host."""
    return {
        "role": "master",
        "bind": f"{address}:{port}",
        "state": str(state / MASTER),
        "shards": options.shards,
        "grace_s": options.grace_s,
        "momentum": options.momentum,
        "samples": len(read_windows(DATA, LENGTH, held_out=False)),
        "chunks": _CHUNKS,
        "encrypted": options.encrypted,
        "say_every_s": options.say_every_s,
        "remove": str(state),
    }


def shard_order(options: OuterDemoOptions, state: Path, address: str, shard: str, joining: Mapping[str, Any]) -> Any:
    """Return what a shard is told; `joining`: what the master said of address and token."""
    snapshots = str(state / shard)
    return {
        "role": "shard",
        **_joining(options, joining),
        "address": address,
        "snapshots": snapshots,
        "hold": str(state),
    }


def cluster_order(options: OuterDemoOptions, cluster: DemoCluster, joining: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a cluster is told."""
    return {
        "role": "cluster",
        **_joining(options, joining),
        "step_s": options.step_s / cluster.speed,
        "inner_steps": options.inner_steps,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "finish_s": _FINISH_S,
    }


def _joining(options: OuterDemoOptions, joining: Mapping[str, Any]) -> dict[str, Any]:
    return {"master": joining["address"], "token": joining["token"], "encrypted": options.encrypted}


def what_is_emulated(options: OuterDemoOptions) -> str:
    """Say what of the figures is made up."""
    links = ", ".join(f"{one.name} {format_bandwidth(one.bandwidth_bytes_per_s)}" for one in options.clusters)
    network = f"links: emulated (real TCP through a shaping router; {links})" if options.network else "links: loopback"
    return (
        "devices: emulated (real computation, made-up time: "
        f"{options.step_s:.3g} s a step of the fastest); {network}; gradients, losses, messages, encryption: real"
    )
