"""Adapters where devices share their sites' lines: calm links stay calm, slow ones are seen, and their end is, too.

Three places, two replicas in each of the first two: messages of several devices meet on a line at some times and not at
others, so the rate of each pair of devices changes within a step though no link does.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from spantrain.adaptation.network_state import LinkState
from spantrain.adaptation.registry import make_boundary
from spantrain.app.adaptation.adapt import ProfileForecast, adviser_of
from spantrain.app.profiling.describe import described_profile
from spantrain.app.simulation.adapter import simulate_adapter
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import equal_spans
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import costs_of
from spantrain.planner.request import Constraints, JobSpec
from spantrain.sim.adaptive import AdaptedStep, simulate_adapting

STEPS = 24
PROFILE = described_profile(replace(load_preset("laptop"), emulated_speed=0.006), resolve_model("gpt2-tiny"))


def stage(units: tuple[int, int], size: int, *replicas: tuple[Sequence[str], float, int]) -> Stage:
    """Units from one up to another, micro-batches of a size, and for each replica devices, share and limit."""
    return Stage(
        first_unit=units[0],
        end_unit=units[1],
        replicas=tuple(
            Replica(
                devices=tuple(devices), sample_share=share, in_flight_limit=limit, tp_shares=(2.81, 1.0)[: len(devices)]
            )
            for devices, share, limit in replicas
        ),
        micro_batches=equal_spans(64, size),
    )


PLAN = Plan(
    cluster=PROFILE.cluster,
    model=PROFILE.model,
    global_batch=64,
    dtype="float32",
    stages=(
        stage((0, 7), 16, (["lab-0"], 4, 32), (["lab-1"], 4, 32)),
        stage((7, 11), 8, (["office-nx"], 5, 40), (["office-tx2"], 3, 24)),
        stage((11, 14), 4, (["home-tx2", "home-nano"], 8, 64)),
    ),
    schedule="critical-path",
)


def followed(adapter: str, trace: str) -> tuple[AdaptedStep, ...]:
    forecast = ProfileForecast(PLAN, PROFILE, "adamw")
    calm_s = STEPS * forecast.step_s(PLAN, LinkState())
    return simulate_adapting(
        PLAN,
        lambda plan: costs_of(plan, PROFILE),
        steps=STEPS,
        link_speed=network_trace(trace).on(PLAN.cluster, calm_s),
        boundary=make_boundary(adapter, PLAN, forecast),
        local=adapter,
        move_s=forecast.move_s,
    )


@pytest.mark.parametrize("adapter", ["paper", "auto"])
def test_calm_links_are_left_alone(adapter):
    done = followed(adapter, "drop-50:from=200%,until=201%")
    assert not any(step.recuts for step in done)
    reasons = [step.reason for step in done if step.reason]
    assert reasons == (["small ones at the end of the step"] if adapter == "paper" else [])


def test_the_papers_adapter_fills_with_small_ones_while_links_are_poor_and_is_back_when_they_are_good():
    done = followed("paper", "drop-50")
    first, *changes = [step for step in done if step.reason]
    assert first.step == 1
    assert [("poor link" in step.reason) for step in changes] == [True, False]
    assert sum(step.recuts for step in done[7:16]) > 20, "delayed sends"
    assert not any(step.recuts for step in done[-4:])
    assert done[-1].step_s == pytest.approx(done[1].step_s, rel=0.01)
    assert done[-1].plan.stages == done[1].plan.stages


def test_auto_is_faster_than_doing_nothing_while_links_are_slow_and_as_fast_when_they_are_not():
    done, off = followed("auto", "drop-50"), followed("off", "drop-50")
    assert done[-1].begun_s < 0.99 * off[-1].begun_s
    assert done[-1].step_s <= 1.005 * off[-1].step_s
    assert done[-1].plan.stages == PLAN.stages


def test_devices_with_several_stages_get_another_order_while_links_are_slow_and_the_first_one_behind_it():
    options = PlanOptions(
        constraints=Constraints(leave_out=("lab-1", "office-tx2", "home-nano")), strategies=("interleaved",)
    )
    plan = make_plan(PROFILE, JobSpec(global_batch=48), options).plan
    assert plan.interleaved
    assert adviser_of(plan, PROFILE, TrainJob(steps=STEPS)) is not None, "in a real run, too"
    off, done = (
        simulate_adapter(plan, PROFILE, network_trace("drop-70"), adapter=name, steps=STEPS, optimizer="adamw")
        for name in ("off", "auto")
    )
    reasons = [step.reason for step in done.steps if step.reason]
    assert "%: micro-batches and order for these links: " in reasons[0], "cuts stay"
    assert reasons[-1] == "links are as planned again: back to the plan made for them"
    assert done.total_s < 0.99 * off.total_s
    assert done.steps[-1].step_s == pytest.approx(off.steps[-1].step_s, rel=1e-6)
