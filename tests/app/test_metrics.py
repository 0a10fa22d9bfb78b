"""What a run writes as it goes: lines of metrics, and what trackers get; the packages of others are stubs."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import isnan
from types import SimpleNamespace

import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.training.metrics import (
    METRICS_FILE,
    BestCheckpoint,
    EvaluationMetrics,
    MetricsFile,
    RunLog,
    StepMetrics,
)
from spantrain.app.training.requests import RunOptions
from spantrain.app.training.trackers import TrackedRun, Trackers, chosen_trackers, tagged
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome


def metrics(step: int, **given) -> StepMetrics:
    common = {"loss": 2.0, "learning_rate": 1e-3, "grad_norm": 0.5, "step_s": 0.25, "samples_per_s": 32.0}
    return StepMetrics(step=step, **{**common, **given})


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_lines_are_on_the_disk_as_they_come_and_hold_what_is_known(tmp_path):
    with MetricsFile(tmp_path, first_step=0, before=None, tell=print) as file:
        file.write("evaluation", EvaluationMetrics(step=0, eval_loss=3.0))
        file.write("step", metrics(1, epoch=0.5, tokens_per_s=64.0))
        assert [line["event"] for line in lines(tmp_path)] == ["evaluation", "step"]
        file.write("checkpoint", {"step": 1, "folder": "checkpoint/step-1"})
    assert lines(tmp_path)[0] == {"event": "evaluation", "step": 0, "eval_loss": 3.0}
    assert lines(tmp_path)[1] == {
        "event": "step", "step": 1, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 0.5, "step_s": 0.25,
        "samples_per_s": 32.0, "tokens_per_s": 64.0, "epoch": 0.5,
    }  # fmt: skip
    assert lines(tmp_path)[2] == {"event": "checkpoint", "step": 1, "folder": "checkpoint/step-1"}


@pytest.mark.parametrize("other", [False, True])
def test_a_run_that_goes_on_keeps_the_lines_up_to_its_checkpoint(tmp_path, other):
    """Steps behind it are done again; a line that was cut off goes, too."""
    first = tmp_path / "first"
    with MetricsFile(first, first_step=0, before=None, tell=print) as file:
        for step in range(1, 6):
            file.write("step", metrics(step, loss=float(step)))
    with (first / METRICS_FILE).open("a") as torn:
        torn.write('{"event": "step", "step": 2, "lo')
    out = tmp_path / "second" if other else first
    with MetricsFile(out, first_step=3, before=first, tell=print) as file:
        file.write("step", metrics(4, loss=40.0))
    assert [(line["step"], line["loss"]) for line in lines(out)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_what_is_no_finite_number_is_null(tmp_path):
    with MetricsFile(tmp_path, first_step=0, before=None, tell=print) as file:
        more = {"eval_perplexity": float("inf"), "eval_f1": 0.5}
        file.write("evaluation", EvaluationMetrics(step=0, eval_loss=float("nan"), more=more))
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "event": "evaluation", "step": 0, "eval_loss": None, "eval_perplexity": None, "eval_f1": 0.5
    }  # fmt: skip
    (found,) = MetricsFile(tmp_path, first_step=0, before=tmp_path, tell=print).evaluations
    assert (found.step, isnan(found.eval_loss), isnan(found.more["eval_perplexity"])) == (0, True, True)


def test_a_step_whose_line_is_missing_has_one_with_its_loss(tmp_path):
    """The last one of a coordinator that was lost, and all of those before one that goes on on another machine."""
    with MetricsFile(tmp_path, first_step=0, before=None, tell=print) as file:
        file.write("step", metrics(1, loss=1.0))
        file.write("step", metrics(2, loss=2.0))
        file.write("checkpoint", {"step": 3, "folder": "checkpoint/step-3"})
    with MetricsFile(tmp_path, first_step=3, before=tmp_path, tell=print, losses=(1.0, 2.0, 3.0)) as file:
        file.write("step", metrics(4, loss=4.0))
    found = [(line["event"], line["step"], line.get("loss")) for line in lines(tmp_path)]
    assert found == [("step", 1, 1.0), ("step", 2, 2.0), ("step", 3, 3.0), ("checkpoint", 3, None), ("step", 4, 4.0)]
    with MetricsFile(tmp_path / "there", first_step=2, before=tmp_path / "none", tell=print, losses=(1.0, None)):
        pass
    assert lines(tmp_path / "there") == [
        {"event": "step", "step": n, "loss": loss} for n, loss in ((1, 1.0), (2, None))
    ]


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path):
    told: list[str] = []
    with MetricsFile(tmp_path, first_step=0, before=None, tell=told.append) as file:
        file.write("step", metrics(1))
        assert file._file is not None
        file._file = open("/dev/full", "a")  # noqa: SIM115 - it closes it
        for step in (2, 3):
            file.write("step", metrics(step))
    why = f"{tmp_path / METRICS_FILE}: cannot be written: No space left on device; the run goes on, lines may be"
    assert [text.startswith(why) for text in told] == [True]


@pytest.fixture
def log(tmp_path) -> Iterator[RunLog]:
    """Of a run that evaluates every two steps; notes are in `told` of its reporter."""
    request = SimpleNamespace(
        resume=None, out=tmp_path / "run", best=BestCheckpoint(), job=TrainJob(steps=4), batches=None,
        options=RunOptions(), plan=SimpleNamespace(
            model=SimpleNamespace(name="a", sequence_length=None), global_batch=4, devices=(), schedule="gpipe"
        ), take_evaluations=None, last_evaluation=None,
    )  # fmt: skip
    reporter = SilentReporter()
    reporter.told = []
    reporter.note = reporter.told.append
    with RunLog(request, SampleLedger().extended(0, 4), reporter) as found:
        found.told = reporter.told
        yield found


def outcome(step: int, evaluation_loss: float | None = None) -> StepOutcome:
    return StepOutcome(
        step=step, loss=1.0, evaluation_loss=evaluation_loss, grad_norm=1.0, duration_s=0.1, busy_s={},
        peak_held_samples={}, sent_bytes={}, closed_s=0.0,
    )  # fmt: skip


def test_steps_that_are_done_again_stand_there_once(log, tmp_path):
    for step in (0, 1, 2, 3):
        log.step(outcome(step, 3.0 - step if step % 2 == 0 else None), {})
    log.saved(2, str(tmp_path / "run/checkpoint/step-2"))
    log.go_back(4)
    log.go_back(2)
    for step in (2, 3):
        log.step(outcome(step, 1.0 if step == 2 else None), {})
    found = [(line["event"], line["step"]) for line in lines(tmp_path / "run")]
    assert found == [
        ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2), ("step", 3), ("step", 4)
    ]  # fmt: skip
    assert [one.step for one in log.evaluations] == [0, 2]


def test_scalars_of_steps_that_are_done_again_are_given_once_and_their_mean_is_of_each_once(log, monkeypatch):
    given = []
    monkeypatch.setattr(log._trackers, "log", lambda scalars, step: given.append((step, scalars["train/loss"])))
    monkeypatch.setattr(log._request, "options", RunOptions(logging_steps=2))
    for step in (0, 1, 2):
        log.step(replace(outcome(step), loss=float(step)), {})
    log.go_back(1)
    for step in (1, 2, 3):
        log.step(replace(outcome(step), loss=float(step)), {})
    assert given == [(2, 0.5), (4, 2.5)]


def test_what_cannot_be_begun_anew_is_told_and_ends_nothing(log, tmp_path):
    log.step(outcome(0), {})
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")
    log.go_back(0)
    log.step(outcome(0), {})
    assert [text.endswith("the run goes on, and has steps there twice") for text in log.told] == [True]


class Stub(SimpleNamespace):
    """A package of trackers as far as it is called; keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        noted = {
            name: lambda *args, _name=name, **named: self.calls.append((_name, args, named))
            for name in ("log", "finish", "log_metrics", "log_params", "start_run", "set_experiment", "end_run")
        }
        super().__init__(**noted, init=self._init)

    def _init(self, **named) -> "Stub":
        self.calls.append(("init", (), named))
        return self


