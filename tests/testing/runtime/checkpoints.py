"""Checkpoints of two made-up devices, and a disk that fails at a chosen moment."""

import threading
from pathlib import Path
from typing import BinaryIO

import torch

from spantrain.core.job import TrainJob
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.runtime.checkpoint.holding import Holding
from spantrain.runtime.checkpoint.manifest import latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.tensor_file import Disk
from spantrain.runtime.gradients.optimizer import build_optimizer
from testing.runtime.runs import PlanDevice, load_all, save_all

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


def whole_device(step: int) -> PlanDevice:
    """One that has all of everything."""
    parts = {"a.weight": TensorPart(full_shape=(3, 2)), "b": TensorPart(full_shape=(4,))}
    parameters = {name: torch.nn.Parameter(torch.zeros(part.shape)) for name, part in parts.items()}
    holding = Holding(parameters=parameters, parts=parts, writes=frozenset(parts))
    device = PlanDevice(name="s0r0", holding=holding, optimizer=build_optimizer(JOB, parameters.values()))
    device.fill(tensors_at(step))
    return device


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
