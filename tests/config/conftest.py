"""Small real artefacts that several tests read and write."""

from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import DeviceScore, LinkMeasurement, Profile, Provenance, UnitTiming
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, Unit, UnitGraph


def _profile() -> Profile:
    return Profile(
        cluster=load_preset("laptop"),
        model=ModelSpec(name="gpt2-tiny", family="gpt2", config={"n_layer": 2}, dataset="stdlib-text"),
        graph=UnitGraph(
            units=(
                Unit(
                    name="h.0",
                    unit_class="block",
                    parameter_bytes=100,
                    forward_flop_per_sample=1e6,
                    outputs=(),
                    activation_bytes_per_sample=10,
                ),
            ),
            shared_bytes={},
        ),
        dtype="float32",
        timings=(
            UnitTiming(
                unit_class="block",
                kind="tx2",
                dtype="float32",
                samples=4,
                forward_s=0.1,
                backward_input_s=0.1,
                backward_weight_s=0.1,
            ),
        ),
        links=(
            LinkMeasurement(
                source="lab-0",
                target="home-nano",
                latency_s=0.01,
                bandwidth_bytes_per_s=6e6,
                payload_bytes=1 << 20,
                rounds=3,
            ),
        ),
        scores=(DeviceScore(device="lab-0", score=1.0, task_s={"mlp": 0.2}),),
        provenance=Provenance(
            created="2030-01-01T00:00:00Z",
            spantrain_version="0.1.0",
            torch_version="2.13",
            machine="x",
            method="measured",
            compute_s=1.0,
            network_s=1.0,
        ),
    )


@pytest.fixture
def profile() -> Profile:
    return _profile()


@pytest.fixture
def plan() -> Plan:
    profile = _profile()
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=16,
        dtype="float32",
        stages=(
            Stage(
                first_unit=0,
                end_unit=1,
                replicas=(Replica(devices=("lab-0",), sample_share=1.0, in_flight_limit=16),),
                micro_batches=(Span(0, 8), Span(8, 16)),
            ),
        ),
        schedule="compact",
    )


@pytest.fixture
def many_links(profile: Profile) -> Profile:
    """A profile of the 22-device cluster's size."""
    cluster = load_preset("spantrain-setting-1")
    names = [device.name for device in cluster.devices]
    link = profile.links[0]
    return replace(
        profile,
        cluster=cluster,
        links=tuple(replace(link, source=a, target=b) for a in names for b in names if a != b),
        timings=tuple(replace(profile.timings[0], kind="rtx-3080", samples=n) for n in range(1, 1000)),
        scores=(),
    )


@pytest.fixture
def examples() -> Path:
    return Path(__file__).parents[2] / "examples"
