"""What a device computes: seconds of F, I and W of each class of units, and a score by small common tasks.

The score is the paper's p_c = sum over tasks of w_i / t_i (SpanTrain, section 3.2.1). Its weights are not given; here
w_i is the task's share, in the table below, times its operations in units of 10^12. So the score is a weighted mean of
the rates reached, in TFLOP/s, and does not depend on how large the tasks are.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spantrain.core.action import Op
from spantrain.core.profile import DeviceScore, UnitTiming
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.devices.base import ComputeDevice
from spantrain.models.build import build_units, example_rows
from spantrain.models.execution.measure import FlopMeter
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.units import UnitModule

_LOGGER = logging.getLogger(__name__)

Progress = Callable[[int, int, str], object]
"""(points done, points in all, what comes next)"""

_LONG_POINT_S = 0.15
"""A point that has taken less in all is repeated further: what else the machine does weighs more in short ones."""

_MAX_REPEATS = 9


class Bench(Record):
    """What is measured, and on what."""

    device: ComputeDevice
    spec: ModelSpec
    graph: UnitGraph
    """The model's units, built for `dtype`."""
    kind: str
    """Name of the device's kind, for the record."""
    dtype: str
    """A dtype of `formats.precision`."""
    emulate: Callable[[Unit, Op, int], float] | None = None
    """(unit, operation, samples) -> seconds that an emulated device takes; None on real ones."""


def measure_units(
    bench: Bench, sizes: Sequence[int], *, on_progress: Progress | None = None, repeats: int = 3
) -> tuple[UnitTiming, ...]:
    """Return the median (emulated: least) seconds of F, I and W, for each class of units and number of samples.

    Units of one class are measured once, away from the first place if the class has another. Each point is warmed
    up once, then repeated `repeats` times, short points more often. I of the model's first unit is
    nothing, and its W the whole backward, as in training. A number of samples that does not fit into the
    device's memory ends the list of its class, with a warning.

    Args:
        bench: what is measured.
        sizes: numbers of samples; none gives no timings.
        on_progress: told before each point and at the end.
        repeats: of a point; 1 leaves out the further repeats of short points.
    """
    tell = on_progress or (lambda _done, _total, _text: None)
    wanted, indices = sorted(set(sizes)), _representatives(bench.graph)
    timings: list[UnitTiming] = []
    total = len(indices) * len(wanted)
    # Built together: an unedited model is built whole for whichever of its units.
    units = dict(zip(indices, build_units(bench.spec, indices, seed=0), strict=True)) if wanted else {}
    for number, index in enumerate(indices if wanted else ()):
        unit, one = _UnitBench(units.pop(index), bench=bench, index=index), bench.graph.units[index]
        for done, samples in enumerate(wanted, start=number * len(wanted)):
            tell(done, total, f"{bench.kind}: {one.unit_class}, {samples} samples")
            try:
                timings.append(unit.measure(samples, repeats))
            except torch.OutOfMemoryError:
                _LOGGER.warning("%s: %s does not fit with %d samples or more", bench.kind, one.name, samples)
                break
    tell(total, total, f"{bench.kind}: done")
    return tuple(timings)


def _representatives(graph: UnitGraph) -> list[int]:
    """Return one index for each class of units, in order; the first unit only if no other is like it."""
    chosen: dict[str, int] = {}
    for index, unit in enumerate(graph.units):
        if chosen.get(unit.unit_class, 0) == 0:
            chosen[unit.unit_class] = index
    return list(chosen.values())


class _UnitBench:
    """One unit as a stage of its own, ready to be run on any number of samples."""

    def __init__(self, module: UnitModule, *, bench: Bench, index: int) -> None:
        self._unit = bench.graph.units[index]
        self._bench = bench
        self._before = bench.graph.units[index - 1].outputs if index > 0 else ()
        self._is_last = index == len(bench.graph.units) - 1
        self._executor = StageExecutor(
            [module],
            is_last=self._is_last,
            global_batch=1,
            dtype=bench.dtype,
            torch_device=bench.device.torch_device,
            trains_before=any(tensor.requires_grad for tensor in self._before),
        )

    def measure(self, samples: int, repeats: int) -> UnitTiming:
        """Return the median seconds of each operation; on an emulated device the least."""
        device, executor, emulate = self._bench.device, self._executor, self._bench.emulate
        span, place = Span(0, samples), device.torch_device
        received = tuple(_random_tensor(tensor, samples, place) for tensor in self._before)
        rows = example_rows(self._bench.spec, samples, device=place)
        try:
            # The warm-up of an emulated device need not take its time.
            gradients = self._gradients(device.run(lambda: executor.forward(span, received, rows), None))
            works: dict[Op, Callable[[], object]] = {
                Op.FORWARD: lambda: executor.forward(span, received, rows),
                Op.BACKWARD_INPUT: lambda: executor.backward_input(span, gradients),
                Op.BACKWARD_WEIGHT: lambda: executor.backward_weight(span),
            }
            for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                device.run(works[op], None)
            seen: list[list[float]] = []
            while len(seen) < repeats or (
                repeats > 1 and len(seen) < _MAX_REPEATS and sum(map(sum, seen)) < _LONG_POINT_S
            ):
                seen.append([])
                for op, work in works.items():
                    device.run(work, None if emulate is None else emulate(self._unit, op, samples))
                    seen[-1].append(device.last_s)
        finally:
            executor.discard()
        # An emulated device never takes less than its time; what it takes more is the machine below it.
        middle: Callable[[Sequence[float]], float] = statistics.median if emulate is None else min
        forward_s, input_s, weight_s = (middle(column) for column in zip(*seen, strict=True))
        return UnitTiming(
            unit_class=self._unit.unit_class,
            kind=self._bench.kind,
            dtype=self._bench.dtype,
            samples=samples,
            forward_s=forward_s,
            backward_input_s=input_s,
            backward_weight_s=weight_s,
        )

    def _gradients(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._is_last:
            return ()
        back = zip(outputs, self._unit.outputs, strict=True)
        return tuple(torch.randn_like(output) for output, spec in back if spec.requires_grad)


def _random_tensor(tensor: TensorSpec, samples: int, place: torch.device) -> Tensor:
    """Return values of the right shape and type; integers are zeros, which are in range of any table."""
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype), f"{tensor.name}: no dtype {tensor.dtype}"
    shape = (samples, *tensor.shape_per_sample)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=place)
    return torch.randn(shape, device=place).to(dtype)


_REPEATS = 3
_TASK_S = 0.3
"""A task that has taken so long is not repeated again."""

Work = Callable[[], object]


class CapacityTask(Record):
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

    def work() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

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
        on_a_cpu = device.torch_device.type == "cpu"
        rows = max(1, task.rows // 16) if law is not None else task.rows * (1 if on_a_cpu else 16)
        flop, nominal_flop = _flop(task, rows), _flop(task, task.rows)
        emulated_s = None if law is None else replace(law, dtype=task.dtype).flop_seconds(flop)
        work_s = _median_seconds(device, task.make(rows, device.torch_device), emulated_s)
        task_s[task.name] = work_s * nominal_flop / flop
        score += task.share * flop / 1e12 / work_s
    return DeviceScore(device=name, score=score, task_s=task_s)


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
