"""Accelerators: work is queued on streams; its time is what passes between two events on one.

Torch has the same names for all of them (`torch.cuda`, which is ROCm's, too, and `torch.xpu`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from spantrain.devices.base import NOTHING_MORE, ComputeDevice, EmulatedTime, Submitted, T, Tensors
from spantrain.devices.meters import ReadMeters, nvml_meters
from spantrain.errors import ConfigError


@dataclass(kw_only=True)
class _Queued(Submitted[T]):
    """Work between two events on the device's stream."""

    start: Any
    end: Any
    origin: tuple[Any, float]
    """An event before, and when it was, on this machine's monotonic clock."""

    @property
    def is_over(self) -> bool:
        """Whether the device has done it."""
        if not self.end.query():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Return when it is over."""
        self.end.synchronize()
        event, at_s = self.origin
        self.started_s = at_s + event.elapsed_time(self.start) / 1e3
        self.ended_s = at_s + event.elapsed_time(self.end) / 1e3


class StreamedDevice(ComputeDevice):
    """One device of a kind with streams."""

    kind: ClassVar[str]
    """What torch calls such devices."""
    fuses_optimizer = True
    ahead = 2

    def __init__(self, index: int = 0) -> None:
        """Take device `index`.

        Raises:
            ConfigError: there is no such device.
        """
        self._torch: Any = torch.get_device_module(self.kind)
        count = self._torch.device_count()
        if not 0 <= index < count:
            what = f"this machine has {count} {self.kind.upper()} devices"
            raise ConfigError(f"backend {self.kind}:{index}: {what}; choose another, or `cpu`")
        super().__init__(torch.device(self.kind, index))
        # Before, torch does not count what is allocated there; and what names no device goes there, too.
        self._torch.init()
        self._torch.set_device(self.torch_device)
        # The thread that goes back has a context, too, before its first product asks for one and warns.
        torch.zeros(1, device=self.torch_device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        self._last: _Queued[object] | None = None

    def submit(
        self,
        work: Callable[[], T],
        seconds: float | None,  # noqa: ARG002
        besides: EmulatedTime = NOTHING_MORE,  # noqa: ARG002
    ) -> Submitted[T]:
        """Queue the work."""
        with self._torch.device(self.torch_device):
            start, end = (self._torch.Event(enable_timing=True) for _ in range(2))
            idle = self._last is None or self._last.is_over
            start.record()
            # What an idle device is given it begins at once.
            origin = (start, time.monotonic()) if self._last is None or idle else self._last.origin
            result = work()
            end.record()
        queued = _Queued(result=result, started_s=0.0, ended_s=0.0, start=start, end=end, origin=origin)
        self._last = _Queued(result=None, started_s=0.0, ended_s=0.0, start=start, end=end, origin=origin)
        return queued

    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:
        """Queue the work, wait until the device has done it, and return its result."""
        queued = self.submit(work, seconds, besides)
        queued.wait()
        self.last_s = queued.ended_s - queued.started_s
        return queued.result

    def forget_peak(self) -> None:
        """Begin to look for the most memory anew."""
        self._torch.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were allocated since then."""
        peak: int = self._torch.max_memory_allocated(self.torch_device)
        return peak

    @classmethod
    def is_available(cls) -> bool:
        """Return whether this machine has one."""
        there: bool = torch.get_device_module(cls.kind).is_available()
        return there

    @staticmethod
    def fetch(made: Callable[[], Tensors], torch_device: torch.device) -> Tensors:
        """Make it on a stream of its own, copy it to page-locked memory, and wait for that alone."""
        stream = _stream(torch_device, "out")
        with torch.get_device_module(torch_device).stream(stream):
            found = tuple(_on_host(tensor) for tensor in made())
        stream.synchronize()
        return found

    @staticmethod
    def bring(tensors: Tensors, torch_device: torch.device) -> Tensors:
        """Copy from page-locked memory, on a stream of its own; work that is queued from now on waits for it."""
        if all(tensor.device == torch_device for tensor in tensors):
            return tensors
        at: Any = torch.get_device_module(torch_device)
        with at.device(torch_device):
            beside, now = _stream(torch_device, "in"), at.current_stream(torch_device)
            with at.stream(beside):
                pinned = (one if one.device.type != "cpu" or one.is_pinned() else _pinned(one) for one in tensors)
                found = tuple(one.to(torch_device, non_blocking=True) for one in pinned)
            now.wait_stream(beside)
            for tensor in found:
                tensor.record_stream(now)
        return found

    @staticmethod
    def settle(torch_device: torch.device) -> None:
        """Return when all that was queued is done."""
        torch.get_device_module(torch_device).synchronize(torch_device)

    @staticmethod
    def mark(torch_device: torch.device) -> Any:
        """Return what stands for the end of all that was queued so far."""
        return torch.get_device_module(torch_device).current_stream(torch_device).record_event()

    @staticmethod
    @contextmanager
    def beside(torch_device: torch.device, mark: Any) -> Iterator[None]:
        """Queue what is done inside on a stream of its own, behind a mark, and wait for its end."""
        at, stream = torch.get_device_module(torch_device), _stream(torch_device, "sums")
        with at.device(torch_device), at.stream(stream):
            stream.wait_event(mark)
            yield
            stream.synchronize()


class CudaDevice(StreamedDevice):
    """One device of NVIDIA, or of AMD: torch for ROCm calls them so, too."""

    kind = "cuda"

    def meters(self) -> ReadMeters | None:
        """Return what reads its meters, by NVIDIA's library; None: there is none for it."""
        uuid = getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", None)
        return nvml_meters(f"GPU-{uuid}") if uuid is not None else None


class XpuDevice(StreamedDevice):
    """One device of Intel."""

    kind = "xpu"


@cache
def _stream(device: torch.device, use: str) -> Any:
    """Return the stream of a device for some use: each has memory of its own, which torch keeps for it."""
    assert use
    return torch.get_device_module(device).Stream(device)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return it in page-locked memory, which has a place of its own for each number of one that repeats its rows."""
    return (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return landing.copy_(tensor.detach(), non_blocking=True)
