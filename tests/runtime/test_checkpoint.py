"""Checkpoints: what was saved comes back, damage is noticed, and a save that is cut off harms nothing."""

import threading
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from made_up_runs import PlanDevice, load_all, save_all
from spantrain.core.checkpoint import CheckpointContent, SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.parts import TensorPart
from spantrain.core.spans import Span
from spantrain.errors import ConfigError, WorkerError
from spantrain.runtime.checkpoint.complete import CheckpointSet
from spantrain.runtime.checkpoint.device import DeviceCheckpoints
from spantrain.runtime.checkpoint.holding import Holding
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.saver import CheckpointSaver, write_device_file
from spantrain.runtime.checkpoint.snapshot import SnapshotBuffers
from spantrain.runtime.checkpoint.storage import Disk
from spantrain.runtime.checkpoint.tensor_file import TensorFiles
from spantrain.runtime.exchange import Block
from spantrain.runtime.exchange_transfer import Group
from spantrain.runtime.optimizer import build_optimizer

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=4)
BATCH = 4


class Faulty(Disk):
    """A disk whose machine ends before an operation, or in the middle of it; nothing happens afterwards."""

    def __init__(self, ends_at: int = 10**9, *, halfway: bool = False) -> None:
        self.operations: list[str] = []
        self._ends_at = ends_at
        self._halfway = halfway
        self._lock = threading.Lock()

    def _note(self, what: str) -> bool:
        """Count; return whether the operation is to be done by half."""
        with self._lock:
            self.operations.append(what)
            if len(self.operations) > self._ends_at:
                raise OSError("the machine has ended")
            return len(self.operations) == self._ends_at

    def _end(self) -> None:
        raise OSError("the machine ends")

    def make_folder(self, folder: Path) -> None:
        last = self._note(f"make {folder.name}")
        if not last or self._halfway:
            super().make_folder(folder)
        if last:
            self._end()

    def create(self, path: Path) -> BinaryIO:
        last = self._note(f"create {path.name}")
        if last and not self._halfway:
            self._end()
        stream = super().create(path)
        if last:
            stream.close()
            self._end()
        return stream

    def append(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        last = self._note("append")
        if not last:
            super().append(stream, data)
        elif self._halfway:
            super().append(stream, data[: len(data) // 2])
            stream.flush()
        if last:
            self._end()

    def sync(self, stream: BinaryIO) -> None:
        last = self._note("sync")
        if not last or self._halfway:
            super().sync(stream)
        if last:
            self._end()

    def rename(self, source: Path, target: Path) -> None:
        last = self._note(f"rename {target.name}")
        if not last or self._halfway:
            super().rename(source, target)
        if last:
            self._end()

    def sync_folder(self, folder: Path) -> None:
        if self._note(f"sync {folder.name}"):
            self._end()
        super().sync_folder(folder)

    def remove(self, path: Path) -> None:
        last = self._note(f"remove {path.name}")
        if not last or self._halfway:
            super().remove(path)
        if last:
            self._end()


@pytest.fixture(scope="module")
def plan(spec_of, make_plan):
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, BATCH)]] * 2, "gpipe")


