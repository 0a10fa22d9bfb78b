"""Checkpoints: a save that is cut off harms nothing, the newest are kept, devices remove what is not."""

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spantrain.core.checkpoint import SampleLedger
from spantrain.core.span import Span
from spantrain.errors import ConfigError, WorkerError
from spantrain.runtime.checkpoint.manifest import (
    CheckpointSet,
    Manifest,
    NoRoomError,
    final_checkpoint,
    latest_checkpoint,
    read_manifest,
)
from spantrain.runtime.checkpoint.saver import DeviceCheckpoints
from spantrain.runtime.checkpoint.tensor_file import Disk
from spantrain.runtime.control.data_requests import NotSaved
from spantrain.runtime.control.requests import SavedFile
from testing.patience import until
from testing.runtime.checkpoints import BATCH, Faulty, check_loads, save, two_devices, whole_device

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
            with pytest.raises(WorkerError, match=r"could not be written.*earlier ones are whole|before is whole"):
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


def test_the_best_is_kept_besides_the_newest_and_named_at_the_end(plan, tmp_path):
    """Of two that are kept it is one; of one, a second. Whoever goes on saves without it."""
    kept = []
    for step, best, keep in ((1, None, 2), (2, 1, 2), (3, 1, 2), (4, 3, 2), (5, 3, 1), (6, 5, 1), (7, 5, 3)):
        save(tmp_path, plan, step, keep=keep, best=best)
        kept.append(sorted(int(path.name[5:]) for path in (tmp_path / "checkpoint").glob("step-*")))
    assert kept == [[1], [1, 2], [1, 3], [3, 4], [3, 5], [5, 6], [5, 6, 7]]
    together = CheckpointSet(tmp_path, ["s0r0"], keep=1, describe=partial(described, plan))
    together.end_with(5)
    assert (final_checkpoint(tmp_path).name, latest_checkpoint(tmp_path).name) == ("step-5", "step-7")
    with pytest.raises(WorkerError, match="best: cannot be written: the machine ends; all checkpoints are whole"):
        CheckpointSet(tmp_path, ["s0r0"], keep=1, describe=partial(described, plan), storage=Faulty(1)).end_with(6)
    save(tmp_path, plan, 8, keep=1)
    assert final_checkpoint(tmp_path).name == "step-8"
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-8", "latest"}


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
    written = tmp_path / "checkpoint/step-3/s9r9-0123456789ab.safetensors"
    written.write_bytes(b"a part of this run's next save")
    save(tmp_path, plan, 1, keep=1)
    assert check_loads(tmp_path, plan) == 1
    assert written.exists()
    assert not (tmp_path / "checkpoint/step-3/manifest.json").exists()
    save(tmp_path, plan, 3, keep=1)
    assert check_loads(tmp_path, plan) == 3
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-3", "latest"}


def test_devices_are_told_of_steps_that_are_not_saved_again(plan, tmp_path):
    told = []
    for step in (8, 9, 2, 4, 8):
        device = whole_device(1)
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


def told_by(folder: Path, devices, step: int) -> list[SavedFile]:
    """What devices say when they have saved."""
    saved: list[SavedFile] = []

    def report(one: SavedFile) -> tuple[int, ...]:
        saved.append(one)
        return ()

    for device in devices:
        with DeviceCheckpoints(str(folder), device.name, device.holding, device.optimizer, report) as own:
            own.save(step, {})
    return saved


@pytest.fixture
def together(plan, tmp_path) -> CheckpointSet:
    return CheckpointSet(tmp_path, ["s0r0", "s1r0"], keep=1, describe=partial(described, plan))


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").iterdir()}


def test_a_file_that_is_not_what_is_said_of_it_completes_nothing(together, tmp_path):
    for one in told_by(tmp_path, two_devices(1), 1):
        together.on_saved(one)
    first, second = told_by(tmp_path, two_devices(2), 2)
    assert together.on_saved(first) is None
    path = tmp_path / "checkpoint/step-2" / second.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match="was changed or damaged"):
        together.on_saved(second)
    assert steps_in(tmp_path) == {"step-1", "step-2", "latest"}
    assert latest_checkpoint(tmp_path).name == "step-1"


def test_a_file_on_another_machine_has_its_devices_word(together, tmp_path):
    first, second = told_by(tmp_path, two_devices(1), 1)
    (tmp_path / "checkpoint/step-1" / second.name).unlink()
    assert together.on_saved(first) is None
    assert together.on_saved(second) == tmp_path / "checkpoint/step-1"


def test_what_is_told_twice_counts_once_and_nothing_else_is_told_afterwards(together, tmp_path):
    first, second = told_by(tmp_path, two_devices(1), 1)
    assert together.on_saved(first) is None
    assert together.on_saved(first) is None
    other = replace(first, file=replace(first.file, sha256="0" * 64))
    with pytest.raises(WorkerError, match="s0r0 has saved another file after 1 steps already"):
        together.on_saved(replace(other, name="s0r0-000000000000.safetensors"))
    with pytest.raises(WorkerError, match="s1r0 has other scalars"):
        together.on_saved(replace(second, scalars={"loss_scale": 1.0}))
    assert together.on_saved(second) == tmp_path / "checkpoint/step-1"


