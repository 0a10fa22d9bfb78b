"""Faults that are made on purpose, by a file."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from spantrain.app.faults import Fault, FaultInjector, FaultKind, ask_for_fault, read_faults
from spantrain.app.live_requests import FAULTS, requests_heard
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.cli.commands.faults import app
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
    cut = {"after_step": 3, "what": "partition", "sites": ["a", "b"]}
    assert read_faults(file([cut])) == (Fault(after_step=3, what=FaultKind.PARTITION, sites=("a", "b")),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", r"faults\.json"),
        ({}, r"faults\.json"),
        ([fault(what="explode")], r"\[0\]\.what.*explode"),
        ([fault(), fault(after_step=-1)], r"\[1\].*after_step"),
        ([fault(seconds=0)], r"\[0\].*seconds"),
        ([{"what": "kill", "device": "a"}], r"\[0\].*after_step"),
        ([{"what": "kill", "after_step": 1}], r'\[0\].*kill takes a "device"'),
        ([fault(sites=["a"])], r'\[0\].*kill takes a "device", and no sites'),
        ([{"what": "heal", "after_step": 1}], r'\[0\].*heal takes no device, but "sites"'),
        ([{"what": "partition", "after_step": 1, "sites": ["a", "a"]}], r"\[0\].*two that differ"),
    ],
)
def test_a_file_that_says_nothing_that_can_be_done_is_refused(file, content, says):
    with pytest.raises(ConfigError, match=says):
        read_faults(file(content))


def test_devices_of_other_machines_and_unknown_ones_are_refused(plan, tmp_path):
    session = Session(
        cluster=plan.cluster, devices=plan.devices, coordinator=None, network="", testbed=None, workers=None
    )
    faults = (Fault(after_step=1, what=FaultKind.KILL, device="s0r1"),)
    with pytest.raises(ConfigError, match="--faults: only workers that this machine has started"):
        FaultInjector(faults, session, tmp_path)
    with pytest.raises(ConfigError, match="--faults: there is no device x; this run has s0r0, s0r1"):
        FaultInjector((replace(faults[0], device="x"),), replace(session, workers=object()), tmp_path)
    cut = (Fault(after_step=1, what=FaultKind.PARTITION, sites=("x",)),)
    with pytest.raises(ConfigError, match="--faults: only a testbed's links can be cut"):
        FaultInjector(cut, replace(session, workers=object()), tmp_path)
    with pytest.raises(ConfigError, match="--faults: there is no site x; this run has "):
        FaultInjector(cut, replace(session, workers=object(), testbed=object()), tmp_path)


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("what", ["kill", "pause", "restart"])
def test_a_fault_by_name_needs_a_run_under_way_and_one_of_its_devices(what, tmp_path, monkeypatch):
    assert "no run whose workers this machine has started is under way there" in str(run(what, tmp_path, "a").exception)
    with requests_heard(tmp_path, ("a", "b"), FAULTS):
        refused = run(what, tmp_path, "x")
        assert isinstance(refused.exception, ConfigError)
        assert "DEVICE 'x' is no device of this run; give one of a, b" in str(refused.exception)
        monkeypatch.setattr("spantrain.app.faults._ANSWER_S", 0.05)
        assert "did not answer" in str(run(what, tmp_path, "a").exception)
        assert not (tmp_path / FAULTS / "a").exists()


@pytest.mark.parametrize("seconds", ["0 s", "soon", "2 h"])
def test_a_pause_is_of_some_time(seconds, tmp_path):
    assert "--for" in str(run("pause", tmp_path, "a", "--for", seconds).exception)


class Workers:
    running = frozenset({"s0r0"})

    def __init__(self):
        self.signals = []

    def signal(self, device, number):
        self.signals.append((device, number.name))


def test_a_fault_that_cannot_be_made_is_answered_with_why(plan, tmp_path):
    workers = Workers()
    session = Session(
        cluster=plan.cluster, devices=plan.devices, coordinator=None, network="", testbed=None, workers=workers
    )
    injector = FaultInjector((), session, tmp_path)

    def asked(what, device):
        said = []

        def ask():
            try:
                ask_for_fault(tmp_path, Fault(after_step=0, what=what, device=device))
            except ConfigError as error:
                said.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            injector.look()
            thread.join(0.01)
        return said

    with injector.hearing():
        assert asked(FaultKind.RESTART, "s0r0") == ["s0r0: its worker is there; kill it first"]
        assert asked(FaultKind.KILL, "s0r1") == ["s0r1: has no worker now; `spantrain testbed restart` starts one"]
        (tmp_path / FAULTS / "s0r0").write_text('{"what": "explode"')
        injector.look()
        assert asked(FaultKind.KILL, "s0r0") == []
    assert workers.signals == [("s0r0", "SIGKILL")]


@dataclass
class ByCommand(SilentReporter):
    """Has commands run when a step of a number has ended, as at a terminal; ends the run when all is done."""

    commands: dict[int, tuple[str, ...]]
    folder: Path
    stop: StopRequest = field(default_factory=StopRequest)
    running: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def step(self, outcome, _metrics, total_steps):
        for at in [at for at in self.commands if at <= outcome.step]:
            if all(process.poll() is not None for process in self.running):
                what, *words = self.commands.pop(at)
                command = [sys.executable, "-m", "spantrain", "testbed", what, self.folder, *words]
                said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                self.running.append(subprocess.Popen(command, **said))
        over = any(process.poll() for process in self.running) or any("joined" in note for note in self.notes)
        if over and not self.stop.wanted:
            self.stop.ask()

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_pause_kill_and_restart_workers_of_a_run_under_way(plan, law_profile, tmp_path):
    torch.set_num_threads(1)
    plan = replace(plan, cluster=replace(plan.cluster, emulated_speed=1e-5))
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="",
        job=TrainJob(steps=100_000, seed=5, learning_rate=0.001, adapter="off"), out=tmp_path,
    )  # fmt: skip
    told = ByCommand({2: ("pause", "s0r0", "--for", "200 ms"), 4: ("kill", "s0r1"), 6: ("restart", "s0r1")}, tmp_path)
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), tmp_path / "logs", told) as session:
        outcome = train(session, request, told.stop, told)
    assert [process.communicate()[0] for process in told.running] == [
        "s0r0: its worker stands still for 200 ms\n", "s0r1: its worker was killed\n", "s0r1: its worker was started\n",
    ]  # fmt: skip
    assert outcome.plan_changes[0].reason.startswith("s0r1 lost (its worker was killed by signal 9)")
    assert not (tmp_path / FAULTS).exists()


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
