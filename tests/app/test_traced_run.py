"""A run on the testbed whose links follow a trace: what it leaves, and that the simulator says the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.simulation.simulate import simulate_traced
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.network_traces import NetworkTrace, network_trace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.speed import SpeedTrace
from spantrain.models.catalog.catalog import resolve_model
from spantrain.testbed.testbed import why_unavailable

BATCH, STEPS = 8, 6
SLOW_LINK_BYTES_PER_S = 2e6 / 8
NOISE_RATIO = 0.1


@pytest.fixture(scope="module")
def profile(law_profile) -> Profile:
    """Two of the laptop preset's devices, at two sites with a link so slow that it decides a step's time."""
    cluster = load_preset("laptop")
    links = tuple(replace(link, bandwidth_bytes_per_s=SLOW_LINK_BYTES_PER_S) for link in cluster.links)
    return law_profile(replace(cluster, links=links, emulated_speed=0.004), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plan(profile) -> Plan:
    units = len(profile.graph.units)
    bounds = ((0, units // 2, "lab-0"), (units // 2, units, "office-nx"))
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=BATCH,
        dtype="float32",
        stages=tuple(
            Stage(
                first_unit=first,
                end_unit=end,
                replicas=(Replica(devices=(device,), sample_share=1.0, in_flight_limit=BATCH),),
                micro_batches=equal_spans(BATCH, 2),
            )
            for first, end, device in bounds
        ),
        schedule="critical-path",
    )


def trained(plan: Plan, profile: Profile, trace: NetworkTrace, folder: Path) -> TrainOutcome:
    request = TrainRequest(
        plan=plan,
        profile=profile,
        profile_path="",
        job=TrainJob(steps=STEPS),
        out=folder,
        checkpoints=False,
        options=RunOptions(network_trace=trace),
    )
    with open_session(plan.cluster, plan.devices, SessionOptions(), folder / "logs", SilentReporter()) as session:
        return train(session, request, StopRequest(), SilentReporter())


def test_only_links_that_a_plan_uses_matter(plan, profile) -> None:
    calm = simulate_traced(plan, profile, 3, {})
    elsewhere = {"lab->home": SpeedTrace(changes=((0.0, 0.01),))}
    assert simulate_traced(plan, profile, 3, elsewhere).step_ends_s == calm.step_ends_s
    halved = {"lab->office": SpeedTrace(changes=((0.0, 0.5),))}
    assert simulate_traced(plan, profile, 3, halved).step_ends_s[0] > calm.step_ends_s[0]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_an_outage_loses_no_step_and_steps_end_no_sooner_than_simulated(plan, profile, tmp_path) -> None:
    """How little later they end is for benchmarks/network_traces.py to show: a crowded machine computes for longer."""
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    trace = network_trace("outage-4:from=30%")
    outcome = trained(plan, profile, trace, tmp_path)
    figures = outcome.network_trace
    assert figures is not None
    assert len(outcome.losses) == len(figures.step_ends_s) == len(figures.predicted_step_ends_s) == STEPS
    assert [part for _, part in figures.bytes_per_s["lab->office"]] == [
        SLOW_LINK_BYTES_PER_S, 0.0, SLOW_LINK_BYTES_PER_S,
    ]  # fmt: skip
    assert network_trace(figures.file).on(plan.cluster, 1.0) == trace.on(plan.cluster, figures.run_s)
    assert figures.predicted_step_ends_s[-1] >= figures.run_s + 3.0
    for measured_s, predicted_s in zip(figures.step_ends_s, figures.predicted_step_ends_s, strict=True):
        assert measured_s >= (1 - NOISE_RATIO) * predicted_s
