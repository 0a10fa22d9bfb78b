"""Measuring F, I and W of units."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

from spantrain.core.action import Op
from spantrain.core.units import ModelSpec, Unit, UnitGraph
from spantrain.devices.base import CpuDevice
from spantrain.devices.emulated import EmulatedDevice
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.profiler.compute import Bench, measure_units


class FrozenClock:
    """Time that passes only in waiting, so that an emulated device's time is exact."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


class SmallDevice(CpuDevice):
    """Runs out of memory in the nth piece of work."""

    def __init__(self, room_for: int) -> None:
        super().__init__()
        self.room_for = room_for

    def run(self, work, seconds):
        self.room_for -= 1
        if self.room_for < 0:
            raise torch.OutOfMemoryError("full")
        return super().run(work, seconds)


@functools.cache
def model(name: str, dtype: str = "float32") -> tuple[ModelSpec, UnitGraph]:
    torch.set_num_threads(1)
    spec = resolve_model(name)
    return spec, build_graph(spec, dtype=dtype)


def seconds_law(scale_s: float) -> Callable[[Unit, Op, int], float]:
    weights = {Op.FORWARD: 1, Op.BACKWARD_INPUT: 2, Op.BACKWARD_WEIGHT: 3}
    return lambda unit, op, samples: scale_s * weights[op] * (samples + 1)


def bench_of(device, spec, graph, *, kind: str = "cpu", dtype: str = "float32", emulate=None) -> Bench:
    return Bench(device=device, spec=spec, graph=graph, kind=kind, dtype=dtype, emulate=emulate)


def test_each_class_of_units_is_measured_once_at_each_size() -> None:
    spec, graph = model("gpt2-tiny")
    bench = bench_of(EmulatedDevice(clock=FrozenClock()), spec, graph, kind="board", emulate=seconds_law(1e-3))
    timings = measure_units(bench, (4, 1, 2, 2))
    classes = {unit.unit_class for unit in graph.units}
    assert len(classes) == 3
    points = [(timing.unit_class, timing.samples) for timing in timings]
    assert sorted(points) == sorted(itertools.product(classes, (1, 2, 4)))
    for timing in timings:
        per_sample = 1e-3 * (timing.samples + 1)
        assert timing.forward_s == pytest.approx(per_sample)
        assert timing.backward_input_s == pytest.approx(2 * per_sample)
        assert timing.backward_weight_s == pytest.approx(3 * per_sample)
        assert (timing.kind, timing.dtype, timing.source) == ("board", "float32", "measured")


@pytest.mark.parametrize(("scale_s", "runs"), [(1e-4, 9), (1.0, 3)])
def test_short_points_are_repeated_more(scale_s: float, runs: int) -> None:
    spec, graph = model("gpt2-tiny")
    asked: list[tuple[Op, int]] = []

    def emulate(unit: Unit, op: Op, samples: int) -> float:
        asked.append((op, samples))
        return seconds_law(scale_s)(unit, op, samples)

    device = EmulatedDevice(clock=FrozenClock())
    measure_units(bench_of(device, spec, graph, emulate=emulate), (2,))
    assert asked.count((Op.FORWARD, 2)) == 3 * runs


def test_progress_is_told_point_by_point() -> None:
    spec, graph = model("gpt2-tiny")
    told: list[tuple[int, int, str]] = []
    bench = bench_of(CpuDevice(), spec, graph)
    measure_units(bench, (1, 2), on_progress=lambda *event: told.append(event), repeats=1)
    assert [done for done, _, _ in told] == [0, 1, 2, 3, 4, 5, 6]
    assert {total for _, total, _ in told} == {6}
    assert "2 samples" in told[1][2]


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_real_times_of_every_family(name: str) -> None:
    spec, graph = model(name)
    timings = measure_units(bench_of(CpuDevice(), spec, graph), (2,), repeats=1)
    assert {timing.unit_class for timing in timings} == {unit.unit_class for unit in graph.units}
    for timing in timings:
        assert min(timing.forward_s, timing.backward_input_s, timing.backward_weight_s) > 0


def test_bfloat16_is_measured_under_autocast() -> None:
    spec, graph = model("gpt2-tiny", "bfloat16")
    timings = measure_units(bench_of(CpuDevice(), spec, graph, dtype="bfloat16"), (2,), repeats=1)
    assert {timing.dtype for timing in timings} == {"bfloat16"}
    assert len(timings) == 3


def test_sizes_that_do_not_fit_are_left_out_aloud(caplog) -> None:
    spec, graph = model("gpt2-tiny")
    # Two runs of F, I and W for each of two sizes; the third size of the first class does not fit.
    timings = measure_units(bench_of(SmallDevice(12), spec, graph), (1, 2, 4, 8), repeats=1)
    assert [timing.samples for timing in timings] == [1, 2]
    assert "does not fit with 4 samples or more" in caplog.text


def test_without_sizes_nothing_is_measured() -> None:
    spec, graph = model("gpt2-tiny")
    assert measure_units(bench_of(SmallDevice(0), spec, graph), ()) == ()
