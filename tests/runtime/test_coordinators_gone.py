"""Coordinators that go together with others, and what workers that outlive them are then told to do."""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spantrain.app import session
from spantrain.app.session import SessionOptions
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.recovery.journal import adopted_run, credentials_in
from spantrain.app.training.requests import TrainRequest, resumed_run
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train_from_scratch import train_request
from spantrain.config.artefacts import read_plan, write_plan
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.runtime.checkpoint.manifest import latest_checkpoint, read_manifest
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.transport.control.credentials import Credentials
from testing.patience import PATIENCE_S, until
from testing.programs import written
from testing.relay import NEAR
from testing.runtime.joined import FOREVER, Steps, two_free_ports
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(300)]

JOB = TrainJob(steps=FOREVER, seed=5, learning_rate=0.001, adapter="off")


@dataclass
class Machines:
    """A run whose workers are started by hand, and whose coordinator is lost."""

    plan: Plan
    path: Path
    listen: str
    out: Path
    workers: LocalWorkers
    start: Callable

    def lose(self, *options: object, device: str = "") -> None:
        """Have a coordinator train until a step is done and something is saved, if it is to; then kill both."""
        words = ("train", self.path, "--listen", self.listen, "--out", self.out)
        job = ("--steps", FOREVER, "--seed", 5, "--learning-rate", JOB.learning_rate, "--adapter", "off")
        coordinator = self.start(*words, *job, *options)
        coordinator.wait_to_hear("spantrain worker --join")
        token = Credentials.kept_in(credentials_in(self.out)).token.text
        for name in self.plan.devices:
            settings = WorkerSettings(join=self.listen, token=token, name=name, backend="cpu", keep_s=PATIENCE_S)
            placement = WorkerPlacement(settings=settings, environment={"GLOO_SOCKET_IFNAME": "lo"})
            self.workers.start([placement])
        coordinator.wait_to_hear("loss")
        if "--checkpoint-every" in options:
            until((self.out / "checkpoint/latest").exists)
        coordinator.process.kill()
        if device:
            self.workers.signal(device, signal.SIGKILL)
        coordinator.process.wait()

    def go_on(self, request: TrainRequest) -> tuple[TrainOutcome, list[str]]:
        """Start the coordinator again; return what its run gave, and what was told."""
        told = Steps()
        outcome, _ = train_request(request, SessionOptions(listen=self.listen), StopRequest(), told)
        wanted = OneProcess(self.plan.model, JOB, self.plan.global_batch).train(0, request.job.steps)
        assert outcome.losses == pytest.approx(wanted, abs=1e-4)
        return outcome, told.notes


@pytest.fixture
def machines(make_plan, spec_of, law_profile, start, tmp_path):
    with LocalWorkers(tmp_path / "logs") as workers:

        def of(edges: list[int], weights: list[list[int]], generation: int = 0) -> Machines:
            plan = make_plan(spec_of("gpt2"), edges, weights, [[Span(0, 2), Span(2, 4)]] * len(weights), "1f1b")
            plan = replace(plan, generation=generation)
            path, listen = written(plan, law_profile, tmp_path), f"{NEAR}:{two_free_ports()}"
            return Machines(plan, path, listen, tmp_path / "run", workers, start)

        yield of


def test_one_that_goes_with_a_device_is_gone_on_without_it(machines, monkeypatch):
    """As where both were on one machine, which does not come back; nothing was saved."""
    monkeypatch.setattr(session, "_BACK_S", 2.0)
    run = machines([0, 5], [[1, 1]])
    run.lose(device="s0r1")
    request = adopted_run(run.out, FOREVER, functions=())
    done = request.resume.content.step
    outcome, notes = run.go_on(replace(request, job=replace(request.job, steps=done + 3)))
    assert list(outcome.devices) == ["s0r0"]
    assert "s0r1 did not join within 2 s: others hold all that the run needs" in notes
    assert f"Goes on after step {done} with what 1 workers hold; no checkpoint is read" in notes
    assert outcome.plan_changes[0].reason.startswith(
        f"s0r1 lost (its worker has gone): step {done + 1} is trained again"
    )


def test_one_that_goes_when_all_steps_are_done_has_them_saved_and_evaluated_by_the_next(machines):
    """Its last verdict told all to save what they have, and to stop."""
    run = machines([0, 2, 5], [[1], [1]])
    run.lose("--evaluate-every", 1)
    journal = run.out / "coordinator" / "journal.jsonl"
    *lines, last = [json.loads(line) for line in journal.read_text().splitlines()]
    last["verdict"] |= {"stop": True, "checkpoint": True}
    journal.write_text("".join(json.dumps(line) + "\n" for line in (*lines, last)))
    done = last["step"] + 1
    outcome, notes = run.go_on(adopted_run(run.out, done, functions=()))
    assert (outcome.steps, outcome.first_step, outcome.trace) == (done, done, "")
    assert read_manifest(latest_checkpoint(run.out)).step == done
    assert outcome.heldout_losses[-1].steps_done == done
    assert any(note.startswith("All steps had been done before") for note in notes)


def test_one_that_begins_with_a_checkpoint_may_have_older_plans_than_workers_know(machines):
    """They have lived through changes of plan under the one before it."""
    run = machines([0, 2, 5], [[1], [1]], generation=7)
    run.lose("--checkpoint-every", 1)
    write_plan(replace(read_plan(run.path), generation=0), run.path)
    saved = read_manifest(latest_checkpoint(run.out)).step
    outcome, _ = run.go_on(resumed_run(run.out, saved + 2, run.out, functions=(), plan_path=run.path))
    assert (outcome.generation, outcome.first_step) == (0, saved)
