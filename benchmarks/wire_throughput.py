"""A pipeline over a narrow link with each wire format: what `wire_formats.py` asks for the throughput."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model

CLUSTER = """
name: two-places
emulated_speed: 0.0005
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts: [{name: lab, backend: emulated, devices: {xavier-nx: 1}}]
  - name: home
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts: [{name: home, backend: emulated, devices: {xavier-nx: 1}}]
links:
  - {between: [lab, home], bandwidth: 20 Mbit/s, latency: 10 ms}
"""
MODEL, GLOBAL_BATCH, MICRO_BATCH = "efficientnet-tiny", 16, 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one format."""

    sent_as: str
    step_s: float
    samples_per_s: float
    bytes_per_step: float
    """Over the link, both ways: of samples, with the sums and the start of the run."""
    loss: float
    real_compute_ratio: float
    """The most of the two devices: well under 1, or the machine was too slow for what it stands for."""


def measure(rate_kbit_per_s: float, steps: int, forms: Sequence[WireFormat], folder: Path) -> list[Row]:
    """Train with each format on the same workers."""
    cluster = parse_cluster(CLUSTER, source="this benchmark")
    devices = tuple(device.name for device in cluster.devices)
    with open_session(cluster, devices, SessionOptions(), folder / "logs", SilentReporter()) as session:
        options = ProfileOptions(max_samples=MICRO_BATCH)
        profile = measure_profile(session, resolve_model(MODEL), options, SilentReporter())
        plan = _widest_cut(profile)
        # Narrow only now: measuring so slow a link would take minutes.
        assert session.testbed is not None
        for ends in (("lab", "home"), ("home", "lab")):
            session.testbed.shape(*ends, bandwidth_bytes_per_s=rate_kbit_per_s * 1e3 / 8)
        return [
            _run(session, _sent_as(plan, form, number), profile, steps, folder / form.value)
            for number, form in enumerate(forms, start=1)
        ]


def _widest_cut(profile: Profile) -> Plan:
    units = profile.graph.units
    cut = max(range(len(units) - 1), key=lambda index: units[index].cut_bytes_per_sample)
    edges = (0, cut + 1, len(units))
    stages = tuple(
        Stage(
            first_unit=edges[number],
            end_unit=edges[number + 1],
            replicas=(Replica(devices=(device.name,), sample_share=1.0, in_flight_limit=GLOBAL_BATCH),),
            micro_batches=equal_spans(GLOBAL_BATCH, MICRO_BATCH),
        )
        for number, device in enumerate(profile.cluster.devices)
    )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=GLOBAL_BATCH,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
    )


def _sent_as(plan: Plan, form: WireFormat, generation: int) -> Plan:
    first, last = plan.stages
    return replace(plan, stages=(replace(first, wire_format=form), last), generation=generation)


def _run(session: Session, plan: Plan, profile: Profile, steps: int, folder: Path) -> Row:
    request = TrainRequest(
        plan=plan,
        profile=profile,
        profile_path="",
        job=TrainJob(steps=steps, adapter="off"),
        out=folder,
        checkpoints=False,
    )
    outcome = train(session, request, StopRequest(), SilentReporter())
    row = Row(
        sent_as=plan.stages[0].wire_format.value,
        step_s=outcome.step_s_measured,
        samples_per_s=outcome.samples_per_s,
        bytes_per_step=sum(link.bytes_sent for link in outcome.links.values()) / steps,
        loss=outcome.losses[-1],
        real_compute_ratio=max(figures.real_compute_ratio for figures in outcome.devices.values()),
    )
    print(f"{row.sent_as:9} {row.step_s:7.3f} s a step, {row.bytes_per_step / 1e3:8.1f} kB", flush=True)
    return row
