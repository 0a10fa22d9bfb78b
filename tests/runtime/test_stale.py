"""Steps that overlap: any plan's losses are those of one process with weights one step old."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.schedule.registry import schedule_names
from testing.plans import stage_and_replica
from testing.runtime.runs import OldWeights, OneProcess
from testing.runtime.sessions import train_in_threads

BATCH = 6
JOB = TrainJob(steps=7, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5, staleness=1, adapter="off")
SPANS = [[Span(0, 2), Span(2, 4), Span(4, 6)], [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]


def wanted(plan, job: TrainJob = JOB) -> list[float]:
    return OldWeights(plan.model, job, plan.global_batch).train(0, job.steps)


@pytest.fixture(scope="module")
def plan(make_plan, spec_of):
    """Three stages, two unequal replicas in the middle; the first and the last share the embedding."""
    return make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], SPANS, "critical-path")


def test_losses_are_those_of_one_process_with_old_weights(plan):
    ran = train_in_threads(plan, JOB)
    assert ran.losses == pytest.approx(wanted(plan), rel=1e-5)
    exact = OneProcess(plan.model, JOB, BATCH).train(0, JOB.steps)
    assert ran.losses[:1] == pytest.approx(exact[:1], rel=1e-5)
    assert ran.losses[2:] != pytest.approx(exact[2:], rel=1e-4)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan(data, plans):
    plan = data.draw(plans(("gpt2", "resnet")))
    ran = train_in_threads(plan, JOB)
    assert ran.losses == pytest.approx(wanted(plan), rel=1e-4)
    for outcome in ran.outcomes:
        for device, held in outcome.peak_held_samples.items():
            stage, replica = stage_and_replica(plan, device)
            assert held <= plan.stages[stage].replicas[replica].in_flight_limit


def test_steps_do_overlap(plan):
    """On some device a step begins before the step before is agreed on."""
    ran = train_in_threads(plan, replace(JOB, trace_steps=7))
    traces = [result.trace for result in ran.results.values()]
    intervals = [i for trace in traces for i in trace.intervals if i.lane == "compute" and i.name[1] in "FIWB"]
    closed_s = {outcome.step: outcome.closed_s for outcome in ran.outcomes}
    begun_s = {step: min(i.start_s for i in intervals if i.step == step) for step in range(JOB.steps)}
    assert any(begun_s[step + 1] < closed_s[step] for step in range(JOB.steps - 1))
    assert all(begun_s[step + 2] > closed_s[step] for step in range(JOB.steps - 2))


@pytest.mark.parametrize("evaluate_every", [1, 2, 3])
def test_where_it_evaluates_everything_gets_quiet_and_begins_anew(evaluate_every, plan):
    job = replace(JOB, evaluate_every=evaluate_every)
    ran = train_in_threads(plan, job)
    assert ran.losses == pytest.approx(wanted(plan, job), rel=1e-5)
    assert len(ran.held_out) == 1 + JOB.steps // evaluate_every + (JOB.steps % evaluate_every > 0)
    if evaluate_every == 1:
        assert ran.losses == pytest.approx(OneProcess(plan.model, job, BATCH).train(0, job.steps), rel=1e-5)


@pytest.mark.checkpoint
def test_a_run_that_goes_on_from_a_checkpoint_does_what_the_first_one_did(plan, tmp_path):
    job = replace(JOB, checkpoint_every=3)
    whole = train_in_threads(plan, job, out=tmp_path / "whole")
    assert whole.losses == pytest.approx(wanted(plan, job), rel=1e-5)
    assert [manifest.step for manifest in whole.manifests] == [3, 6, 7]
    folder = tmp_path / "whole" / "checkpoint" / "step-3"
    assert folder.is_dir(), list((tmp_path / "whole" / "checkpoint").iterdir())
    later = train_in_threads(replace(plan, generation=1), job, content=whole.manifests[0].content, folder=folder)
    assert later.losses == pytest.approx(whole.losses[3:], rel=1e-6)


@pytest.mark.parametrize("schedule", schedule_names())
def test_any_schedule(schedule, plan):
    even = replace(plan, stages=tuple(replace(s, micro_batches=tuple(SPANS[0])) for s in plan.stages))
    ran = train_in_threads(replace(even, schedule=schedule), JOB)
    assert ran.losses == pytest.approx(wanted(plan), rel=1e-5)
