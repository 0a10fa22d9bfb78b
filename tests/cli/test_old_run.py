"""A second run in the folder of a first one, from the command line and the demonstration: refused before any work."""

from pathlib import Path

import pytest

from spantrain.app.demo import run_demo
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions
from spantrain.app.training.run_folder import alone_in, check_not_under_way
from spantrain.app.training.run_record import RUN_FILE, RunRecord
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train_from_scratch import ScratchRequest, train_from_scratch
from spantrain.config.artefacts import write_artefact
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model

QUICK = ("train", "--model", "gpt2-tiny", "--preset", "laptop")


@pytest.fixture
def old(tmp_path) -> Path:
    """A run that was ended after its first checkpoint."""
    folder = tmp_path / "old"
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    (folder / "checkpoint" / "latest").write_text("step-1\n")
    (folder / "trace.json").write_text("{}")
    return folder


def test_it_is_refused_with_the_ways_out(spantrain, old):
    for words in ((*QUICK, "--out", old), ("train", "plan.json", "--out", old)):
        ended = spantrain(*words)
        assert (ended.code, ended.out) == (2, "")
        for text in ("holds a run already (trace.json, checkpoint/step-1)", f"--resume {old}", "--out", "--overwrite"):
            assert text in ended.err
    assert (old / "trace.json").read_text() == "{}"


def test_one_that_is_under_way_is_neither_gone_on_with_nor_replaced(spantrain, old):
    with alone_in(old):
        for words in (("--resume", old), ("plan.json", "--out", old), ("plan.json", "--out", old, "--overwrite")):
            ended = spantrain("train", *words)
            assert (ended.code, ended.out) == (2, "")
            assert f"{old}: a run is under way there" in ended.err
    assert (old / "trace.json").read_text() == "{}"


def test_to_overwrite_is_asked_for_a_folder_that_is_named(spantrain, old):
    for words in ((*QUICK, "--overwrite"), ("train", "--resume", old, "--overwrite")):
        ended = spantrain(*words)
        assert ended.code == 2
        assert "--overwrite: belongs to --out" in ended.err
    ended = spantrain("train", "--resume", old, "--from-scratch")
    assert "--from-scratch: a resumed run has the weights of its checkpoint" in ended.err


def test_nothing_is_removed_where_the_new_run_cannot_be(spantrain, old, tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    return 3\n")
    ended = spantrain(
        "train", "--model", f"{tmp_path / 'mine.py'}:build", "--preset", "laptop", "--out", old, "--overwrite"
    )
    assert ended.code == 2
    assert "returned int" in ended.err
    assert (old / "trace.json").exists()
    ended = spantrain("train", tmp_path / "none.json", "--out", old, "--overwrite")
    assert ended.code == 2
    assert (old / "trace.json").exists()


def test_a_comparison_and_a_demonstration_do_not_mix_with_it(spantrain, old):
    for words in (("compare", "--preset", "laptop", "--model", "gpt2-tiny", "--out", old), ("demo", "--out", old)):
        ended = spantrain(*words)
        assert (ended.code, "holds a run already" in ended.err) == (2, True)


class _SaysWhoIsAlone(SilentReporter):
    """Stops a run when its workers are to be started, and knows what one that is begun there meanwhile is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def phase(self, text: str) -> None:
        with pytest.raises(ConfigError, match="a run is under way there"):
            check_not_under_way(self._folder)
        raise InterruptedError(text)


def test_one_whose_workers_are_awaited_is_under_way(tmp_path):
    told = _SaysWhoIsAlone(tmp_path)
    request = ScratchRequest(
        cluster=load_preset("laptop"), model=resolve_model("gpt2-tiny"), job=TrainJob(steps=1),
        out=tmp_path,
    )  # fmt: skip
    with pytest.raises(InterruptedError, match="Starting"):
        train_from_scratch(request, SessionOptions(network=False), StopRequest(), told)
    with pytest.raises(InterruptedError, match="Starting"):
        run_demo(60, SessionOptions(network=False), tmp_path, told)
    check_not_under_way(tmp_path)


class _Stopped(SilentReporter):
    """Stops the demonstration when its workers are to be started."""

    def phase(self, text: str) -> None:
        raise InterruptedError(text)

    def show_groups(self, groups, profile) -> None: ...

    def show_plan(self, outcome) -> None: ...

    def show_training(self, outcome, plan, report) -> None: ...


def test_a_demonstration_replaces_one_that_was_here(old):
    """Also one that did not get to its end."""
    with pytest.raises(ConfigError):
        run_demo(60, SessionOptions(network=False), old, _Stopped())
    folder = old.parent / "demo"
    for _ in range(2):
        with pytest.raises(InterruptedError, match="Starting"):
            run_demo(60, SessionOptions(network=False), folder, _Stopped())
        (folder / "run.json").write_text("{}")
        (folder / "single-site").mkdir(exist_ok=True)
        (folder / "single-site" / "trace.json").write_text("{}")
    with pytest.raises(InterruptedError):
        run_demo(60, SessionOptions(network=False), folder, _Stopped())
    assert sorted(path.name for path in folder.rglob("[!.]*.*") if path.is_file()) == ["demo.txt"]


def test_what_a_run_was_made_with_is_not_replaced_by_profile_and_plan(spantrain, tmp_path):
    record = RunRecord(
        plan="plan.json", earlier_plans=(), profile="profile.json", optimizer="adamw",
        steps_measured=1, step_s=1.0, slowest_step_s=1.0, fastest_step_s=1.0,
    )  # fmt: skip
    write_artefact(record, "spantrain-run", tmp_path / RUN_FILE)
    model = ("--preset", "laptop", "--model", "gpt2-tiny", "--out")
    for words in (("profile", *model, tmp_path), ("plan", "--global-batch", 32, *model, tmp_path / "plan.json")):
        ended = spantrain(*words)
        assert (ended.code, "was made with it" in ended.err) == (2, True), ended.err
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]
