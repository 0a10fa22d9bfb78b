"""Checkpoints: a save that is cut off harms nothing, the newest are kept, devices remove what is not."""

from functools import partial

import pytest

from made_up_checkpoints import BATCH, Faulty, check_loads, save, two_devices
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.spans import Span
from spantrain.errors import WorkerError
from spantrain.runtime.checkpoint.complete import CheckpointSet
from spantrain.runtime.checkpoint.device import DeviceCheckpoints
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest

pytestmark = pytest.mark.checkpoint


@pytest.fixture(scope="module")
def plan(spec_of, make_plan):
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, BATCH)]] * 2, "gpipe")


def test_a_machine_that_ends_at_any_moment_leaves_a_checkpoint_that_loads(plan, tmp_path):
    """Before each operation of a save, and in the middle of it; the first checkpoint is removed by that save."""
    counting = Faulty()
    save(tmp_path / "counted", plan, 1)
    save(tmp_path / "counted", plan, 2, storage=counting, keep=1)
    count = len(counting.operations)
    kinds = {operation.split()[0] for operation in counting.operations}
    assert kinds == {"make", "create", "append", "sync", "rename", "remove"}
    assert {path.name for path in (tmp_path / "counted/checkpoint").iterdir()} == {"step-2", "latest"}
    steps = []
    for number in range(1, count + 1):
        for halfway in (False, True):
            run = tmp_path / f"{number}-{halfway}"
            save(run, plan, 1)
            with pytest.raises(WorkerError, match=r"could not be written.*before is whole|before is whole"):
                save(run, plan, 2, storage=Faulty(number, halfway=halfway), keep=1)
            steps.append(check_loads(run, plan))
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_a_save_after_one_that_was_cut_off_tidies_up(plan, tmp_path):
    save(tmp_path, plan, 1)
    with pytest.raises(WorkerError):
        save(tmp_path, plan, 2, storage=Faulty(12))
    save(tmp_path, plan, 3)
    assert check_loads(tmp_path, plan) == 3
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-1", "step-3", "latest"}
    manifest = read_manifest(latest_checkpoint(tmp_path))
    assert {path.name for path in (tmp_path / "checkpoint/step-3").iterdir()} == {*manifest.files, "manifest.json"}


def test_the_newest_are_kept(plan, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, plan, step, keep=2)
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-2", "step-3", "latest"}


def test_another_run_in_the_same_folder_overwrites_nothing_before_its_own_is_complete(plan, tmp_path):
    """Files of the same step have other names where their content is another one."""
    old = save(tmp_path, plan, 2)
    new = save(tmp_path, plan, 2, content=1)
    assert not set(old.files) & set(new.files)
    assert {path.name for path in (tmp_path / "checkpoint/step-2").iterdir()} == {*new.files, "manifest.json"}


def test_a_run_that_begins_anew_in_a_folder_with_later_steps_keeps_its_own(plan, tmp_path):
    """The earlier run's later steps are complete no longer; what lies there may be this run's next save already."""
    save(tmp_path, plan, 2)
    save(tmp_path, plan, 3)
    torn = tmp_path / "checkpoint/step-3/.s0r0.partial"
    torn.write_bytes(b"half of this run's next save")
    save(tmp_path, plan, 1, keep=1)
    assert check_loads(tmp_path, plan) == 1
    assert torn.exists()
    assert not (tmp_path / "checkpoint/step-3/manifest.json").exists()
    save(tmp_path, plan, 3, keep=1)
    assert check_loads(tmp_path, plan) == 3
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-3", "latest"}


def test_devices_are_told_of_steps_that_are_not_saved_again(plan, tmp_path):
    told = []
    for step in (8, 9, 2, 4, 8):
        device = two_devices(1)[0]
        together = CheckpointSet(tmp_path, [device.name], keep=1, describe=partial(described, plan))
        reports = []

        def report(saved, reports=reports):
            reports.append(saved)
            return ()

        with DeviceCheckpoints(str(tmp_path), device.name, device.holding, device.optimizer, report) as own:
            own.save(step, {})
        together.on_saved(reports[0])
        told.append(together.dropped)
        assert latest_checkpoint(tmp_path).name == f"step-{step}"
    assert told == [(), (8,), (), (2,), (4,)]


def described(plan, saved, files) -> Manifest:
    return Manifest(
        step=saved.step, model=plan.model, plan=None, job=None, profile="", losses=(),
        ledger=SampleLedger(), files=files,
    )  # fmt: skip