@pytest.mark.parametrize("lacks", ["all of a tensor", "a part of one"])
def test_nothing_is_removed_for_one_that_lacks_what_the_one_before_has(lacks, together, plan, tmp_path):
    for one in told_by(tmp_path, two_devices(1), 1):
        together.on_saved(one)
    first, second = told_by(tmp_path, two_devices(2), 2)
    thinner = {key: stored for key, stored in first.file.tensors.items() if "a.weight" not in key}
    if lacks == "a part of one":
        thinner = {key: stored for key, stored in first.file.tensors.items() if not key.endswith("/b")}
    together.on_saved(replace(first, file=replace(first.file, tensors=thinner)))
    with pytest.raises(WorkerError, match=r"no device has saved .*; the checkpoint before is whole"):
        together.on_saved(second)
    assert check_loads(tmp_path, plan) == 1


def test_a_manifest_that_does_not_read_back_removes_nothing(together, plan, tmp_path):
    """Such as one that a full or broken disk has cut."""

    class Cut(Disk):
        def append(self, stream, data) -> None:
            super().append(stream, data[: len(data) // 2] if b"ledger" in bytes(data) else data)

    for one in told_by(tmp_path, two_devices(1), 1):
        together.on_saved(one)
    describe = partial(described, plan)
    again = CheckpointSet(tmp_path, ["s0r0", "s1r0"], keep=1, describe=describe, storage=Cut())
    first, second = told_by(tmp_path, two_devices(2), 2)
    assert again.on_saved(first) is None
    with pytest.raises(WorkerError, match="could not be written"):
        again.on_saved(second)
    assert check_loads(tmp_path, plan) == 1


def test_half_of_a_file_does_not_keep_a_full_disk_full(tmp_path):
    class Full(Disk):
        def append(self, stream, data) -> None:
            super().append(stream, data)
            raise OSError(errno.ENOSPC, "No space left on device")

    device, told = whole_device(1), []
    with (
        pytest.raises(WorkerError, match="No space left"),
        DeviceCheckpoints(
            str(tmp_path), "s0r0", device.holding, device.optimizer, lambda _saved: (), Full(), complain=told.append,
            again_s=0.01, patience_s=0.1,
        ) as own,
    ):  # fmt: skip
        own.save(1, {})
    assert [(one.step, "No space left" in one.why) for one in told] == [(1, True)]
    assert list((tmp_path / "checkpoint/step-1").iterdir()) == []


class Full(Disk):
    full = True

    def append(self, stream, data) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(stream, data)


def test_a_full_disk_ends_nothing_and_is_tried_again(tmp_path):
    """Until the next save; the last one is waited for."""
    device, disk, told, saved = whole_device(1), Full(), [], []

    def report(one: SavedFile) -> tuple[int, ...]:
        saved.append(one.step)
        return ()

    def complain(one: NotSaved) -> None:
        told.append(one.step)
        disk.full = one.step < 3

    with DeviceCheckpoints(
        str(tmp_path), "s0r0", device.holding, device.optimizer, report, disk, complain=complain, again_s=0.01
    ) as own:
        for step in (1, 2, 3):
            own.save(step, {})
            until(lambda step=step: len(told) >= step)
    assert (told, saved) == ([1, 2, 3], [3])


def test_a_manifest_that_there_was_no_room_for_is_written_yet(plan, tmp_path):
    disk = Full()
    together = CheckpointSet(tmp_path, ["s0r0", "s1r0"], keep=1, describe=partial(described, plan), storage=disk)
    first, second = told_by(tmp_path, two_devices(1), 1)
    assert together.on_saved(first) is None
    with pytest.raises(NoRoomError, match="No space left"):
        together.on_saved(second)
    disk.full = False
    assert together.complete(second) == tmp_path / "checkpoint/step-1"
    assert check_loads(tmp_path, plan) == 1
    assert together.complete(second) is None


def test_what_others_saved_of_a_checkpoint_that_one_had_no_room_for_is_removed(together, tmp_path):
    devices = two_devices(1)
    first, _ = told_by(tmp_path, devices, 1)
    assert together.on_saved(first) is None
    together.not_saved("s1r0", 1)
    assert (tmp_path / "checkpoint/step-1" / first.name).exists()  # it may be written yet
    (later, last) = told_by(tmp_path, devices, 2)
    assert together.on_saved(later) is None
    together.not_saved("s1r0", 2)
    assert together.dropped == (1,)
    assert list((tmp_path / "checkpoint/step-1").iterdir()) == []
    assert together.on_saved(last) == tmp_path / "checkpoint/step-2"
    assert together.dropped == (1,)


def test_what_an_ended_process_left_half_is_removed_at_the_next_start(tmp_path):
    folder = tmp_path / "checkpoint/step-7"
    folder.mkdir(parents=True)
    for name in (".s0r0.partial", ".s9r9.partial", ".manifest.json.partial", "s0r0-0123456789ab.safetensors"):
        (folder / name).write_bytes(b"half")
    (folder.parent / ".latest.partial").write_bytes(b"half")
    device = whole_device(1)
    with DeviceCheckpoints(str(tmp_path), "s0r0", device.holding, device.optimizer, lambda _saved: ()):
        pass
    assert [path.name for path in folder.iterdir()] == ["s0r0-0123456789ab.safetensors"]
    assert list(folder.parent.iterdir()) == [folder]