def run_of(tmp_path, **given) -> TrackedRun:
    return TrackedRun(name="a", folder=tmp_path, config={"steps": 3}, **{"project": "", **given})


@pytest.mark.parametrize(
    ("name", "began", "logged", "ended"),
    [
        ("wandb", ("init", {"project": None, "name": "a", "config": {"steps": 3}}), "log", "finish"),
        ("trackio", ("init", {"project": "spantrain", "name": "a", "config": {"steps": 3}}), "log", "finish"),
        ("mlflow", ("start_run", {"run_name": "a"}), "log_metrics", "end_run"),
    ],
)
def test_trackers_get_scalars(tmp_path, monkeypatch, name, began, logged, ended):
    stub = Stub()
    monkeypatch.setitem(sys.modules, name, stub)
    trackers = Trackers(chosen_trackers(name), run_of(tmp_path), pytest.fail)
    trackers.log({"train/loss": 2.0}, 7)
    trackers.close()
    assert (stub.calls[0][0], stub.calls[0][2]) == began
    assert (logged, ({"train/loss": 2.0},), {"step": 7}) in stub.calls
    assert stub.calls[-1][0] == ended


def test_mlflow_gets_short_parameters_and_the_project(tmp_path, monkeypatch):
    stub = Stub()
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    Trackers(["mlflow"], TrackedRun(name="a", project="p", folder=tmp_path, config={"model": "x" * 900}), pytest.fail)
    assert stub.calls[0] == ("set_experiment", ("p",), {})
    assert stub.calls[2] == ("log_params", ({"model": "x" * 500},), {})


def test_tensorboard_really_writes(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(["tensorboard"], run_of(tmp_path), pytest.fail)
    trackers.log(tagged({"loss": 2.0}), 1)
    trackers.log(tagged({"eval_loss": 3.0}), 1)
    trackers.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]} == {
        "train/loss": 2.0,
        "eval/loss": 3.0,
    }


def test_tensorboard_shows_steps_that_are_done_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, last_step in ((0, 5), (3, 6)):
        time.sleep(1.1 if first_step else 0.0)  # its files are named by the second
        trackers = Trackers(["tensorboard"], run_of(tmp_path, first_step=first_step), pytest.fail)
        for step in range(first_step + 1, last_step + 1):
            trackers.log({"train/loss": float(first_step)}, step)
        trackers.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [
        (1, 0.0), (2, 0.0), (3, 0.0), (4, 3.0), (5, 3.0), (6, 3.0)
    ]  # fmt: skip


def test_one_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch):
    stub, told = Stub(), []
    stub.log = lambda *_, **__: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", stub)
    trackers = Trackers(["wandb"], run_of(tmp_path), told.append)
    trackers.log({"train/loss": 1.0}, 1)
    trackers.log({"train/loss": 1.0}, 2)
    assert told == ["report_to wandb: ZeroDivisionError: division by zero; the run goes on without it"]


def test_what_is_not_installed_or_not_known_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="trackio is not installed; run: pip install trackio"):
        chosen_trackers(["tensorboard", "trackio"])
    with pytest.raises(ConfigError, match="one or more of tensorboard, wandb, trackio, mlflow, got 'comet_ml'"):
        chosen_trackers("comet_ml")
    assert chosen_trackers("none") == chosen_trackers([]) == ()
