"""Which checkpoint a run can go back to, where machines share no disk."""

import errno
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from spantrain.app.training import checkpoints as module
from spantrain.app.training.checkpoints import RunCheckpoints
from spantrain.app.training.stop import StopRequest
from spantrain.core.checkpoint import SampleLedger, StoredFile
from spantrain.errors import WorkerError
from spantrain.runtime.checkpoint.manifest import Manifest, NoRoomError, write_manifest
from spantrain.runtime.checkpoint.tensor_file import Disk, step_folder


@pytest.fixture
def written(tmp_path: Path, spec_of):
    """Two checkpoints of devices a and b; of the first, b's file lies here."""
    found = []
    for step in (4, 8):
        folder = step_folder(tmp_path, step)
        folder.mkdir()
        files = {
            f"{name}.safetensors": StoredFile(device=name, sha256="0" * 64, size_bytes=1, tensors={}) for name in "ab"
        }
        manifest = Manifest(
            step=step, model=spec_of("gpt2"), plan=None, job=None, profile="", losses=(1.0,) * step,
            ledger=SampleLedger(), files=files,
        )  # fmt: skip
        write_manifest(Disk(), folder, manifest)
        found.append(folder)
    (found[0] / "b.safetensors").write_bytes(b"x")
    return found


@pytest.fixture
def checkpoints(tmp_path, written):
    request = SimpleNamespace(resume=None, out=tmp_path)
    found = RunCheckpoints(None, request, None, None, print)  # type: ignore[arg-type]
    found._written = written
    return found


def test_it_is_the_newest_whose_files_are_here_or_with_devices_that_are(checkpoints):
    assert checkpoints.newest({"a", "b"}).content.step == 8
    assert checkpoints.newest({"a"}).content.step == 4
    assert checkpoints.newest({"b"}) is None


def test_who_was_gone_and_is_back_may_be_on_another_machine(checkpoints):
    checkpoints.gone({"b"})
    assert checkpoints.newest({"a", "b"}).content.step == 4
    checkpoints.gone({"a"})
    assert checkpoints.newest({"a", "b"}) is None


def test_one_whose_manifest_is_gone_is_none(checkpoints, written):
    (written[1] / "manifest.json").unlink()
    assert checkpoints.newest({"a", "b"}).content.step == 4


@pytest.fixture
def full(checkpoints, monkeypatch, tmp_path):
    """On a disk that has room the third time; steps that became complete, what is told."""
    error, complete, told = NoRoomError("full"), [], []
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    checkpoints._request.job = SimpleNamespace(steps=8)
    checkpoints._set = Mock(complete=Mock(side_effect=[error, error, tmp_path]), lacks_room=Mock(return_value=False))
    checkpoints._on_complete = lambda step, _folder: complete.append(step)
    checkpoints._reporter = SimpleNamespace(note=told.append)
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    return checkpoints, complete, told


def test_a_full_disk_of_the_coordinator_ends_nothing_and_is_waited_for_at_the_end(full):
    checkpoints, complete, told = full
    stop = StopRequest()
    stop.begun = True
    checkpoints._complete(SimpleNamespace(step=8))
    checkpoints.look(stop)
    assert (complete, len(told), stop.begun) == ([], 1, True)
    assert "No space left on device: this machine has no room for the checkpoint after 8 steps" in told[0]
    checkpoints.await_room(stop)
    assert complete == [8]
    assert stop.ask(), "one signal ends that"


def test_one_signal_ends_the_wait_for_room_on_a_device_behind_the_last_step(full):
    checkpoints, _, _ = full
    stop = StopRequest()
    stop.begun = True
    checkpoints._set.lacks_room.side_effect = lambda step: step == 8
    checkpoints.look(stop)
    assert stop.ask()


def test_a_disk_that_stays_full_ends_the_run(full, monkeypatch):
    checkpoints, _, _ = full
    monkeypatch.setattr(module, "_PATIENCE_S", -1.0)
    checkpoints._complete(SimpleNamespace(step=8))
    with pytest.raises(WorkerError, match="no room for the checkpoint after 8 steps; earlier ones are whole"):
        checkpoints.await_room(StopRequest())