def tensors_at(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and their state after so many steps."""
    torch.manual_seed(step)
    shapes = {"a.weight": (3, 2), "b": (4,)}
    state = {"": 0, "exp_avg": 1, "exp_avg_sq": 2}
    return {
        name: {**{key: torch.randn(shape) for key in state}, "step": torch.tensor(float(step))}
        for name, shape in shapes.items()
    }


def two_devices(step: int) -> list[PlanDevice]:
    """One has all of a.weight and the middle of b, the other one the ends of b."""
    middle, ends = (Span(1, 3),), (Span(3, 4), Span(0, 1))
    parts = {
        "s0r0": {"a.weight": TensorPart(full_shape=(3, 2)), "b": TensorPart(full_shape=(4,), ranges=middle)},
        "s1r0": {"b": TensorPart(full_shape=(4,), ranges=ends)},
    }
    found = []
    for device, own in parts.items():
        parameters = {name: torch.nn.Parameter(torch.zeros(part.shape)) for name, part in own.items()}
        holding = Holding(parameters=parameters, parts=own, writes=frozenset(own))
        found.append(PlanDevice(name=device, holding=holding, optimizer=build_optimizer(JOB, parameters.values())))
        if step:
            found[-1].fill(tensors_at(step))
    return found


def save(run: Path, plan, step: int, **options):
    return save_all(run, plan, JOB, two_devices(options.pop("content", step)), step, **options)


def check_loads(run: Path, plan) -> int:
    """What the marker names is complete and right; return its step."""
    folder = latest_checkpoint(run)
    manifest = read_manifest(folder)
    wanted = two_devices(manifest.step)
    devices = two_devices(0)
    load_all(lambda _: folder, manifest.content, plan, devices)
    for got, want in zip(devices, wanted, strict=True):
        for name, parameter in got.holding.parameters.items():
            other = want.holding.parameters[name]
            assert torch.equal(parameter, other), name
            assert got.optimizer.state[parameter].keys() == want.optimizer.state[other].keys()
            for key, value in got.optimizer.state[parameter].items():
                assert torch.equal(value, want.optimizer.state[other][key]), (name, key)
    return manifest.step


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
        step=saved.step, model=plan.model, plan=None, job=None, schedule="", profile="", losses=(),
        ledger=SampleLedger(), files=files,
    )  # fmt: skip


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
    (piece,) = files.read(name, [Block("a", (Span(1, 2), Span(0, 2)))])
    assert torch.equal(piece, tensors["a"][1:2, 0:2])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """What is written is what was there when `save` was called; only the next save waits."""
    gate = threading.Event()

    class Slow(Disk):
        def sync(self, stream: BinaryIO) -> None:
            assert gate.wait(60)
            super().sync(stream)

    value = torch.ones(5)
    parts = {"a": TensorPart(full_shape=(5,))}
    saved = []

    def report(one):
        saved.append(one)
        return ()

    with CheckpointSaver(tmp_path, "dev", report, Slow()) as saver:
        saver.save(1, {"a": value}, parts, {})
        value.fill_(2.0)
        assert saved == []
        gate.set()
        saver.save(2, {"a": value}, parts, {})
        assert [one.step for one in saved] == [1]
    assert [one.step for one in saved] == [1, 2]
    for one in saved:
        assert load_file(tmp_path / f"step-{one.step}" / one.name)["a"].tolist() == [float(one.step)] * 5


def test_a_device_removes_its_files_of_checkpoints_that_are_not_kept(tmp_path):
    """Where the coordinator is on another machine, and cannot."""
    parts = {"a": TensorPart(full_shape=(5,))}
    dropped: list[int] = []
    with CheckpointSaver(tmp_path, "dev", lambda _saved: tuple(dropped)) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"a": torch.full((5,), float(step))}, parts, {})
            saver.wait()
            dropped = [1] if step == 2 else []
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3"}


def test_a_disk_that_fails_is_told_at_the_next_step_that_saves(tmp_path):
    saver = CheckpointSaver(tmp_path, "dev", lambda _saved: (), Faulty(3))
    saver.save(1, {"a": torch.ones(5)}, {"a": TensorPart(full_shape=(5,))}, {})
    with pytest.raises(WorkerError, match=r"could not be written: the machine ends; the one before is whole"):
        saver.wait()
    saver.wait()


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
    devices = two_devices(2)[:1]
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


def test_a_manifest_that_is_wrong_is_named(plan, tmp_path):
    save(tmp_path, plan, 2)
    path = latest_checkpoint(tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": -2').replace('"schedule"', '"shedule"', 1))
    with pytest.raises(ConfigError, match=r"(?s)manifest.json.*shedule"):
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
    alone = Group(own="dev", peers=(), nearness=lambda _peer: 0)
    DeviceCheckpoints("", "dev", again, other, lambda _saved: ()).resume(
        str(tmp_path / "checkpoint/step-2"), content, alone, None
    )
    for weight, one in ((holding.parameters["w"], optimizer), (again.parameters["w"], other)):
        weight.grad = torch.ones_like(weight)
        one.step()
    assert torch.equal(holding.parameters["w"], again.parameters["w"])
