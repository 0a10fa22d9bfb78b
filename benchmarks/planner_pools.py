"""Pools of devices in many sites, made up or drawn at random, for `planner_many_sites.py` and `planner_monotone.py`."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spantrain.config.kinds import load_kinds
from spantrain.core.cluster import LISTED_SITES, Cluster, Device, Host, Link, Site

MBIT = 125e3
KINDS = ("a100", "h100", "v100", "t4", "rtx-4090", "xavier-nx")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A site, by how many devices of each kind it has."""

    counts: Mapping[str, int]
    host_size: int = 8
    bandwidth_bytes_per_s: float = 12.5e9
    """Of each host's port."""
    uplink_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Sites and the links between them."""

    places: tuple[Place, ...]
    bandwidth_bytes_per_s: float = 5_000 * MBIT
    latency_s: float = 0.02
    spread: float = 0.0
    """By how much links differ: each is so many times e wider or narrower at most, by the numbers of its sites."""
    memory_ratio: float = 1.0
    """Of what the kinds have."""
    order: tuple[int, ...] = ()
    """In which the sites stand in the cluster; none: as they come."""

    @property
    def devices(self) -> int:
        """How many there are."""
        return sum(sum(place.counts.values()) for place in self.places)

    def with_place(self, number: int, place: Place) -> "Pool":
        """Return the pool with another site in the place of one."""
        return replace(self, places=(*self.places[:number], place, *self.places[number + 1 :]))


def alike(sites: int, count: int, kind: str = "a100") -> Pool:
    """Return sites that are all alike."""
    return Pool(places=(Place(counts={kind: count}),) * sites)


def cluster_of(pool: Pool) -> Cluster:
    """Return the cluster of a pool; its devices are emulated, and called by the numbers of their sites."""
    known, common = load_kinds(), len(pool.places) > LISTED_SITES and not pool.spread
    names = {number: f"s{number}" for number in pool.order or range(len(pool.places))}
    hosts: list[Host] = []
    devices: list[Device] = []
    sites: list[Site] = []
    for number, site in names.items():
        place, first = pool.places[number], len(hosts)
        for kind, count in place.counts.items():
            for begin in range(0, count, place.host_size):
                host = f"{site}-{kind}-{begin // place.host_size}"
                own = [f"{host}-{index}" for index in range(min(place.host_size, count - begin))]
                hosts.append(Host(name=host, site=site, devices=tuple(own)))
                memory = int(known[kind].memory_bytes * pool.memory_ratio)
                devices += [
                    Device(name=name, kind=kind, host=host, site=site, backend="emulated", memory_bytes=memory)
                    for name in own
                ]
        sites.append(
            Site(
                name=site,
                hosts=tuple(host.name for host in hosts[first:]),
                bandwidth_bytes_per_s=place.bandwidth_bytes_per_s,
                latency_s=5e-5,
                uplink_bandwidth_bytes_per_s=place.uplink_bytes_per_s,
                downlink_bandwidth_bytes_per_s=place.uplink_bytes_per_s,
            )
        )
    return Cluster(
        name=f"{len(devices)} in {len(sites)}",
        kinds=tuple(known[kind] for kind in dict.fromkeys(device.kind for device in devices)),
        sites=tuple(sites),
        hosts=tuple(hosts),
        devices=tuple(devices),
        default_link=_link("", "", pool, 0.0) if common else None,
        links=()
        if common
        else tuple(
            _link(names[a], names[b], pool, pool.spread * _between(a, b) if pool.spread else 0.0)
            for a in names
            for b in names
            if a != b
        ),
    )


def _link(source: str, target: str, pool: Pool, wider: float) -> Link:
    rate = pool.bandwidth_bytes_per_s * math.exp(wider)
    return Link(source=source, target=target, bandwidth_bytes_per_s=rate, latency_s=pool.latency_s)


def _between(a: int, b: int) -> float:
    """Return a number from -1 to 1 that two sites always have, whatever others there are."""
    return random.Random(f"{min(a, b)}-{max(a, b)}").uniform(-1, 1)


def mixed(seed: int, sites: int, kinds: Sequence[str] = KINDS[:4], most: int = 64) -> Pool:
    """Return sites of unlike kinds and sizes, over links that differ."""
    rng = random.Random(seed)
    return Pool(
        places=tuple(
            Place(
                counts={kind: rng.randint(1, most // 8) * 8 for kind in rng.sample(kinds, rng.randint(1, 2))},
                bandwidth_bytes_per_s=rng.choice((1.25e9, 12.5e9)),
            )
            for _ in range(sites)
        ),
        bandwidth_bytes_per_s=rng.choice((1_000, 10_000)) * MBIT,
        latency_s=rng.choice((0.005, 0.03)),
        spread=1.0,
    )


def random_pool(seed: int, most_sites: int = 200, most_devices: int = 4096) -> Pool:
    """Return 1 to so many sites and devices, as often few as many; of one to three kinds in hosts of 1 to 8 devices."""
    rng = random.Random(seed)
    devices = math.exp(rng.uniform(0, math.log(most_devices)))
    sites = round(math.exp(rng.uniform(0, math.log(min(most_sites, devices)))))
    room = max(1, round(devices) // sites)
    kinds = rng.sample(KINDS, rng.randint(1, 3))
    looks = [_random_place(rng, kinds, room) for _ in range(rng.randint(1, 4))]
    return Pool(
        places=tuple(rng.choice(looks) for _ in range(sites)),
        bandwidth_bytes_per_s=MBIT * math.exp(rng.uniform(math.log(50), math.log(50_000))),
        latency_s=rng.uniform(0.001, 0.08),
        spread=rng.choice((0.0, 0.7)),
    )


def _random_place(rng: random.Random, kinds: Sequence[str], room: int) -> Place:
    chosen = rng.sample(kinds, rng.randint(1, len(kinds)))
    host_size = rng.choice((1, 2, 4, 8))
    most = max(1.0, room / len(chosen))
    return Place(
        counts={kind: max(1, round(math.exp(rng.uniform(0, math.log(min(most, 64)))))) for kind in chosen},
        host_size=host_size,
        bandwidth_bytes_per_s=MBIT * rng.choice((1_000, 10_000, 100_000)),
        uplink_bytes_per_s=MBIT * rng.choice((1_000, 10_000)) if rng.random() < 0.2 else None,
    )
