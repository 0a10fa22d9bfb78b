"""Real worker processes go on under plans that cut, replicate and divide otherwise, with the losses of one process."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest, resumed_run
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import UsageError
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]

BATCH = 6
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=4, seed=5, learning_rate=0.02, warmup_steps=5, max_grad_norm=0.5)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def session(tmp_path_factory, make_plan, spec_of):
    """Four workers, started once."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1, 1]], [THIRDS] * 2, "gpipe")
    with open_session(
        plan.cluster, plan.devices, SessionOptions(network=False), tmp_path_factory.mktemp("logs"), SilentReporter()
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def plans(make_plan, spec_of):
    """By what is done: a chain, replicas, a replica that divides tensors two to one, one device."""
    spec = spec_of("gpt2")
    replicated = make_plan(spec, [0, 2, 5], [[2, 1], [1, 1]], [THIRDS] * 2, "gpipe")
    first, second = replicated.stages
    one, other = first.replicas
    divided = replace(one, devices=(*one.devices, *other.devices), tp_shares=(2.0, 1.0), sample_share=1.0)
    return {
        "chain": make_plan(spec, [0, 3, 5], [[1], [1]], [THIRDS] * 2, "gpipe"),
        "replicas": replicated,
        "divided": replace(replicated, stages=(replace(first, replicas=(divided,)), second)),
        "alone": make_plan(spec, [0, 5], [[1]], [THIRDS], "gpipe"),
    }


GENERATIONS = itertools.count(1)


def run(session: Session, request: TrainRequest) -> TrainOutcome:
    request = replace(request, plan=replace(request.plan, generation=next(GENERATIONS)))
    return train(session, request, StopRequest(), SilentReporter())


def written(plan: Plan, profile, path: Path) -> Path:
    """The plan as a file, with the profile that it names beside it."""
    write_profile(profile, path.parent / f"{path.stem}-profile.json")
    write_plan(replace(plan, profile=reference_to_profile(path.parent / f"{path.stem}-profile.json", path)), path)
    return path


def test_a_run_goes_on_under_one_plan_after_another(session, plans, law_profile, make_plan, tmp_path):
    """At the end with another global batch: behind the samples that were consumed."""
    torch.set_num_threads(1)
    model = OneProcess(plans["alone"].model, JOB, BATCH)
    wanted = model.train(0, 16)
    order = ("replicas", "divided", "chain", "alone", "divided")
    profiles = {name: law_profile(plan.cluster, plan.model) for name, plan in plans.items()}
    first = plans[order[0]]
    path = written(first, profiles[order[0]], tmp_path / "first.json")
    profile_path = str(path.parent / "first-profile.json")
    outcome = run(
        session,
        TrainRequest(
            plan=first, profile=profiles[order[0]], profile_path=profile_path, job=JOB, out=tmp_path / "run",
        ),
    )  # fmt: skip
    for number, name in enumerate(order[1:], start=1):
        path = written(plans[name], profiles[name], tmp_path / f"{number}.json")
        request = resumed_run(tmp_path / "run", 4 + 3 * number, tmp_path / "run", functions=(), plan_path=path)
        outcome = run(session, request)
        assert outcome.steps == 4 + 3 * number
    assert outcome.losses == pytest.approx(wanted, abs=TOLERANCE)
    kept = {path.name for path in (tmp_path / "run/checkpoint").iterdir()}
    assert kept == {"step-13", "step-16", "latest"}

    smaller = make_plan(model.spec, [0, 2, 5], [[1], [1]], [[Span(0, 2), Span(2, 4)]] * 2, "gpipe")
    path = written(smaller, law_profile(smaller.cluster, model.spec), tmp_path / "smaller.json")
    outcome = run(session, resumed_run(tmp_path / "run", 19, tmp_path / "run", functions=(), plan_path=path))
    behind = OneProcess(model.spec, JOB, 4)
    behind.take_over(model.tensors())
    assert outcome.losses[16:] == pytest.approx(behind.train(16, 3, samples_before=16 * BATCH), abs=TOLERANCE)


def test_a_plan_for_another_model_is_refused(session, plans, law_profile, make_plan, spec_of, tmp_path):
    plan = plans["alone"]
    profile = law_profile(plan.cluster, plan.model)
    path = written(plan, profile, tmp_path / "first.json")
    request = TrainRequest(
        plan=plan, profile=profile, profile_path=str(tmp_path / "first-profile.json"), job=JOB, out=tmp_path / "run",
    )  # fmt: skip
    run(session, request)
    other = make_plan(spec_of("bert"), [0, 4], [[1]], [THIRDS], "gpipe")
    path = written(other, law_profile(other.cluster, other.model), tmp_path / "other.json")
    with pytest.raises(UsageError, match=r"not for the model that .*family: 'gpt2' there, 'bert' in the plan"):
        resumed_run(tmp_path / "run", 9, tmp_path / "run", functions=(), plan_path=path)
