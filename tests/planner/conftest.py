"""Profiles made up from data sheets: no measuring, no torch."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.config.cluster_file import load_preset
from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.profile import DeviceScore, Profile, UnitTiming
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from testing.profiles import PROVENANCE, exact_links

SAMPLES = (1, 2, 4, 8, 16, 32)


def gpt_graph(blocks: int = 12, hidden: int = 128, sequence: int = 64, vocabulary: int = 256) -> UnitGraph:
    """A chain like GPT-2's: embedding, blocks, head, with the embedding shared by the first and the last."""

    def outputs() -> tuple[TensorSpec, ...]:
        return (
            TensorSpec(
                name="hidden",
                shape_per_sample=(sequence, hidden),
                dtype="float32",
                bytes_per_sample=4 * sequence * hidden,
            ),
        )

    def unit(name: str, unit_class: str, parameters: int, flop: float, held: int, **more: object) -> Unit:
        return Unit(
            name=name,
            unit_class=unit_class,
            parameter_bytes=4 * parameters,
            forward_flop_per_sample=flop,
            activation_bytes_per_sample=held * 4 * sequence * hidden,
            outputs=more.get("outputs", outputs()),  # type: ignore[arg-type]
            shared=more.get("shared", ()),  # type: ignore[arg-type]
        )

    table = vocabulary * hidden
    return UnitGraph(
        units=(
            unit("wte", "embedding", table, 0.0, 1, shared=("wte",)),
            *(unit(f"h.{index}", "block", 12 * hidden**2, 24.0 * hidden**2 * sequence, 16) for index in range(blocks)),
            unit("head", "head", table, 2.0 * table * sequence, 4, outputs=(), shared=("wte",)),
        ),
        shared_bytes={"wte": 4 * table},
    )


def profile_of(
    cluster: Cluster, graph: UnitGraph, *, noise: float = 0.0, seed: int = 0, dtype: str = "float32"
) -> Profile:
    """What a profiler would measure of emulated devices: the analytic law, the description's links, and noise."""
    rng = random.Random(seed)

    def off() -> float:
        return 1 + rng.uniform(-noise, noise)

    links = tuple(
        replace(link, latency_s=link.latency_s * off() + 1e-5, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * off())
        for link in exact_links(cluster, payload_bytes=2**22, rounds=3)
    )
    scores = tuple(
        DeviceScore(
            device=device.name, score=cluster.kind_by_name[device.kind].peak_fp32_flop_per_s / 1e12 * off(), task_s={}
        )
        for device in cluster.devices
    )
    return Profile(
        cluster=cluster,
        model=ModelSpec(name="made-up", family="gpt2", config={}, dataset="stdlib-text", sequence_length=64),
        graph=graph,
        dtype=dtype,
        timings=_timings_by_law(cluster, graph, dtype),
        links=links,
        scores=scores,
        provenance=PROVENANCE,
    )


def _timings_by_law(cluster: Cluster, graph: UnitGraph, dtype: str) -> tuple[UnitTiming, ...]:
    timings = []
    classes = {unit.unit_class: unit for unit in graph.units}
    for kind in {device.kind: cluster.kind_by_name[device.kind] for device in cluster.devices}.values():
        law = AnalyticLaw(kind=kind, speed=cluster.emulated_speed, dtype=dtype)
        for unit in classes.values():
            for samples in SAMPLES:
                f, i, w = (law.seconds(unit, op, samples) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
                timings.append(
                    UnitTiming(
                        unit_class=unit.unit_class,
                        kind=kind.name,
                        dtype=dtype,
                        samples=samples,
                        forward_s=f,
                        backward_input_s=i,
                        backward_weight_s=w,
                    )
                )
    return tuple(timings)


def small_cluster(
    sites: dict[str, dict[str, float]],
    *,
    bandwidth: float = 12.5e6,
    latency_s: float = 5e-3,
    memory_bytes: int = 8 * 2**30,
) -> Cluster:
    """Sites of devices, each of a kind of its own speed (TFLOPS); `sites[site][device] = speed`."""
    speeds = sorted({speed for devices in sites.values() for speed in devices.values()})
    return Cluster(
        name="small",
        kinds=tuple(
            DeviceKind(
                name=f"kind-{speed:g}",
                peak_fp16_flop_per_s=2e12 * speed,
                peak_fp32_flop_per_s=1e12 * speed,
                memory_bytes=memory_bytes,
                memory_bandwidth_bytes_per_s=1e12,
                power_w=10,
                source="made up",
            )
            for speed in speeds
        ),
        sites=tuple(
            Site(name=site, hosts=tuple(f"h-{d}" for d in devices), bandwidth_bytes_per_s=125e6, latency_s=2e-4)
            for site, devices in sites.items()
        ),
        hosts=tuple(Host(name=f"h-{d}", site=site, devices=(d,)) for site, devices in sites.items() for d in devices),
        devices=tuple(
            Device(
                name=d, kind=f"kind-{speed:g}", host=f"h-{d}", site=site, backend="emulated", memory_bytes=memory_bytes
            )
            for site, devices in sites.items()
            for d, speed in devices.items()
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
            for a in sites
            for b in sites
            if a != b
        ),
    )


@pytest.fixture(scope="session")
def make_graph() -> Callable[..., UnitGraph]:
    return gpt_graph


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., Profile]:
    return profile_of


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    return small_cluster


@pytest.fixture(scope="session")
def preset_profile() -> Callable[..., Profile]:
    def build(name: str, **more: object) -> Profile:
        graph = more.pop("graph", None) or gpt_graph()
        return profile_of(load_preset(name), graph, **more)  # type: ignore[arg-type]

    return build
