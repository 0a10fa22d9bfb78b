"""Which checkpoint a run can go back to, where machines share no disk."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from spantrain.app.training.checkpoints import RunCheckpoints
from spantrain.core.checkpoint import SampleLedger, StoredFile
from spantrain.runtime.checkpoint.manifest import Manifest, write_manifest
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
