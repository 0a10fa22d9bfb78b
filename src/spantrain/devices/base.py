"""What every device that computes can do; what only some can has its answer for the others here, and the processor."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from spantrain.devices.meters import ReadMeters

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Milestone = tuple[float, Callable[[], None]]
"""Seconds from the start of a piece of work, and what to call then."""


@dataclass(frozen=True, kw_only=True)
class EmulatedTime:
    """What an emulated device must know besides the seconds that a piece of work shall take; others ask for nothing."""

    more_s: Callable[[], float] = lambda: 0.0
    """What it adds to those seconds; asked for when the work is done."""
    waited_s: Callable[[], float] = lambda: 0.0
    """How long of the work nothing was computed; asked for then, too."""
    milestones: Sequence[Milestone] = ()
    """What it makes known before the end, in time; later by their part of `more_s`. On a real device the work itself
    knows when it gets there."""


NOTHING_MORE = EmulatedTime()


@dataclass(kw_only=True)
class Submitted(Generic[T]):
    """A piece of work that was handed to a device, and is over."""

    result: T
    """On the device; others may read it once the work is over."""
    started_s: float
    """On this machine's monotonic clock; known once the work is over."""
    ended_s: float

    @property
    def is_over(self) -> bool:
        """Whether the device has done it."""
        return True

    def wait(self) -> None:
        """Return when it is over."""


class ComputeDevice(ABC):
    """Does one piece of work after another, in the order in which they are handed to it."""

    ahead = 1
    """How many pieces of work may be with it at once, the one that it does included."""
    fuses_optimizer = False
    """Whether torch has one kernel for the optimizer's step over many tensors there."""

    def __init__(self, torch_device: torch.device | None = None) -> None:
        """Take what torch calls so; None: the processor."""
        self.torch_device = torch_device or torch.device("cpu")
        """Where tensors and parameters live."""
        self.last_s = 0.0
        """Seconds that the last piece of work took, as this device counts them."""
        self.overruns = 0
        """Pieces of work that took longer than an emulated device was to take; those of no time do not count."""
        self.check_abort: Callable[[], None] = lambda: None
        """Called while an emulated device waits; raises where nobody waits for the work any more."""

    @abstractmethod
    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:
        """Do the work to its end, note its seconds, and return its result.

        Args:
            work: the computation.
            seconds: what it shall take on an emulated device; real devices take the time they take.
            besides: what else an emulated device must know of it.
        """

    def submit(
        self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE
    ) -> Submitted[T]:
        """Hand the work over, arguments as of `run`; a device that does nothing beside its host does it at once."""
        started_s = time.monotonic()
        result = self.run(work, seconds, besides)
        return Submitted(result=result, started_s=started_s, ended_s=time.monotonic())

    @property
    def real_compute_ratio(self) -> float:
        """Seconds of real computation per second of device time; 1 on real devices."""
        return 1.0

    def forget_peak(self) -> None:  # noqa: B027 - where nothing is counted there is nothing to do
        """Begin to look for the most memory anew, where the device counts it."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were allocated since then; None if the device does not count them."""
        return None

    # Of all devices that torch calls alike.

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has one."""
        return True

    @staticmethod
    def fetch(made: Callable[[], Tensors], torch_device: torch.device) -> Tensors:  # noqa: ARG004
        """Return what is made of results of work that is over, for the host to read, past what the device does now."""
        return made()

    @staticmethod
    def bring(tensors: Tensors, torch_device: torch.device) -> Tensors:
        """Return tensors as the device's next work may read them; the host does not wait for the device."""
        return tuple(tensor.to(torch_device) for tensor in tensors)

    def meters(self) -> ReadMeters | None:
        """Return what reads its meters; None: it has none."""
        return None

    @staticmethod
    def settle(torch_device: torch.device) -> None:  # noqa: ARG004
        """Return when all that was queued is done; on the processor it is."""
        return

    @staticmethod
    def mark(torch_device: torch.device) -> Any:  # noqa: ARG004
        """Return what stands for the end of all that was queued so far; None if it is done."""
        return None

    @staticmethod
    def beside(torch_device: torch.device, mark: Any) -> AbstractContextManager[None]:  # noqa: ARG004
        """Queue what is done inside beside other work, behind a mark, and wait for its end."""
        return contextlib.nullcontext()


class CpuDevice(ComputeDevice):
    """The processor of the machine."""

    def run(self, work: Callable[[], T], seconds: float | None, besides: EmulatedTime = NOTHING_MORE) -> T:  # noqa: ARG002
        """Do the work and return its result."""
        start_s = time.perf_counter()
        result = work()
        self.last_s = time.perf_counter() - start_s
        return result
