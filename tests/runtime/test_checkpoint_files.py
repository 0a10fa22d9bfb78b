"""Files of checkpoints: what was saved comes back, and damage is noticed."""

import string
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.errors import ConfigError, WorkerError
from spantrain.runtime.checkpoint.device_files import FilesToBeginWith
from spantrain.runtime.checkpoint.holding import Holding
from spantrain.runtime.checkpoint.manifest import latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.saver import DeviceCheckpoints, SnapshotBuffers, restore, write_device_file
from spantrain.runtime.checkpoint.tensor_file import Disk, TensorFiles
from spantrain.runtime.gradients.optimizer import build_optimizer
from spantrain.runtime.launch.launcher import LocalWorkers
from spantrain.runtime.redistribution.exchange import ExchangeGroup, TensorBlock
from testing.patience import PATIENCE_S
from testing.runtime.checkpoints import BATCH, JOB, Faulty, save, tensors_at, two_devices, whole_device
from testing.runtime.runs import load_all, save_all

pytestmark = pytest.mark.checkpoint


@pytest.fixture(scope="module")
def plan(spec_of, make_plan):
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, BATCH)]] * 2, "gpipe")


def test_files_are_safetensors_by_the_names_of_the_unsplit_model(plan, tmp_path):
    manifest = save(tmp_path, plan, 2, scalars={"loss_scale": 1024.0})
    found = {file.device: load_file(latest_checkpoint(tmp_path) / name) for name, file in manifest.files.items()}
    values = tensors_at(2)
    assert torch.equal(found["s0r0"]["parameter/a.weight"], values["a.weight"][""])
    assert torch.equal(found["s0r0"]["optimizer/exp_avg/b"], values["b"]["exp_avg"][1:3])
    assert torch.equal(found["s1r0"]["parameter/b"], values["b"][""][[3, 0]])
    assert read_manifest(latest_checkpoint(tmp_path)).scalars == {"loss_scale": 1024.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_type_come_back(dtype, tmp_path):
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "t": torch.ones(3, 2).t(),
    }
    tensors["empty"] = torch.zeros(0, 4)
    parts = {name: TensorPart(full_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    name, stored = write_device_file(Disk(), tmp_path, "dev", tensors, parts)
    assert stored.size_bytes == (tmp_path / name).stat().st_size
    back = load_file(tmp_path / name)
    assert all(torch.equal(back[key], tensor) and back[key].dtype == tensor.dtype for key, tensor in tensors.items())
    files = TensorFiles(tmp_path, {name: stored})
    (piece,) = files.read(name, [TensorBlock("a", (Span(1, 2), Span(0, 2)))])
    assert torch.equal(piece, tensors["a"][1:2, 0:2])


@pytest.mark.parametrize("device", ["../../escaped", "lab/0", ".hidden", "x" * 80])
def test_no_device_writes_outside_of_its_folder(device, tmp_path):
    folder = tmp_path / "run" / "step-1"
    parts = {"a": TensorPart(full_shape=(2,))}
    name, _ = write_device_file(Disk(), folder, device, {"a": torch.zeros(2)}, parts)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / name]


def test_names_of_logs_have_letters_digits_and_four_signs_and_the_rest_as_numbers(tmp_path):
    plain = set(string.ascii_letters + string.digits + "-_.~")
    for letter in map(chr, range(1, 256)):
        written = letter if letter in plain else "".join(f"%{byte:02X}" for byte in letter.encode())
        log = LocalWorkers.log_of(SimpleNamespace(_log_folder=tmp_path), f"a{letter}")
        assert log == tmp_path / f"a{written}.log"
    assert LocalWorkers.log_of(SimpleNamespace(_log_folder=tmp_path), "../x") == tmp_path / "%2E.%2Fx.log"


def five_numbers(value: float) -> tuple[Holding, torch.optim.Optimizer]:
    own = torch.nn.Parameter(torch.full((5,), value))
    part = TensorPart(full_shape=(5,))
    return Holding(parameters={"a": own}, parts={"a": part}, writes=frozenset("a")), torch.optim.SGD([own])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """What is written is what was there when `save` was called; only the next save waits."""
    gate = threading.Event()

    class Slow(Disk):
        def sync(self, stream: BinaryIO) -> None:
            assert gate.wait(PATIENCE_S)
            super().sync(stream)

    holding, optimizer = five_numbers(1.0)
    saved = []

    def report(one):
        saved.append(one)
        return ()

    with DeviceCheckpoints(str(tmp_path), "dev", holding, optimizer, report, Slow()) as own:
        own.save(1, {})
        holding.parameters["a"].data.fill_(2.0)
        assert saved == []
        gate.set()
        own.save(2, {})
        assert [one.step for one in saved[:1]] == [1]  # the second may be written by now, too
    assert [one.step for one in saved] == [1, 2]
    for one in saved:
        content = load_file(tmp_path / f"checkpoint/step-{one.step}" / one.name)
        assert content["parameter/a"].tolist() == [float(one.step)] * 5


def test_a_device_removes_its_files_of_checkpoints_that_are_not_kept(tmp_path):
    """Where the coordinator is on another machine, and cannot."""
    dropped: list[int] = []
    with DeviceCheckpoints(str(tmp_path), "dev", *five_numbers(1.0), lambda _saved: tuple(dropped)) as own:
        for step in (1, 2, 3):
            own.save(step, {})
            own.wait()
            dropped = [1] if step == 2 else []
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-2", "step-3"}


def test_a_folder_that_another_device_removes_at_the_same_time_is_no_fault(tmp_path, monkeypatch):
    """Between a look whether it is there and one at what is in it."""
    looked = Path.is_dir

    def looked_and_gone(path: Path) -> bool:
        there = looked(path)
        if there and path.name == "step-1" and not any(path.iterdir()):
            path.rmdir()
        return there

    dropped: list[int] = []
    with DeviceCheckpoints(str(tmp_path), "dev", *five_numbers(1.0), lambda _saved: tuple(dropped)) as own:
        own.save(1, {})
        own.wait()
        monkeypatch.setattr(Path, "is_dir", looked_and_gone)
        dropped = [1]
        own.save(2, {})
        own.wait()
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-2"}


def test_a_disk_that_fails_is_told_at_the_next_step_that_saves(tmp_path):
    own = DeviceCheckpoints(str(tmp_path), "dev", *five_numbers(1.0), lambda _saved: (), Faulty(3))
    own.save(1, {})
    with pytest.raises(WorkerError, match=r"/checkpoint: a checkpoint could not be written: the machine ends; earlier"):
        own.wait()
    own.wait()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "changed":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(b"")


def test_random_numbers_go_on_where_they_were(plan, tmp_path):
    """Those of the device of the same name."""
    devices = [whole_device(2)]
    torch.manual_seed(3)
    manifest = save_all(tmp_path, plan, JOB, devices, 2)
    wanted = torch.rand(4)
    torch.manual_seed(99)
    load_all(lambda _: latest_checkpoint(tmp_path), manifest.content, plan, devices)
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("how", ["truncated", "changed", "emptied"])
def test_damage_is_named_before_anything_is_used(how, plan, tmp_path):
    manifest = save(tmp_path, plan, 2)
    folder = latest_checkpoint(tmp_path)
    victim = folder / sorted(manifest.files)[0]
    damage(victim, how)
    with pytest.raises(ConfigError, match=f"{victim.name}: was changed or damaged"):
        read_manifest(folder)
    first = two_devices(0)[:1]
    with pytest.raises(ConfigError, match="changed or damaged"):
        load_all(lambda _: folder, manifest.content, plan, first)


def test_a_file_that_is_missing_is_named_with_its_device(plan, tmp_path):
    manifest = save(tmp_path, plan, 2)
    folder = latest_checkpoint(tmp_path)
    name = next(name for name, file in manifest.files.items() if file.device == "s1r0")
    (folder / name).unlink()
    assert read_manifest(folder) == manifest, "it may lie on another machine"
    with pytest.raises(ConfigError, match=rf"not on any machine of this run: {name} \(device s1r0 wrote it\)"):
        load_all(lambda _: folder, manifest.content, plan, two_devices(0)[1:])


@pytest.mark.parametrize(
    ("marker", "says"),
    [(None, "holds no checkpoint"), ("step-9", "no complete checkpoint"), ("../../etc", "names no checkpoint")],
)
def test_a_run_without_a_complete_checkpoint_says_so(marker, says, tmp_path):
    if marker is not None:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint/latest").write_text(marker)
    with pytest.raises(ConfigError, match=says):
        read_manifest(latest_checkpoint(tmp_path))


def test_which_checkpoints_there_are_is_said_where_none_is_named(plan, tmp_path):
    save(tmp_path, plan, 2)
    name = latest_checkpoint(tmp_path).name
    (tmp_path / "checkpoint/latest").unlink()
    with pytest.raises(ConfigError, match=rf"no .*latest\); write into it which is to be taken: {name}"):
        latest_checkpoint(tmp_path)


def test_a_manifest_that_is_wrong_is_named(plan, tmp_path):
    save(tmp_path, plan, 2)
    path = latest_checkpoint(tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": -2').replace('"schedule"', '"shedule"', 1))
    with pytest.raises(ConfigError, match=r"(?s)manifest.json.*shedule"):
        read_manifest(path.parent)


def test_a_manifest_of_another_step_than_its_folder_is_refused(plan, tmp_path):
    save(tmp_path, plan, 2)
    path = latest_checkpoint(tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 7'))
    with pytest.raises(ConfigError, match=r"manifest\.json: step: must be 2, as its folder says, got 7"):
        read_manifest(path.parent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_snapshot_of_a_cuda_device_is_of_the_moment_when_it_was_taken():
    """Copies are queued on the stream, before what trains next; the buffers are page-locked."""
    value = torch.ones(2**22, device="cuda")
    buffers = SnapshotBuffers()
    copies = buffers.take({"a": value})
    value.fill_(2.0)
    buffers.wait()
    assert copies["a"].is_pinned()
    assert torch.equal(copies["a"], torch.ones(2**22))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_state_of_a_fused_optimizer_comes_back(tmp_path):
    def trained(steps: int) -> tuple[Holding, torch.optim.Optimizer]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
        optimizer = build_optimizer(JOB, [weight])
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        part = TensorPart(full_shape=(8, 8))
        return Holding(parameters={"w": weight}, parts={"w": part}, writes=frozenset("w")), optimizer

    holding, optimizer = trained(2)
    saved = []

    def report(one):
        saved.append(one)
        return ()

    with DeviceCheckpoints(str(tmp_path), "dev", holding, optimizer, report) as checkpoints:
        checkpoints.save(2, {})
    again, other = trained(0)
    content = CheckpointContent(step=2, files={saved[0].name: saved[0].file})
    alone = ExchangeGroup(own="dev", peers=(), nearness=lambda _peer: 0)
    restore(FilesToBeginWith(tmp_path / "checkpoint/step-2", content.files), again, other, alone, None)
    for weight, one in ((holding.parameters["w"], optimizer), (again.parameters["w"], other)):
        weight.grad = torch.ones_like(weight)
        one.step()
    assert torch.equal(holding.parameters["w"], again.parameters["w"])
