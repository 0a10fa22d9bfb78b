"""CUDA devices: work is queued on streams; its time is what passes between two events on one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from spantrain.devices.base import NOTHING_MORE, ComputeDevice, EmulatedTime, Submitted, T, Tensors
from spantrain.devices.meters import ReadMeters, nvml_meters
from spantrain.errors import ConfigError


@dataclass(kw_only=True)
class _Queued(Submitted[T]):
    """Work between two events on the device's stream."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    origin: tuple[torch.cuda.Event, float]
    """An event before, and when it was, on this machine's monotonic clock."""

    @property
    def is_over(self) -> bool:
        """Whether the device has done it."""
        if not self.end.query():  # type: ignore[no-untyped-call]
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Return when it is over."""
        self.end.synchronize()
        event, at_s = self.origin
        self.started_s = at_s + event.elapsed_time(self.start) / 1e3
        self.ended_s = at_s + event.elapsed_time(self.end) / 1e3


class CudaDevice(ComputeDevice):
    """One CUDA device."""

    fuses_optimizer = True
    ahead = 2

    def __init__(self, index: int = 0) -> None:
        """Take device `index`.

        Raises:
            ConfigError: there is no such device.
        """
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise ConfigError(f"backend cuda:{index}: this machine has {count} CUDA devices; choose another, or `cpu`")
        super().__init__(torch.device("cuda", index))
        # Before, torch does not count what is allocated there; and what names no device goes there, too.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.torch_device)
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
        with torch.cuda.device(self.torch_device):
            start, end = _event(), _event()
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
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were allocated since then."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def meters(self) -> ReadMeters | None:
        """Return what reads its meters, by NVIDIA's library; None: there is none for it."""
        uuid = getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", None)
        return nvml_meters(f"GPU-{uuid}") if uuid is not None else None

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has one."""
        return torch.cuda.is_available()

    @staticmethod
    def fetch(made: Callable[[], Tensors], torch_device: torch.device) -> Tensors:
        """Make it on a stream of its own, copy it to page-locked memory, and wait for that alone."""
        stream = _stream(torch_device, "out")
        with torch.cuda.stream(stream):
            found = tuple(_on_host(tensor) for tensor in made())
        stream.synchronize()
        return found

    @staticmethod
    def bring(tensors: Tensors, torch_device: torch.device) -> Tensors:
        """Copy from page-locked memory, on a stream of its own; work that is queued from now on waits for it."""
        if all(tensor.device == torch_device for tensor in tensors):
            return tensors
        with torch.cuda.device(torch_device):
            beside, now = _stream(torch_device, "in"), torch.cuda.current_stream(torch_device)
            with torch.cuda.stream(beside):
                pinned = (one if one.is_cuda or one.is_pinned() else _pinned(one) for one in tensors)
                found = tuple(one.to(torch_device, non_blocking=True) for one in pinned)
            now.wait_stream(beside)
            for tensor in found:
                tensor.record_stream(now)
        return found

    @staticmethod
    def settle(torch_device: torch.device) -> None:
        """Return when all that was queued is done."""
        torch.cuda.synchronize(torch_device)

    @staticmethod
    def mark(torch_device: torch.device) -> torch.cuda.Event:
        """Return what stands for the end of all that was queued so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(torch_device).record_event()
        return event

    @staticmethod
    @contextmanager
    def beside(torch_device: torch.device, mark: torch.cuda.Event) -> Iterator[None]:
        """Queue what is done inside on a stream of its own, behind a mark, and wait for its end."""
        stream = _stream(torch_device, "sums")
        with torch.cuda.device(torch_device), torch.cuda.stream(stream):
            stream.wait_event(mark)
            yield
            stream.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """Return the stream of a device for some use: each has memory of its own, which torch keeps for it."""
    assert use
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return it in page-locked memory, which has a place of its own for each number of one that repeats its rows."""
    return (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return landing.copy_(tensor.detach(), non_blocking=True)
