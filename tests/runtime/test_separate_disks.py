"""Machines that share no disk: what each saves comes to the coordinator's, and goes from there where it is needed."""

import os
import signal
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spantrain.app import session as sessions
from spantrain.app.planning import protection
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training import checkpoints
from spantrain.app.training.metrics import BestCheckpoint
from spantrain.app.training.recovery.journal import Journal
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.resume import newest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.weights import export_run
from spantrain.config.artefacts import write_profile
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import SpanTrainError
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.checkpoint.manifest import read_manifest
from spantrain.runtime.control.data_requests import FileWanted
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import PATIENCE_S, until
from testing.runtime.kills import kill
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]

BATCH = 6
JOB = TrainJob(steps=9, seed=5, learning_rate=0.01, warmup_steps=5, trace_steps=1, adapter="off", checkpoint_every=2)
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
TOLERANCE = 1e-4


@dataclass
class Watcher(SilentReporter):
    """Waits behind a step, as all devices do, until files have come, and then kills a worker, if it is to."""

    out: Path
    strikes: dict[int, str] = field(default_factory=dict)
    awaits: set[int] = field(default_factory=set)
    """Steps behind which a checkpoint is waited for that lies here whole."""
    notes: list[str] = field(default_factory=list)

    def committed(self, outcome: StepOutcome) -> None:
        if outcome.step in self.awaits:
            self.awaits.remove(outcome.step)
            until(lambda: any(len(files_in(folder)) == 3 for folder in self.out.glob("checkpoint/step-*")))
        if name := self.strikes.pop(outcome.step, ""):
            kill(self.out / f"logs/{name}.log")

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Each worker has a disk of its own, unless it is the coordinator's."""
    torch.set_num_threads(1)

    def settings(**given):
        return WorkerSettings(**given, folder=str(tmp_path / "disks" / given["name"]))

    monkeypatch.setattr(sessions, "WorkerSettings", settings)
    return tmp_path / "disks"


@pytest.fixture
def run(make_plan, spec_of, law_profile, tmp_path, monkeypatch):
    plan = make_plan(spec_of("gpt2"), [0, 2, 4, 5], [[1], [1], [1]], [THIRDS] * 3, "1f1b")
    profile, out = law_profile(plan.cluster, plan.model), tmp_path / "run"
    out.mkdir()
    write_profile(profile, out / "profile.json")
    journalled = Journal.committed

    def run(job=JOB, resume=None, **watched):
        def committed(journal, outcome, verdict):
            journalled(journal, outcome, verdict)
            watcher.committed(outcome)

        monkeypatch.setattr(Journal, "committed", committed)
        watcher = Watcher(out=out, **{key: watched.pop(key) for key in ("strikes", "awaits") if key in watched})
        request = TrainRequest(
            plan=plan, profile=profile, profile_path=str(out / "profile.json"), job=job, out=out, resume=resume,
            options=RunOptions(**watched),
        )  # fmt: skip
        with open_session(plan.cluster, plan.devices, SessionOptions(network=False), out / "logs", watcher) as session:
            outcome = train(session, request, StopRequest(), watcher)
        assert (watcher.strikes, watcher.awaits) == ({}, set())
        assert outcome.losses == pytest.approx(OneProcess(plan.model, job, BATCH).train(0, job.steps), abs=TOLERANCE)
        return watcher, outcome

    return run


def saved_in(outcome) -> set[str]:
    return set(read_manifest(Path(outcome.checkpoint), check_files=False).files)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.safetensors")}


def test_all_of_the_last_checkpoint_lies_here_in_the_end(run, disks, tmp_path):
    watcher, outcome = run(keep_checkpoints=1)
    last = Path(outcome.checkpoint)
    assert last.name == "step-9"
    assert len(files_in(last)) == 3
    assert files_in(last) <= files_in(disks)
    assert any(f"All of {last} lies here" in note for note in watcher.notes)
    assert not list(tmp_path.rglob(".*.partial"))
    exported = export_run(tmp_path / "run", tmp_path / "hf")
    assert load_file(Path(exported.folder) / "model.safetensors")


@pytest.fixture
def at_the_end(monkeypatch):
    """Has something happen when the first bytes of the last checkpoint come, which is behind the last step then."""

    def at_the_end(happens):
        ended, put, wants = [], CoordinatorFiles._put, CoordinatorFiles._wants

        def is_under_way(files):
            return files._on_saved.__name__ != "<lambda>"  # a train order is

        def hold(files, piece):
            if not is_under_way(files) and not ended:
                ended.append(piece.name)
                happens(piece.name)
            return put(files, piece)

        def later(files, stored, offer):
            if is_under_way(files) and offer.step == JOB.steps:
                return FileWanted(wanted=False)
            return wants(files, stored, offer)

        monkeypatch.setattr(CoordinatorFiles, "_put", hold)
        monkeypatch.setattr(CoordinatorFiles, "_wants", later)
        return ended

    return at_the_end


