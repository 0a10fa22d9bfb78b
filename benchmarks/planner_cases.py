"""Random small cases for `planner_optimality.py`: clusters, models and what measuring them would give."""

import math
import random
from dataclasses import replace
from itertools import permutations

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.profile import DeviceScore, LinkMeasurement, Profile, Provenance, UnitTiming
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph

SAMPLES = (1, 2, 4, 8, 16)
MBIT, MIB = 125e3, 2**20


def random_cluster(rng: random.Random, most_devices: int) -> Cluster:
    """Return devices of unequal kinds in up to three sites."""
    kinds = _random_kinds(rng)
    count, places = rng.randint(2, most_devices), rng.randint(1, 3)
    where = [f"site-{rng.randrange(places)}" for _ in range(count)]
    names = sorted(set(where))
    devices = tuple(
        Device(
            name=f"d{index}",
            kind=rng.choice(kinds).name,
            host=f"h{index}",
            site=site,
            backend="cpu",
            memory_bytes=2**34,
        )
        for index, site in enumerate(sorted(where))
    )
    links = tuple(
        Link(
            source=a,
            target=b,
            bandwidth_bytes_per_s=MBIT * math.exp(rng.uniform(math.log(10), math.log(10_000))),
            latency_s=rng.uniform(0, 50e-3),
        )
        for a in names
        for b in names
        if a != b
    )
    return Cluster(
        name="random",
        kinds=kinds,
        sites=tuple(
            Site(
                name=name,
                hosts=tuple(device.host for device in devices if device.site == name),
                bandwidth_bytes_per_s=MBIT * rng.choice((1_000, 10_000)),
                latency_s=2e-4,
            )
            for name in names
        ),
        hosts=tuple(
            Host(name=device.host, site=device.site, devices=(device.name,), memory_bytes=2**36) for device in devices
        ),
        devices=devices,
        links=links,
    )


def _random_kinds(rng: random.Random) -> tuple[DeviceKind, ...]:
    return tuple(
        DeviceKind(
            name=f"kind-{index}",
            peak_fp16_flop_per_s=2 * (rate := math.exp(rng.uniform(math.log(0.25), math.log(2.5))) * 1e12),
            peak_fp32_flop_per_s=rate,
            memory_bytes=2**34,
            memory_bandwidth_bytes_per_s=rate / 20,
            power_w=rng.uniform(10, 300),
            source="made up",
        )
        for index in range(rng.randint(1, 4))
    )


def random_graph(rng: random.Random, count: int) -> UnitGraph:
    """Return units of random cost, parameters, activations and cuts; sometimes the first and last share parameters."""
    tied = rng.random() < 0.3
    units = []
    for index in range(count):
        cut = int(rng.uniform(0.05, 2.0) * MIB)
        tensor = TensorSpec(name="x", shape_per_sample=(cut // 4,), dtype="float32", bytes_per_sample=cut)
        shared = ("table",) if tied and index in (0, count - 1) else ()
        units.append(
            Unit(
                name=f"u{index}",
                unit_class=f"c{index}",
                parameter_bytes=int(rng.uniform(0.2, 20) * MIB) + (8 * MIB if shared else 0),
                forward_flop_per_sample=rng.uniform(1, 10) * 1e9,
                outputs=() if index == count - 1 else (tensor,),
                activation_bytes_per_sample=int(rng.uniform(2, 20) * MIB),
                shared=shared,
            )
        )
    return UnitGraph(units=tuple(units), shared_bytes={"table": 8 * MIB} if tied else {})


def random_profile(seed: int, most_devices: int = 6, most_units: int = 10) -> tuple[Profile, bool]:
    """Return a profile of a random case, and whether its memory is tight."""
    rng = random.Random(seed)
    cluster = random_cluster(rng, most_devices)
    graph = random_graph(rng, rng.randint(4, most_units))
    tight = rng.random() < 0.33
    if tight:
        cluster = _tight(rng, cluster, graph)
    timings = _random_timings(rng, cluster, graph)
    provenance = Provenance(
        created="2025-01-01T00:00:00Z",
        spantrain_version="0",
        torch_version="0",
        machine="none",
        method="made up",
        compute_s=0.0,
        network_s=0.0,
    )
    profile = Profile(
        cluster=cluster,
        model=ModelSpec(name=f"random-{seed}", family="gpt2", config={}, dataset="stdlib-text", sequence_length=64),
        graph=graph,
        dtype="float32",
        timings=timings,
        links=links_of(cluster),
        scores=tuple(
            DeviceScore(
                device=device.name, score=cluster.kind_by_name[device.kind].peak_fp32_flop_per_s / 1e12, task_s={}
            )
            for device in cluster.devices
        ),
        provenance=provenance,
    )
    return profile, tight


def _random_timings(rng: random.Random, cluster: Cluster, graph: UnitGraph) -> tuple[UnitTiming, ...]:
    """Return the time of every unit on every kind: fixed costs and tastes of their own."""
    timings: list[UnitTiming] = []
    for kind in cluster.kinds:
        half = rng.uniform(0.1, 2.0)
        for unit in graph.units:
            taste = rng.uniform(0.8, 1.25)
            back = rng.uniform(0.8, 1.2)
            for samples in SAMPLES:
                one_s = unit.forward_flop_per_sample * (samples + half) * taste / (0.45 * kind.peak_fp32_flop_per_s)
                timings.append(
                    UnitTiming(
                        unit_class=unit.unit_class,
                        kind=kind.name,
                        dtype="float32",
                        samples=samples,
                        forward_s=one_s,
                        backward_input_s=one_s * back,
                        backward_weight_s=one_s * (2 - back),
                    )
                )
    return tuple(timings)


def links_of(cluster: Cluster) -> tuple[LinkMeasurement, ...]:
    """Return what measuring every pair of devices would give, without noise."""
    pairs = permutations((device.name for device in cluster.devices), 2)
    described = (LinkMeasurement.described(cluster, *pair) for pair in pairs)
    return tuple(replace(link, latency_s=link.latency_s + 1e-5, payload_bytes=2**22, rounds=3) for link in described)


def _tight(rng: random.Random, cluster: Cluster, graph: UnitGraph) -> Cluster:
    """Give each device room for a part of the model only: 0.3 to 1.5 times its even share, with two samples."""
    whole = 4 * graph.parameter_bytes + 2 * sum(unit.activation_bytes_per_sample for unit in graph.units)
    largest = max(4 * unit.parameter_bytes + 2 * unit.activation_bytes_per_sample for unit in graph.units)
    devices = tuple(
        Device(
            name=device.name,
            kind=device.kind,
            host=device.host,
            site=device.site,
            backend=device.backend,
            memory_bytes=int(largest + rng.uniform(0.6, 2.0) * whole / len(cluster.devices)),
        )
        for device in cluster.devices
    )
    return Cluster(
        name=cluster.name,
        kinds=cluster.kinds,
        sites=cluster.sites,
        hosts=cluster.hosts,
        devices=devices,
        links=cluster.links,
    )
