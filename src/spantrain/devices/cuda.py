"""CUDA devices: work is queued on streams; its time is what passes between two events on one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spantrain.devices.base import RealDevice, T
from spantrain.errors import ConfigError


class CudaDevice(RealDevice):
    """One CUDA device."""

    fuses_optimizer = True

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

    def timed(self, work: Callable[[], T]) -> T:
        """Queue the work, wait until the device has done it, and return its result."""
        with torch.cuda.device(self.torch_device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            result = work()
            end.record()
            end.synchronize()
        self.last_s = start.elapsed_time(end) / 1e3
        return result

    def forget_peak(self) -> None:
        """Begin to look for the most memory anew."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were allocated since then."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has one."""
        return torch.cuda.is_available()

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
        stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(torch_device), torch.cuda.stream(stream):
            stream.wait_event(mark)
            yield
            stream.synchronize()
