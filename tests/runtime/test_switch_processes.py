"""Real worker processes go over to other plans while they train, and what the run leaves can be used afterwards."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.outcome import SWITCHES_FILE
from spantrain.app.training.requests import TrainRequest, resumed_run
from spantrain.app.training.run_record import read_run_record
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.validate_run import validate_run
from spantrain.config.artefacts import read_plan, write_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.runtime.coordinator.advice import Advice
from spantrain.runtime.coordinator.barrier import StepOutcome
from testing.patience import PATIENCE_S
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]

BATCH = 6
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
HALVES = (Span(0, 3), Span(3, 6))
PLAN_FILES = ("plan.json", "plan-2.json", "plan-3.json", "plan-4.json", "plan-5.json")
JOB = TrainJob(steps=40, seed=5, learning_rate=0.01, warmup_steps=5, max_grad_norm=0.5, trace_steps=3)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def first(make_plan, spec_of) -> Plan:
    """Two stages of two replicas each."""
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[2, 1], [1, 1]], [THIRDS] * 2, "1f1b")


@pytest.fixture(scope="module")
def session(tmp_path_factory, first):
    logs = tmp_path_factory.mktemp("logs")
    options = SessionOptions(network=False)
    with open_session(first.cluster, first.devices, options, logs, SilentReporter()) as opened:
        yield opened


class Advisers:
    """Has one plan after another take over; the run stops some steps after the last."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = list(plans)

    def advise(self, _step: int, _plan: Plan, _reports: object) -> Advice | None:
        return Advice(plan=self.plans.pop(0), reason="the test wants it") if self.plans else None


class Listener(SilentReporter):
    """Lets the run end three steps after the last change."""

    def __init__(self, changes: int, stop: StopRequest) -> None:
        self.left, self.stop, self.since = changes, stop, 0
        self.notes: list[str] = []

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        self.left -= outcome.switch is not None
        self.since += self.left <= 0
        if self.since == 4:
            self.stop.ask()

    def note(self, text: str) -> None:
        self.notes.append(text)


def plans_after(first: Plan) -> list[Plan]:
    """Four that may follow one another: other micro-batches, a unit moved, tensors divided, and the first again."""
    head, tail = first.stages
    finer = replace(first, stages=(replace(head, micro_batches=HALVES), tail))  # nothing moves
    shifted = replace(
        first, stages=(replace(head, end_unit=3), replace(tail, first_unit=3)), schedule="critical-path"
    )  # a unit to the neighbour
    one, other = head.replicas
    group = replace(one, devices=(*one.devices, *other.devices), tp_shares=(2.0, 1.0))
    divided = replace(shifted, stages=(replace(shifted.stages[0], replicas=(group,)), shifted.stages[1]))
    return [finer, shifted, divided, replace(first, schedule="gpipe")]


def check_what_is_left(out: Path, plans: list[Plan], first_step: int) -> None:
    """Every plan, the log of changes, a trace and decisions that are of the last plan."""
    kept = [read_plan(out / name) for name in PLAN_FILES]
    assert [plan.generation for plan in kept] == [1, 2, 3, 4, 5]
    assert kept[3].stages == plans[2].stages
    lines = [json.loads(line) for line in (out / SWITCHES_FILE).read_text().splitlines()]
    assert tuple(line["plan"] for line in lines) == PLAN_FILES[1:]
    record = read_run_record(out)
    assert record is not None
    assert (record.plan, record.first_step) == ("plan-5.json", first_step)
    assert validate_run(out).replays


def check_that_it_goes_on(session, out: Path, steps: int, model: OneProcess) -> None:
    """From its checkpoint, under the last plan."""
    again = resumed_run(out, steps + 2, out, functions=())
    assert (again.plan.generation, again.plan.schedule) == (5, "gpipe")
    outcome = train(session, again, StopRequest(), SilentReporter())
    assert outcome.losses == pytest.approx(model.train(0, outcome.steps), abs=TOLERANCE)
    assert [read_plan(out / name).generation for name in ("plan.json", "plan-5.json")] == [1, 5]
    record = read_run_record(out)
    assert record is not None
    assert record.earlier_plans == PLAN_FILES[:-1]


def test_plans_take_over_while_it_trains(session, first, law_profile, tmp_path):
    torch.set_num_threads(1)
    plans = plans_after(first)
    out = tmp_path / "run"
    out.mkdir()
    profile = law_profile(first.cluster, first.model)
    write_profile(profile, out / "profile.json")
    request = TrainRequest(
        plan=first, profile=profile, profile_path=str(out / "profile.json"), job=JOB, out=out,
        adviser=Advisers(plans),
    )  # fmt: skip
    stop = StopRequest()
    listener = Listener(len(plans), stop)
    outcome = train(session, request, stop, listener)
    for change in outcome.plan_changes:
        print(change)
    assert outcome.losses == pytest.approx(OneProcess(first.model, JOB, BATCH).train(0, outcome.steps), abs=TOLERANCE)
    assert outcome.refused_messages == {}
    assert [change.generation for change in outcome.plan_changes] == [2, 3, 4, 5]
    moves = [change.moved_bytes > 0 for change in outcome.plan_changes]
    assert moves == [False, True, False, True]  # both replicas had what they divide then
    assert (outcome.generation, outcome.schedule) == (5, "gpipe")
    assert sum("the test wants it" in note for note in listener.notes) == 4
    check_what_is_left(out, plans, outcome.plan_changes[-1].first_step)
    check_that_it_goes_on(session, out, outcome.steps, OneProcess(first.model, JOB, BATCH))


def test_an_adviser_that_fails_is_told_of_once(session, first, law_profile, tmp_path):
    """And nobody waits for one that takes its time."""
    begun = threading.Event()

    class Failing:
        def advise(self, _step: int, _plan: Plan, _reports: object) -> Advice | None:
            begun.set()
            raise RuntimeError("out of ideas")

    profile = law_profile(first.cluster, first.model)
    write_profile(profile, tmp_path / "profile.json")
    request = TrainRequest(
        plan=replace(first, generation=7), profile=profile, profile_path=str(tmp_path / "profile.json"),
        job=replace(JOB, steps=8), out=tmp_path, adviser=Failing(),
    )  # fmt: skip
    listener = Listener(99, StopRequest())
    outcome = train(session, request, StopRequest(), listener)
    assert outcome.steps == 8
    assert begun.wait(PATIENCE_S)
    assert sum("out of ideas" in note for note in listener.notes) == 1
    assert outcome.plan_changes == ()
