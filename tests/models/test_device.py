"""Devices: results come back, and emulated time is kept without drift."""

import time
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from spantrain.devices import accelerators
from spantrain.devices.accelerators import CudaDevice, StreamedDevice
from spantrain.devices.base import CpuDevice
from spantrain.devices.emulated import EmulatedDevice, PreciseClock
from spantrain.devices.registry import open_device
from spantrain.errors import ConfigError


class FakeClock:
    """Time that passes only in work and in waiting; wakes up late by `lag_s`."""

    def __init__(self, *, lag_s: float = 0.0) -> None:
        self.time_s = 100.0
        self.lag_s = lag_s

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s + self.lag_s)

    def work(self, seconds: float):
        def run() -> None:
            self.time_s += seconds

        return run


def test_cpu_returns_the_result_and_ignores_the_emulated_time() -> None:
    device = CpuDevice()
    assert device.run(lambda: "done", 1e9) == "done", "it does not wait for that"
    assert 0 < device.last_s < 1e9
    assert device.torch_device == torch.device("cpu")


def test_emulated_work_takes_the_emulated_time() -> None:
    clock = FakeClock()
    device = EmulatedDevice(clock=clock)
    device.run(clock.work(0.003), 0.02)
    assert clock.time_s == pytest.approx(100.02)
    assert device.last_s == pytest.approx(0.02)


def test_queued_work_does_not_add_up_errors() -> None:
    clock = FakeClock(lag_s=0.003)
    device = EmulatedDevice(clock=clock)
    for _ in range(20):
        device.run(clock.work(0.001), 0.01)
        clock.work(0.0005)()
    # Twenty late wake-ups and twenty gaps, and only the last of each is seen.
    assert clock.time_s == pytest.approx(100.2 + 0.003 + 0.0005)
    assert device.last_s == pytest.approx(0.013)


def test_an_idle_device_starts_at_the_present() -> None:
    clock = FakeClock(lag_s=0.003)
    device = EmulatedDevice(clock=clock)
    device.run(clock.work(0.0), 0.01)
    clock.work(0.005)()
    start_s = clock.time_s
    device.run(clock.work(0.0), 0.01)
    assert clock.time_s == pytest.approx(start_s + 0.01 + 0.003)


def test_what_is_caught_up_is_limited() -> None:
    clock = FakeClock()
    device = EmulatedDevice(clock=clock)
    device.run(clock.work(0.5), 0.01)
    assert device.overruns == 1
    device.run(clock.work(0.0), 0.05)
    assert clock.time_s == pytest.approx(100.5 + 0.05 - 0.02)


def test_real_share_and_overruns_are_counted() -> None:
    clock = FakeClock()
    device = EmulatedDevice(clock=clock)
    assert device.real_compute_ratio == 0.0
    device.run(clock.work(0.002), 0.02)
    assert device.real_compute_ratio == pytest.approx(0.1)
    assert device.overruns == 0
    device.run(clock.work(0.03), 0.02)
    assert device.real_compute_ratio == pytest.approx(0.8)
    assert device.overruns == 1


def test_work_without_a_time_is_neither_held_up_nor_counted() -> None:
    clock = FakeClock()
    device = EmulatedDevice(clock=clock)
    device.run(clock.work(0.5), None)
    assert clock.time_s == pytest.approx(100.5)
    assert device.emulated_s == device.real_s == device.overruns == 0
    device.run(clock.work(0.0), 0.01)
    assert clock.time_s == pytest.approx(100.51)


def test_a_long_wait_ends_where_nobody_waits_for_the_work_any_more() -> None:
    class NotWanted(Exception):
        pass

    def look() -> None:
        if clock.time_s > 101.0:
            raise NotWanted

    clock = FakeClock()
    device = EmulatedDevice(clock=clock)
    device.check_abort = look
    with pytest.raises(NotWanted):
        device.run(clock.work(0.1), 60.0)
    assert clock.time_s < 101.2


def test_the_precise_clock_is_never_early() -> None:
    """How little late it is is for benchmarks/testbed_accuracy.py to show."""
    clock = PreciseClock()
    for _ in range(20):
        deadline_s = clock.now_s() + 0.002
        clock.wait_until(deadline_s)
        assert clock.now_s() >= deadline_s
    clock.wait_until(0.0)


def test_backends_by_name() -> None:
    assert isinstance(open_device("emulated"), EmulatedDevice)
    assert isinstance(open_device("cpu"), CpuDevice)
    for name in ("tpu", "cpu:1", "cuda:x", "cuda:-1"):
        with pytest.raises(ConfigError, match="no such thing"):
            open_device(name)
    for name in ("cuda:9999", "xpu:9999"):
        with pytest.raises(ConfigError, match=f"{name}: this machine has"):
            open_device(name)


