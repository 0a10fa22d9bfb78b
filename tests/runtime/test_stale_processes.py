"""Real worker processes whose steps overlap: the losses of one process with old weights; stop, resume, refusals."""

import itertools
from dataclasses import replace

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest, resumed_run
from spantrain.app.training.run_record import read_run_record
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.validate_run import validate_run
from spantrain.config.artefacts import write_profile
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import PlanError
from testing.runtime.runs import OldWeights

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]

BATCH = 6
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(
    steps=12,
    seed=5,
    learning_rate=0.02,
    warmup_steps=3,
    max_grad_norm=0.5,
    evaluate_every=8,
    staleness=1,
    adapter="off",
)
GENERATIONS = itertools.count(1)


@pytest.fixture(scope="module")
def plan(make_plan, spec_of):
    """Two replicas in the middle; the first and the last stage share the embedding."""
    return make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [2, 1], [1]], [THIRDS] * 3, "critical-path")


@pytest.fixture(scope="module")
def session(tmp_path_factory, plan):
    logs = tmp_path_factory.mktemp("logs")
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), logs, SilentReporter()) as opened:
        yield opened


@pytest.fixture
def request_of(plan, law_profile, tmp_path):
    def request(job: TrainJob, under=plan) -> TrainRequest:
        profile = law_profile(under.cluster, under.model, under.dtype)
        write_profile(profile, tmp_path / "profile.json")
        return TrainRequest(
            plan=under, profile=profile, profile_path=str(tmp_path / "profile.json"), job=job,
            out=tmp_path / "run",
        )  # fmt: skip

    return request


def run(session, request: TrainRequest, listener=None):
    stop = StopRequest()
    listener = listener or SilentReporter()
    listener.stop = stop
    request = replace(request, plan=replace(request.plan, generation=next(GENERATIONS)))
    return train(session, request, stop, listener)


def test_losses_are_those_of_one_process_with_old_weights(session, plan, request_of, tmp_path):
    torch.set_num_threads(1)
    outcome = run(session, request_of(JOB))
    wanted = OldWeights(plan.model, JOB, BATCH).train(0, JOB.steps)
    assert outcome.losses == pytest.approx(wanted, abs=1e-4)
    assert [entry.steps_done for entry in outcome.heldout_losses] == [0, 8, 12]
    assert all(figures.peak_held_samples <= 2 * BATCH for figures in outcome.devices.values())
    for figures in outcome.devices.values():  # real devices are not as fast as the law says, so messages wait otherwise
        assert 0.9 < figures.peak_bytes / figures.peak_bytes_predicted < 1.5
    assert read_run_record(tmp_path / "run").staleness == 1
    assert validate_run(tmp_path / "run").step_s_predicted == outcome.step_s_predicted

    longer = replace(JOB, checkpoint_every=12)
    rest = run(session, resumed_run(tmp_path / "run", 16, tmp_path / "rest", functions=()))
    assert rest.losses == pytest.approx(OldWeights(plan.model, longer, BATCH).train(0, 16), abs=1e-4)


class _StopsAfterThree(SilentReporter):
    def step(self, outcome, _metrics: object, total_steps: int) -> None:
        if outcome.step == 3:
            self.stop.ask()


def test_a_stop_lets_the_steps_that_have_begun_end(session, plan, request_of, tmp_path):
    torch.set_num_threads(1)
    job = replace(JOB, steps=10**6, evaluate_every=0)
    outcome = run(session, request_of(job), _StopsAfterThree())
    assert outcome.interrupted
    assert outcome.steps >= 5
    assert outcome.losses == pytest.approx(OldWeights(plan.model, job, BATCH).train(0, outcome.steps), abs=1e-4)
    assert (tmp_path / "run/checkpoint/latest").read_text().strip() == f"step-{outcome.steps}"


def test_what_does_not_go_together_is_refused_in_one_message(session, plan, request_of):
    first, middle, last = plan.stages
    one, other = middle.replicas
    group = replace(one, devices=(*one.devices, *other.devices), tp_shares=(1.0, 1.0), sample_share=1.0)
    divided = replace(plan, dtype="float16", stages=(first, replace(middle, replicas=(group,)), last))
    with pytest.raises(PlanError, match=r"--staleness 1: tensor-parallel.*s1r0\+s1r1.*; float16 scales.*without it"):
        run(session, request_of(JOB, divided))
    with pytest.raises(ValueError, match="staleness 1 goes with adapter off, got auto"):
        replace(JOB, adapter="auto")
