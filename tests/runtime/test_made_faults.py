"""Faults that are made on purpose, by a file."""

import json
from dataclasses import replace

import pytest
import torch

from spantrain.app.faults import Fault, FaultInjector, FaultKind, read_faults
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from testing.runtime.runs import OneProcess


def fault(**more):
    return {"after_step": 2, "what": "kill", "device": "s0r1", **more}


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "faults.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def plan(make_plan, spec_of):
    return make_plan(spec_of("gpt2"), [0, 5], [[1, 1]], [[Span(0, 2), Span(2, 4), Span(4, 6)]], "1f1b")


def test_a_file_of_faults(file):
    assert read_faults(file([fault(), fault(what="pause", seconds=0.5)])) == (
        Fault(after_step=2, what=FaultKind.KILL, device="s0r1"),
        Fault(after_step=2, what=FaultKind.PAUSE, device="s0r1", seconds=0.5),
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", r"faults\.json"),
        ({}, r"faults\.json"),
        ([fault(what="explode")], r"\[0\]\.what.*explode"),
        ([fault(), fault(after_step=-1)], r"\[1\].*after_step"),
        ([fault(seconds=0)], r"\[0\].*seconds"),
        ([{"what": "kill", "device": "a"}], r"\[0\].*after_step"),
    ],
)
def test_a_file_that_says_nothing_that_can_be_done_is_refused(file, content, says):
    with pytest.raises(ConfigError, match=says):
        read_faults(file(content))


def test_devices_of_other_machines_and_unknown_ones_are_refused(plan):
    session = Session(
        cluster=plan.cluster, devices=plan.devices, coordinator=None, network="", testbed=None, workers=None
    )
    faults = (Fault(after_step=1, what=FaultKind.KILL, device="s0r1"),)
    with pytest.raises(ConfigError, match="--faults: only workers that this machine has started"):
        FaultInjector(faults, session)
    with pytest.raises(ConfigError, match="--faults: there is no device x; this run has s0r0, s0r1"):
        FaultInjector((replace(faults[0], device="x"),), replace(session, workers=object()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_paused_and_a_killed_device_change_no_loss(plan, law_profile, tmp_path):
    torch.set_num_threads(1)
    job = TrainJob(steps=12, seed=5, learning_rate=0.001, adapter="off")
    faults = (
        Fault(after_step=2, what=FaultKind.PAUSE, device="s0r0", seconds=0.3),
        Fault(after_step=6, what=FaultKind.KILL, device="s0r1"),
    )
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="", job=job, out=tmp_path,
        options=RunOptions(faults=faults),
    )  # fmt: skip
    told = SilentReporter()
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), tmp_path / "logs", told) as session:
        outcome = train(session, request, StopRequest(), told)
    assert list(outcome.devices) == ["s0r0"]
    assert outcome.losses == pytest.approx(OneProcess(plan.model, job, 6).train(0, 12), abs=1e-4)
