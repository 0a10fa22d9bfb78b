"""A profile small enough to reckon with by hand: three units, two sites, one far device."""

import pytest

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile, UnitTiming
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from testing.profiles import PROVENANCE, exact_links

MIB = 2**20


def _unit(index: int, last: bool) -> Unit:
    tensor = TensorSpec(name="x", shape_per_sample=(250,), dtype="float32", bytes_per_sample=1000)
    return Unit(
        name=f"u{index}",
        unit_class="first" if index == 0 else "rest",
        parameter_bytes=4000,
        forward_flop_per_sample=1e6,
        outputs=() if last else (tensor,),
        activation_bytes_per_sample=5000,
        shared=("tied",) if index in (0, 2) else (),
    )


def _timing(unit_class: str, kind: str, samples: int, forward_s: float) -> UnitTiming:
    return UnitTiming(
        unit_class=unit_class,
        kind=kind,
        dtype="float32",
        samples=samples,
        forward_s=forward_s,
        backward_input_s=2 * forward_s,
        backward_weight_s=forward_s,
    )


@pytest.fixture(scope="module")
def cost_cluster() -> Cluster:
    places = {"a0": ("near", "fast"), "a1": ("near", "fast"), "b0": ("far", "slow")}
    return Cluster(
        name="three",
        kinds=tuple(
            DeviceKind(
                name=name,
                peak_fp16_flop_per_s=1e12,
                peak_fp32_flop_per_s=1e12,
                memory_bytes=1024 * MIB,
                memory_bandwidth_bytes_per_s=1e11,
                power_w=10,
                source="made up",
            )
            for name in ("fast", "slow")
        ),
        sites=(
            Site(name="near", hosts=("h-a0", "h-a1"), bandwidth_bytes_per_s=1e8, latency_s=1e-3),
            Site(name="far", hosts=("h-b0",), bandwidth_bytes_per_s=1e8, latency_s=1e-3),
        ),
        hosts=tuple(Host(name=f"h-{name}", site=site, devices=(name,)) for name, (site, _) in places.items()),
        devices=tuple(
            Device(name=name, kind=kind, host=f"h-{name}", site=site, backend="emulated", memory_bytes=1024 * MIB)
            for name, (site, kind) in places.items()
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e6, latency_s=1e-2)
            for a, b in (("near", "far"), ("far", "near"))
        ),
    )


@pytest.fixture(scope="module")
def cost_profile(cost_cluster: Cluster) -> Profile:
    """Forward on `fast`: 1 ms + 1 ms per sample up to 4, then 2 ms per sample; `slow`: 10 ms per 2 samples."""
    timings = [_timing(unit_class, "slow", 2, 0.01) for unit_class in ("first", "rest")]
    for unit_class in ("first", "rest"):
        timings += [_timing(unit_class, "fast", n, s) for n, s in ((2, 0.003), (4, 0.005), (8, 0.013))]
    return Profile(
        cluster=cost_cluster,
        model=ModelSpec(name="three", family="gpt2", config={}, dataset="digits"),
        graph=UnitGraph(units=tuple(_unit(i, i == 2) for i in range(3)), shared_bytes={"tied": 1000}),
        dtype="float32",
        timings=tuple(timings),
        links=exact_links(cost_cluster, payload_bytes=MIB),
        scores=(),
        provenance=PROVENANCE,
    )


@pytest.fixture
def make_cost_plan(cost_cluster: Cluster):
    """Build a plan from `((end_unit, {device: share}), ...)`."""

    def build(*parts: tuple[int, dict[str, float]], batch: int = 8, size: int = 2, limit: int = 8) -> Plan:
        stages, first = [], 0
        for end, devices in parts:
            replicas = tuple(
                Replica(devices=(name,), sample_share=share, in_flight_limit=limit) for name, share in devices.items()
            )
            spans = equal_spans(batch, size)
            stages.append(Stage(first_unit=first, end_unit=end, replicas=replicas, micro_batches=spans))
            first = end
        return Plan(
            cluster=cost_cluster,
            model=ModelSpec(name="three", family="gpt2", config={}, dataset="digits"),
            global_batch=batch,
            dtype="float32",
            stages=tuple(stages),
            schedule="critical-path",
        )

    return build
