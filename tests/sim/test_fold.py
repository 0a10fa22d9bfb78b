"""A plan of like pipelines, run as one of each sort, takes as long as the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile, UnitTiming
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.fold import fold, simulate_whole
from testing.profiles import PROVENANCE

UNITS = 6


def kind(name: str) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_fp16_flop_per_s=1.0,
        peak_fp32_flop_per_s=1.0,
        memory_bytes=2**40,
        memory_bandwidth_bytes_per_s=1.0,
        power_w=1.0,
        source="a test",
    )


def cluster(
    stages: int, width: int, *, per_host: int = 1, bandwidth: float = 1e6, line: float | None = None
) -> Cluster:
    """Devices `s0r0` and so on, per_host replicas of a stage in a host; the last stage is of another kind.

    With a line, it is on another site behind that.
    """
    devices, hosts = [], []
    for stage in range(stages):
        last = stages > 1 and stage == stages - 1
        site = "far" if last and line else "near"
        for first in range(0, width, per_host):
            names = tuple(f"s{stage}r{number}" for number in range(first, min(first + per_host, width)))
            hosts.append(Host(name=f"h{stage}-{first}", site=site, devices=names))
            devices += [
                Device(
                    name=name,
                    kind="slow" if last else "fast",
                    host=f"h{stage}-{first}",
                    site=site,
                    backend="emulated",
                    memory_bytes=2**40,
                )
                for name in names
            ]
    sites = tuple(
        Site(
            name=name,
            hosts=tuple(host.name for host in hosts if host.site == name),
            bandwidth_bytes_per_s=bandwidth,
            latency_s=1e-3,
        )
        for name in dict.fromkeys(host.site for host in hosts)
    )
    ways = (("near", "far"), ("far", "near")) if line and len(sites) > 1 else ()
    return Cluster(
        name="made up",
        kinds=(kind("fast"), kind("slow")),
        sites=sites,
        hosts=tuple(hosts),
        devices=tuple(devices),
        links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=line or 1.0, latency_s=1e-2) for a, b in ways),
    )


def profile(of: Cluster, shared: bool = False) -> Profile:
    tensor = TensorSpec(name="x", shape_per_sample=(100,), dtype="float32", bytes_per_sample=400)
    units = tuple(
        Unit(
            name=f"u{index}",
            unit_class="block",
            parameter_bytes=4000,
            forward_flop_per_sample=1.0,
            outputs=(tensor,) if index < UNITS - 1 else (),
            activation_bytes_per_sample=800,
            shared=("w",) if shared and index in (0, UNITS - 1) else (),
        )
        for index in range(UNITS)
    )
    timings = tuple(
        UnitTiming(
            unit_class="block",
            kind=name,
            dtype="float32",
            samples=1,
            forward_s=factor * 1e-3,
            backward_input_s=factor * 1.1e-3,
            backward_weight_s=factor * 0.9e-3,
        )
        for name, factor in (("fast", 1.0), ("slow", 1.7))
    )
    return Profile(
        cluster=of,
        model=ModelSpec(name="none", family="gpt2", config={}, dataset="none"),
        graph=UnitGraph(units=units, shared_bytes={"w": 4000} if shared else {}),
        dtype="float32",
        timings=timings,
        links=(),
        scores=(),
        provenance=PROVENANCE,
        links_described=True,
    )


def plan(of: Profile, stages: int, width: int, size: int, count: int, schedule: str, more: int = 0) -> Plan:
    """Stages of equal units; every replica may hold `more` samples besides those that 1F1B needs."""
    each = UNITS // stages
    batch = size * width * count
    return Plan(
        cluster=of.cluster,
        model=of.model,
        global_batch=batch,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=index * each,
                end_unit=UNITS if index == stages - 1 else (index + 1) * each,
                micro_batches=equal_spans(batch, size * width),
                replicas=tuple(
                    Replica(
                        devices=(f"s{index}r{number}",),
                        sample_share=1.0,
                        in_flight_limit=size * (stages - index) + more,
                    )
                    for number in range(width)
                ),
            )
            for index in range(stages)
        ),
        schedule=schedule,
    )


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 3),
    width=st.integers(2, 5),
    size=st.integers(1, 3),
    count=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe", "compact", "critical-path"]),
    more=st.integers(0, 9),
    shared=st.booleans(),
)
def test_one_pipeline_is_as_good_as_all(stages, width, size, count, schedule, more, shared):
    """Each pipeline has hosts of its own."""
    more = size * count if schedule == "gpipe" else more
    measured = profile(cluster(stages, width), shared)
    made = plan(measured, stages, width, size, count, schedule, more)
    costs = ProfileCosts(measured, made)
    whole = simulate(made, costs, steps=1, options=SimulationOptions(trace=False))
    folded = simulate_whole(made, costs)
    assert fold(made, costs).alike == (tuple(range(width)),)
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert folded.samples_per_s == pytest.approx(whole.samples_per_s, rel=1e-9)
    assert folded.utilisation == pytest.approx(whole.utilisation, rel=1e-9)
    assert folded.bubble_ratio == pytest.approx(whole.bubble_ratio, rel=1e-6, abs=1e-9)
    assert folded.link_bytes == whole.link_bytes


@pytest.mark.parametrize("per_host", [2, 4])
def test_pipelines_that_share_a_port_get_a_part_of_it(per_host):
    measured = profile(cluster(3, 4, per_host=per_host, bandwidth=4e5))
    made = plan(measured, 3, 4, 2, 6, "1f1b")
    costs = ProfileCosts(measured, made)
    whole = simulate(made, costs, steps=1, options=SimulationOptions(trace=False))
    assert simulate_whole(made, costs).step_s == pytest.approx(whole.step_s, rel=0.02)


def test_a_narrow_line_between_sites_is_shared_by_all():
    measured = profile(cluster(2, 4, line=2e5))
    made = plan(measured, 2, 4, 2, 8, "critical-path", more=8)
    costs = ProfileCosts(measured, made)
    whole = simulate(made, costs, steps=1, options=SimulationOptions(trace=False))
    assert simulate_whole(made, costs).step_s == pytest.approx(whole.step_s, rel=0.05)


def test_replicas_with_unequal_shares_are_run_as_they_are():
    measured = profile(cluster(2, 2))
    made = plan(measured, 2, 2, 2, 4, "critical-path", more=8)
    stage = made.stages[0]
    uneven = Stage(
        first_unit=stage.first_unit,
        end_unit=stage.end_unit,
        micro_batches=stage.micro_batches,
        replicas=(
            Replica(devices=("s0r0",), sample_share=3.0, in_flight_limit=16),
            Replica(devices=("s0r1",), sample_share=1.0, in_flight_limit=16),
        ),
    )
    other = Plan(
        cluster=made.cluster,
        model=made.model,
        global_batch=made.global_batch,
        dtype=made.dtype,
        stages=(uneven, made.stages[1]),
        schedule=made.schedule,
    )
    costs = ProfileCosts(measured, other)
    assert fold(other, costs) is None
    assert simulate_whole(other, costs) == simulate(other, costs, steps=1, options=SimulationOptions(trace=False))
