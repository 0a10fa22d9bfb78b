"""Two clusters of an outer optimizer: a pipeline of three processes, and a plain loop over the same model."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.step_loop import StepLoop
from spantrain.config.artefacts import write_profile
from spantrain.core.job import TrainJob
from spantrain.core.outer.stages import OuterCluster
from spantrain.core.span import Span
from spantrain.errors import SpanTrainError
from spantrain.library.trainer import state_of
from spantrain.models.data.dataset import open_dataset
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.settings import OuterSettings
from spantrain.runtime.worker.outer_part import _START_S
from testing.outer.clients import EXACT
from testing.patience import PATIENCE_S
from testing.tokens import token_with_wrong_secret

pytestmark = [pytest.mark.slow, pytest.mark.tensor_parallel, pytest.mark.timeout(600)]

STEPS, INNER_STEPS = 10, 2
HALVES = [Span(0, 2), Span(2, 4)]
CONFIG = MasterConfig(shards=("s0", "s1"), rule=EXACT, settings=OuterSettings(clip_norm=None, grace_s=0.0))


class Notes(SilentReporter):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def plan(make_plan, spec_of):
    """Two stages, the first of a group that divides tensors."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1]], [HALVES, HALVES], "1f1b")
    first, last = plan.stages
    group = replace(first.replicas[0], devices=("s0r0", "s0r1"), tp_shares=(1.0, 1.0))
    return replace(plan, stages=(replace(first, replicas=(group,)), last))


@pytest.fixture(scope="module")
def session(tmp_path_factory, plan):
    options = SessionOptions(network=False)
    with open_session(plan.cluster, plan.devices, options, tmp_path_factory.mktemp("logs"), SilentReporter()) as opened:
        yield opened


def request_of(plan, law_profile, out: Path, outer: OuterCluster, **job) -> TrainRequest:
    profile = law_profile(plan.cluster, plan.model)
    write_profile(profile, out / "profile.json")
    return TrainRequest(
        plan=plan, profile=profile, profile_path=str(out / "profile.json"), out=out,
        job=TrainJob(steps=STEPS, seed=5, learning_rate=0.01, adapter="off", **job), options=RunOptions(outer=outer),
    )  # fmt: skip


def joined(server: LocalParameterServer, parameters: dict[str, torch.Tensor]) -> OuterOptimizer:
    return OuterOptimizer(
        parameters, master=server.address, token=server.token, cluster="plain", inner_steps=INNER_STEPS,
        options=OuterOptions(wait_for_start_s=PATIENCE_S),
    )  # fmt: skip


def test_a_pipeline_and_a_plain_loop_share_a_model(session, plan, law_profile, reference, tmp_path):
    torch.set_num_threads(1)
    _, named = reference(plan.model, 1)
    named.pop("lm_head.weight")  # the embedding, once more
    plain = {name: one.detach().clone() for name, one in named.items()}
    rows, reporter = open_dataset(plan.model), Notes()
    with LocalParameterServer(CONFIG) as server:
        outer = OuterCluster(master=server.address, token=server.token, cluster="pipeline", inner_steps=INNER_STEPS)
        with StepLoop(session, request_of(plan, law_profile, tmp_path, outer), reporter) as loop:
            for step in range(STEPS):
                indices = list(range(4 * step, 4 * step + 4))
                loop.step(rows.inputs(indices), rows.labels(indices))
                if step == 0:
                    other = joined(server, plain)
                if step < 6:
                    for one in plain.values():
                        one.mul_(0.99)
                    other.step(tokens=32)
                if step == 6:
                    assert other.metrics.version >= 1
                    other.close()
            folder = loop.save()
            assert loop.close() is not None
        with joined(server, plain) as again:
            version = again.metrics.version
        status = server.status()
    trained = state_of(Path(folder), plan.model)
    for name, one in plain.items():
        assert torch.equal(one, trained[name]), name
    assert any(f"cluster pipeline: version {version}, " in note for note in reporter.notes), reporter.notes
    assert {one.name: one.tokens for one in status.clusters}["pipeline"] == STEPS * 4 * 8
    assert status.updates == version
    assert not re.search(server.token, "".join(reporter.notes))


def test_a_pipeline_that_the_master_does_not_let_in_ends_at_once(session, plan, law_profile, tmp_path):
    """It waited for its first version first, for half a minute: the stage that leads had not asked the master yet."""
    rows = open_dataset(plan.model)
    with LocalParameterServer(CONFIG) as server:
        wrong = token_with_wrong_secret(server.token)
        outer = OuterCluster(master=server.address, token=wrong, cluster="pipeline", inner_steps=INNER_STEPS)
        request, begun_s = request_of(plan, law_profile, tmp_path, outer), time.monotonic()
        refused = r"the master does not let cluster pipeline in: .* refused the token"
        with pytest.raises(SpanTrainError, match=refused), StepLoop(session, request, Notes()) as loop:
            loop.step(rows.inputs([0, 1, 2, 3]), rows.labels([0, 1, 2, 3]))
        assert time.monotonic() - begun_s < _START_S