class Streams:
    """What torch has for a kind of accelerator, by the processor: streams that do at once what they are given."""

    def __init__(self) -> None:
        self.synchronized = 0

    def device_count(self) -> int:
        return 1

    def init(self) -> None:
        pass

    def set_device(self, device: torch.device) -> None:
        pass

    def device(self, device: torch.device):
        return nullcontext()

    def stream(self, stream: object):
        return nullcontext()

    def current_stream(self, device: torch.device) -> MagicMock:
        return MagicMock()

    def Stream(self, device: torch.device) -> MagicMock:
        return MagicMock()

    def Event(self, *, enable_timing: bool) -> "Moment":
        assert enable_timing
        return Moment()

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1


class Moment:
    at_s = 0.0

    def record(self) -> None:
        self.at_s = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Moment") -> float:
        return (other.at_s - self.at_s) * 1e3


class OtherDevice(StreamedDevice):
    kind = "cpu"


def test_any_kind_of_accelerator_with_streams_does_its_work_in_order(monkeypatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: streams)
    monkeypatch.setattr(accelerators, "_on_host", lambda tensor: tensor.clone())
    with pytest.raises(ConfigError, match="cpu:1: this machine has 1 CPU devices"):
        OtherDevice(1)
    device = OtherDevice()
    begun_s = time.monotonic()
    first = device.submit(lambda: torch.ones(3), None)
    second = device.submit(lambda: first.result + 1, None)
    second.wait()
    assert first.is_over
    assert begun_s <= first.started_s <= first.ended_s <= second.started_s <= second.ended_s <= time.monotonic() + 1e-3
    assert device.run(lambda: "done", None) == "done"
    (read,) = device.fetch(lambda: (second.result * 2,), device.torch_device)
    assert read.tolist() == [4.0, 4.0, 4.0]
    assert device.bring((read,), torch.device("cpu")) == (read,)
    with device.beside(device.torch_device, device.mark(device.torch_device)):
        pass
    device.settle(device.torch_device)
    assert streams.synchronized == 1


on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_marks(marks: list[pytest.MarkDecorator]):
    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


@with_marks(on_cuda)
def test_cuda_work_is_over_in_order_and_read_past_what_is_queued() -> None:
    device = CudaDevice(0)
    matrix = torch.randn(4096, 4096, device=device.torch_device)
    device.run(lambda: matrix @ matrix, None)
    # CUDA waits for all work where it locks new pages, and where it loads a kernel.
    CudaDevice.fetch(lambda: (matrix + 1,), device.torch_device)

    def long() -> torch.Tensor:
        found = matrix
        for _ in range(500):
            found = found @ matrix
        return found

    first = device.submit(lambda: matrix * 2, None)
    second = device.submit(long, None)
    first.wait()
    (fetched,) = CudaDevice.fetch(lambda: (first.result + 1,), device.torch_device)
    assert not second.is_over
    assert torch.equal(fetched, (matrix * 2 + 1).cpu())
    assert fetched.is_pinned()
    second.wait()
    assert first.started_s <= first.ended_s <= second.started_s < second.ended_s <= time.monotonic() + 1e-3


@with_marks(on_cuda)
def test_what_is_brought_to_cuda_is_there_for_what_is_queued_next() -> None:
    device = CudaDevice(0)
    values = [torch.randn(1000, 1000) for _ in range(20)]
    brought = [CudaDevice.bring((value,), device.torch_device)[0] * 2 for value in values]
    assert all(torch.equal(one.cpu(), 2 * value) for one, value in zip(brought, values, strict=True))


@with_marks(on_cuda)
def test_what_is_brought_to_cuda_may_have_one_place_for_many_numbers() -> None:
    device = CudaDevice(0)
    row = torch.randn(1, 5)
    (brought,) = CudaDevice.bring((row.expand(4, 5),), device.torch_device)
    assert torch.equal(brought.cpu(), row.repeat(4, 1))


@with_marks(on_cuda)
def test_a_cuda_device_counts_from_when_it_is_opened() -> None:
    device = CudaDevice(0)
    device.forget_peak()
    assert device.peak_bytes() is not None


@with_marks(on_cuda)
def test_cuda_times_the_work_on_the_device() -> None:
    device = CudaDevice(0)
    matrix = torch.randn(2048, 2048, device=device.torch_device)
    product = device.run(lambda: matrix @ matrix, None)
    assert product.device == device.torch_device
    assert device.last_s > 0
