"""A folder that holds a run: refused, or the old run is removed and nothing else."""

import fcntl
from pathlib import Path

import pytest

from spantrain.app.training.run_folder import alone_in, check_not_under_way, refuse_run, remove_old_run
from spantrain.app.training.run_record import RUN_FILE, RunRecord, check_not_of_a_run
from spantrain.config.artefacts import write_artefact
from spantrain.errors import ConfigError

INPUTS = ("plan.json", "profile.json", "notes.txt", "logs/mine.txt", "single-site/trace.json", "checkpoint/mine.txt")
OLD = (
    "trace.json", "decisions.jsonl", "switches.jsonl", "plan-1.json", "plan.trained.json", "logs/fork-server.log",
    "logs/lab-0.log", "checkpoint/latest", "checkpoint/best", "checkpoint/step-4/manifest.json",
    "checkpoint/step-4/lab-0.safetensors", "tensorboard/events.out.tfevents.1",
)  # fmt: skip


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder of a run that changed its plan once, and what lies beside it."""
    folder = tmp_path / "run"
    for name in (*INPUTS, *OLD):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    record = RunRecord(
        plan="plan-1.json", earlier_plans=("plan.trained.json",), profile="profile.json",
        optimizer="adamw", steps_measured=1, step_s=1.0, slowest_step_s=1.0, fastest_step_s=1.0,
    )  # fmt: skip
    write_artefact(record, "spantrain-run", folder / RUN_FILE)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_refused_and_what_it_is_made_from_is_none(run, tmp_path):
    with pytest.raises(ConfigError, match=r"run holds a run already \(run.json, trace.json, .*: do this"):
        refuse_run(run, "do this")
    for name in ("plan.json", "profile.json", "logs/lab-0.log"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_text("")
    (tmp_path / "new" / "metrics.jsonl").write_text("")  # a run that has begun no step
    refuse_run(tmp_path / "new", "")
    refuse_run(tmp_path / "none", "")


def test_imported_weights_are_not_written_over(run):
    for path in run.iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(ConfigError, match="checkpoint/step-4"):
        refuse_run(run, "")


def test_what_is_the_runs_is_removed_and_nothing_else(run):
    remove_old_run(run)
    assert files(run) == set(INPUTS)
    refuse_run(run, "")
    remove_old_run(run)
    assert files(run) == set(INPUTS)


def test_a_plan_that_is_to_be_run_stays(run):
    remove_old_run(run, keep=run / "plan-1.json")
    assert files(run) == {*INPUTS, "plan-1.json"}


def test_a_run_of_which_nothing_is_known_but_its_checkpoint(run):
    (run / RUN_FILE).write_text("half a fi")
    remove_old_run(run)
    assert files(run) == {*INPUTS, "plan-1.json", "plan.trained.json"}, "a record that cannot be read names none"


def test_what_a_run_was_made_with_is_not_written_over(run):
    with pytest.raises(ConfigError, match=r"--out .*profile.json: the run in .* was made with it"):
        check_not_of_a_run(run / "profile.json", "--out")
    check_not_of_a_run(run / "plan.json", "--out")
    check_not_of_a_run(run / "other.json", "--out")


def test_a_folder_that_was_not_used_is_left_as_it_was(tmp_path):
    with alone_in(tmp_path / "new"):
        pass
    with alone_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").touch()
    with alone_in(tmp_path):
        (tmp_path / "metrics.jsonl").touch()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "metrics.jsonl", "plan.json"}


def test_one_that_is_under_way_is_alone_there(run):
    check_not_under_way(run)
    assert files(run) == {*INPUTS, *OLD, RUN_FILE}
    why = "run: a run is under way there; wait, stop it, or name another folder"
    with alone_in(run):
        with pytest.raises(ConfigError, match=why), alone_in(run):
            pass
        with pytest.raises(ConfigError, match=why):
            check_not_under_way(run)
        with pytest.raises(ConfigError, match=why):
            remove_old_run(run)
        assert {*INPUTS, *OLD} < files(run)
    with alone_in(run):
        pass
    remove_old_run(run)


def test_a_disk_that_knows_no_locks_keeps_no_run_from_its_folder(run, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_in(run), alone_in(run):
        check_not_under_way(run)
