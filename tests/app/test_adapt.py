"""The adapter of a run by its profile: memory is a limit, reports become advice, and who has none at all."""

import math
from dataclasses import replace

import pytest

from made_up_sites import CUT_BYTES, RATE, sites_cluster, sites_profile, two_stages
from spantrain.app.adapt import ProfileForecast, adviser_of
from spantrain.core.job import TrainJob
from spantrain.core.links import LinkReport, LinkVerdict
from spantrain.core.plan import StateSharding, WireFormat
from spantrain.core.spans import equal_spans
from spantrain.policy.adapter.state import LinkState
from spantrain.runtime.orders import StepReport

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

    def reports(part: float) -> dict[str, StepReport]:
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


def _report(peer: str, rate: float, taken_s: float) -> StepReport:
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
    return StepReport(
        generation=0,
        step=0,
        loss_sum=None,
        grad_square=None,
        busy_s=1.0,
        peak_held_samples=8,
        duration_s=taken_s,
        links=(link,),
    )
