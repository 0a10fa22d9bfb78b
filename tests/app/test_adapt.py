"""The adapter of a run by its profile: memory is a limit, reports become advice, and who has none at all."""

import math
from dataclasses import replace

import pytest

from spantrain.adaptation.network_state import LinkState
from spantrain.app.adaptation.adapt import ProfileForecast, adviser_of
from spantrain.app.training.outcome import PlanChange, with_reasons
from spantrain.core.job import TrainJob
from spantrain.core.shares import StateSharding
from spantrain.core.span import equal_spans
from spantrain.core.speed import LinkReport, LinkVerdict
from spantrain.core.trace import Interval, Trace
from spantrain.formats.registry import WireFormat
from spantrain.runtime.control.requests import DeviceReport
from spantrain.schedule.dispatch.recut import halved
from testing.sites import CUT_BYTES, RATE, sites_cluster, sites_profile, two_stages

CLUSTER = sites_cluster()
PROFILE = sites_profile(CLUSTER)
PLAN = two_stages(CLUSTER, "a", "c")
SLOW = LinkState(speeds={("a", "c"): 0.5, ("c", "a"): 0.5})


def test_slow_links_make_a_step_longer_by_what_they_carry():
    forecast = ProfileForecast(PLAN, PROFILE, "adamw")
    calm_s, slow_s = (forecast.step_s(PLAN, state) for state in (LinkState(), SLOW))
    sent_s = PLAN.global_batch * CUT_BYTES / RATE
    assert sent_s * 0.9 < slow_s - calm_s <= 2.1 * sent_s
    rates = forecast.rates(PLAN, SLOW)
    assert rates["a", "c"] == pytest.approx(RATE / 2, rel=0.05)


def test_a_plan_that_does_not_fit_cannot_run():
    small = replace(CLUSTER, devices=tuple(replace(device, memory_bytes=700) for device in CLUSTER.devices))
    plan = two_stages(small, "a", "c")
    forecast = ProfileForecast(plan, sites_profile(small), "adamw")
    coarse = replace(plan, stages=tuple(replace(stage, micro_batches=equal_spans(8, 8)) for stage in plan.stages))
    assert forecast.step_s(plan, LinkState()) < math.inf
    assert forecast.step_s(coarse, LinkState()) == math.inf


def test_who_has_no_adviser():
    job = TrainJob(steps=1)
    assert adviser_of(PLAN, PROFILE, job) is not None
    assert adviser_of(PLAN, PROFILE, replace(job, adapter="off")) is None
    sharded = replace(PLAN, stages=tuple(replace(s, state_sharding=StateSharding.ZERO2) for s in PLAN.stages))
    assert adviser_of(sharded, PROFILE, job) is None


def test_reports_of_devices_become_advice():
    adviser = adviser_of(PLAN, PROFILE, TrainJob(steps=9, allow_wire=(WireFormat.BFLOAT16,)))
    assert adviser is not None

    def reports(part: float) -> dict[str, DeviceReport]:
        state = LinkState(speeds={("a", "c"): part, ("c", "a"): part})
        taken_s = ProfileForecast(PLAN, PROFILE, "adamw").step_s(PLAN, state)
        return {name: _report(peer, RATE * part, taken_s) for name, peer in (("a", "c"), ("c", "a"))}

    for step in range(3):
        assert adviser.advise(step, PLAN, reports(1.0)) is None
    assert adviser.advise(3, PLAN, reports(0.4)) is None
    advice = adviser.advise(4, PLAN, reports(0.4))
    assert advice is not None
    assert advice.plan.stages[0].wire_format is WireFormat.BFLOAT16
    assert "a->c" in advice.reason


def _report(peer: str, rate: float, taken_s: float) -> DeviceReport:
    link = LinkReport(
        peer=peer,
        verdict=LinkVerdict.CALM,
        bytes_per_s=rate,
        latency_s=None,
        queued_s=0.0,
        busy_s=taken_s,
        messages=8,
        confidence=1.0,
    )
    return DeviceReport(
        generation=0,
        step=0,
        loss_sum=None,
        grad_square=None,
        busy_s=1.0,
        peak_held_samples=8,
        duration_s=taken_s,
        links=(link,),
    )


def test_a_change_of_plan_is_a_moment_in_the_trace_with_its_reason():
    change = PlanChange(
        first_step=4, generation=1, reason="links at half", plan="plan-1.json", duration_s=0.1, moved_bytes=0
    )
    work = [
        Interval(device=device, lane="compute", name=name, step=step, start_s=start_s, end_s=start_s + 1)
        for device in "ac"
        for name, step, start_s in (("0F[0:8]", 3, 1.0), ("change to plan 1", 4, 2.0), ("0F[0:8]", 4, 3.0))
    ]
    trace = with_reasons(Trace(intervals=tuple(work), flows=(), clock="wall"), [change])
    for device in "ac":
        (moment,) = trace.of(device, "adapter")
        assert (moment.name, moment.step, moment.start_s, moment.duration_s) == ("plan 1", 4, 2.0, 0.0)
        assert moment.detail == {"reason": "links at half", "plan": "plan-1.json"}


def test_a_run_that_goes_on_knows_the_plan_for_calm_links():
    finer = replace(PLAN, stages=tuple(replace(s, micro_batches=halved(s.micro_batches)) for s in PLAN.stages))
    adviser = adviser_of(finer, PROFILE, TrainJob(steps=9), PLAN)
    assert adviser is not None
    taken_s = ProfileForecast(PLAN, PROFILE, "adamw").step_s(finer, LinkState())
    calm = {name: _report(peer, RATE, taken_s) for name, peer in (("a", "c"), ("c", "a"))}
    advice = [adviser.advise(step, finer, calm) for step in range(5)]
    assert advice[:3] == [None] * 3
    assert advice[3] is not None
    assert advice[3].plan.stages == PLAN.stages


def test_sums_of_replicas_take_longer_on_slow_links():
    pair = replace(PLAN.stages[0].replicas[0], devices=("c",), sample_share=0.5, in_flight_limit=8)
    first, last = PLAN.stages
    both = replace(first, end_unit=last.end_unit, replicas=(replace(first.replicas[0], sample_share=0.5), pair))
    alike = replace(PLAN, stages=(both,))
    forecast = ProfileForecast(PLAN, PROFILE, "adamw")
    assert forecast.step_s(alike, SLOW) > forecast.step_s(alike, LinkState())


def test_units_that_change_places_take_their_way_over_the_links():
    forecast = ProfileForecast(PLAN, PROFILE, "adamw")
    swapped = two_stages(CLUSTER, "c", "a")
    assert forecast.move_s(PLAN, PLAN, SLOW) == 0
    calm_s, slow_s = (forecast.move_s(PLAN, swapped, state) for state in (LinkState(), SLOW))
    assert calm_s > 3 * PROFILE.graph.units[0].parameter_bytes / RATE
    assert slow_s == pytest.approx(2 * calm_s, rel=0.1)