def test_who_is_lost_while_the_last_checkpoint_comes_ends_nothing(run, disks, tmp_path, at_the_end):
    def strike(name):
        kill(tmp_path / f"run/logs/{name.partition('-')[0]}.log")
        raise RemoteRefusal("who brought this is gone")

    ended = at_the_end(strike)
    watcher, outcome = run()
    victim = ended[0].partition("-")[0]
    assert outcome.steps == 9
    assert files_in(Path(outcome.checkpoint)) == {name for name in saved_in(outcome) if not name.startswith(victim)}
    assert any(f"device {victim} was lost" in note for note in watcher.notes)
    assert any(f"what {victim} saved lies on their machines alone" in note for note in watcher.notes)


def test_who_wants_to_stop_then_leaves_files_where_they_are(run, disks, at_the_end):
    heard = threading.Event()

    def interrupted(number, frame):
        heard.set()
        signal.default_int_handler(number, frame)

    def strike(_name):
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.wait(PATIENCE_S)
        raise RemoteRefusal("this one does not come any more")

    before = signal.signal(signal.SIGINT, interrupted)  # what a shell runs in the background ignores it
    try:
        at_the_end(strike)
        watcher, outcome = run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.steps == 9
    assert any("What has not come stays where it is" in note for note in watcher.notes)
    assert any("lies on their machines alone" in note for note in watcher.notes)


def test_a_run_that_ends_with_its_best_checkpoint_has_that_one_here(run, disks, tmp_path, monkeypatch):
    monkeypatch.setattr(BestCheckpoint, "kept_step", property(lambda _self: 2))
    watcher, _ = run()
    best = tmp_path / "run/checkpoint/step-2"
    assert len(files_in(best)) == 3
    assert any(f"All of {best} lies here" in note for note in watcher.notes)
    assert load_file(Path(export_run(tmp_path / "run", tmp_path / "hf").folder) / "model.safetensors")


def test_what_is_saved_stays_where_it_is_if_it_is_to(run, disks):
    watcher, outcome = run(gather=False)
    assert not files_in(Path(outcome.checkpoint))
    assert any("what s0r0, s1r0, s2r0 saved lies on their machines alone" in note for note in watcher.notes)


def test_a_machine_that_is_lost_with_its_disk_costs_the_steps_since_a_checkpoint_that_has_come(run, disks):
    watcher, outcome = run(awaits={4}, strikes={5: "s1r0"}, protect=0)
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    assert any("all go back to the checkpoint after" in note for note in watcher.notes), watcher.notes


def test_what_one_device_has_alone_is_saved_though_nobody_has_said_when(run, disks, monkeypatch):
    monkeypatch.setattr(checkpoints, "_EVERY_S", 0.0)
    monkeypatch.setattr(protection, "_CALM", -1.0)  # keepers are too dear
    job = replace(JOB, checkpoint_every=0)
    watcher, _ = run(job=job, awaits={4}, strikes={5: "s1r0"}, protect=None)
    assert any("all go back to the checkpoint after" in note for note in watcher.notes)


def test_a_checkpoint_that_has_not_come_is_not_gone_back_to_without_its_machine(run, disks):
    watcher, _ = run(strikes={5: "s1r0"}, protect=0, gather=False)
    assert any("all go back to the beginning" in note for note in watcher.notes)


def test_who_has_nothing_of_a_checkpoint_is_given_it(run, disks, tmp_path):
    run(job=replace(JOB, steps=5))
    for path in list(disks.rglob("*.safetensors")):
        path.unlink()
    watcher, outcome = run(resume=newest(tmp_path / "run"))
    assert outcome.first_step == 5
    assert not list(tmp_path.rglob(".*.fetched"))
    assert not any("lies on their machines alone" in note for note in watcher.notes)


def test_what_nobody_has_is_named(run, disks, tmp_path):
    run(job=replace(JOB, steps=5), gather=False)
    gone = next(iter(disks.rglob("s1r0-*.safetensors")))
    for path in list(disks.rglob(gone.name)):
        path.unlink()
    with pytest.raises(SpanTrainError, match=rf"not on any machine of this run: {gone.name} \(device s1r0 wrote it\)"):
        run(resume=newest(tmp_path / "run"))
