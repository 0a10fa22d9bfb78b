"""The processor of the machine."""

import time
from collections.abc import Callable

import torch

from spantrain.devices.base import NOTHING_MORE, ComputeDevice, EmulatedTime, T


class CpuDevice(ComputeDevice):
    """The processor of the machine."""

    def __init__(self, *, threads: int | None = None) -> None:
        """Use as many threads as torch does, or `threads` (for the whole process: torch has one setting)."""
        if threads is not None:
            torch.set_num_threads(threads)
        super().__init__(torch.device("cpu"))

    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:  # noqa: ARG002
        """Do the work and return its result."""
        start_s = time.perf_counter()
        result = work()
        self.last_s = time.perf_counter() - start_s
        return result
