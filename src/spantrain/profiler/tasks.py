"""Scores a device's computing capacity with small common tasks (SpanTrain, section 3.2.1).

The paper's p_c = sum over tasks of w_i / t_i. Its weights are not given; here w_i is the task's share, in the table
below, times its operations in units of 10^12. So the score is a weighted mean of the rates reached, in
TFLOP/s, and does not depend on how large the tasks are.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from spantrain.core.profile import DeviceScore
from spantrain.cost.analytic import AnalyticLaw
from spantrain.devices.base import ComputeDevice
from spantrain.models.execution.flop import FlopMeter

_REPEATS = 3
_TASK_S = 0.3
"""A task that has taken so long is not repeated again."""

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class CapacityTask:
    """One small piece of training or arithmetic."""

    name: str
    share: float
    """Its part of the score; all shares sum to 1."""
    dtype: str
    rows: int
    """Samples, or rows of the left matrix, at nominal size."""
    make: Callable[[int, torch.device], Work]
    """(rows, device) -> the work."""


def _training(model: nn.Module, inputs: torch.Tensor) -> Work:
    """Return a forward and a backward pass."""

    def work() -> object:
        model.zero_grad()
        model(inputs).sum().backward()
        return None

    return work


def _cnn(rows: int, place: torch.device) -> Work:
    layers = (nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    return _training(nn.Sequential(*layers).to(place), torch.randn(rows, 3, 32, 32, device=place))


def _transformer(rows: int, place: torch.device) -> Work:
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return _training(block.to(place), torch.randn(rows, 64, 256, device=place))


def _mlp(rows: int, place: torch.device) -> Work:
    layers = (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    return _training(nn.Sequential(*layers).to(place), torch.randn(rows, 512, device=place))


def _product(dtype: torch.dtype) -> Callable[[int, torch.device], Work]:
    def make(rows: int, place: torch.device) -> Work:
        left = torch.randn(rows, 1024, device=place).to(dtype)
        right = torch.randn(1024, 1024, device=place).to(dtype)
        return lambda: left @ right

    return make


TASKS = (
    CapacityTask(name="cnn", share=0.2, dtype="float32", rows=16, make=_cnn),
    CapacityTask(name="transformer", share=0.3, dtype="float32", rows=16, make=_transformer),
    CapacityTask(name="mlp", share=0.2, dtype="float32", rows=128, make=_mlp),
    CapacityTask(name="product-float32", share=0.15, dtype="float32", rows=1024, make=_product(torch.float32)),
    CapacityTask(name="product-bfloat16", share=0.15, dtype="bfloat16", rows=1024, make=_product(torch.bfloat16)),
)
"""Training weighs 0.7, bare arithmetic 0.3, half of that in low precision."""


def measure_tasks(device: ComputeDevice, *, name: str, law: AnalyticLaw | None) -> DeviceScore:
    """Return the score of a device in TFLOP/s, with the seconds of each task at nominal size.

    A CUDA device gets tasks 16 times as large, or starting them would be all that is measured; an emulated device gets
    a 16th, and takes the time that its law gives for their operations. Seconds are brought back to nominal size
    in proportion to the operations.

    Args:
        device: what computes.
        name: the device's name.
        law: of an emulated device; None for a real one.
    """
    task_s: dict[str, float] = {}
    score = 0.0
    for task in TASKS:
        rows = _rows(task, device, law)
        flop, nominal_flop = _flop(task, rows), _flop(task, task.rows)
        emulated_s = None if law is None else replace(law, dtype=task.dtype).flop_seconds(flop)
        work_s = _median_seconds(device, task.make(rows, device.torch_device), emulated_s)
        task_s[task.name] = work_s * nominal_flop / flop
        score += task.share * flop / 1e12 / work_s
    return DeviceScore(device=name, score=score, task_s=task_s)


def _rows(task: CapacityTask, device: ComputeDevice, law: AnalyticLaw | None) -> int:
    if law is not None:
        return max(1, task.rows // 16)
    return task.rows * 16 if device.torch_device.type != "cpu" else task.rows


def _flop(task: CapacityTask, rows: int) -> float:
    """Count the operations of a task without doing it."""
    with FlopMeter() as meter:
        task.make(rows, torch.device("meta"))()
    return float(meter.total)


def _median_seconds(device: ComputeDevice, work: Work, emulated_s: float | None) -> float:
    device.run(work, None)
    seen: list[float] = []
    while len(seen) < _REPEATS and sum(seen) < _TASK_S:
        device.run(work, emulated_s)
        seen.append(device.last_s)
    return statistics.median(seen)
