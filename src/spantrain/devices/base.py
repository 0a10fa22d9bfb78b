"""What every device that computes can do; what only some can has its answer for the others here."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Milestone = tuple[float, Callable[[], None]]
"""Seconds from the start of a piece of work, and what to call then."""


def no_seconds() -> float:
    """Return 0."""
    return 0.0


class ComputeDevice(ABC):
    """Runs one piece of work at a time."""

    fuses_optimizer = False
    """Whether torch has one kernel for the optimizer's step over many tensors there."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        """Where tensors and parameters live."""
        self.last_s = 0.0
        """Seconds that the last piece of work took, as this device counts them."""
        self.overruns = 0
        """Pieces of work that took longer than an emulated device was to take; those of no time do not count."""

    @abstractmethod
    def run(
        self,
        work: Callable[[], T],
        seconds: float | None,
        *,
        more_s: Callable[[], float] = no_seconds,
        waited_s: Callable[[], float] = no_seconds,
        milestones: Sequence[Milestone] = (),
    ) -> T:
        """Do the work to its end and return its result.

        Args:
            work: the computation.
            seconds: what it shall take on an emulated device; real devices take the time they take.
            more_s: what an emulated device adds to that; asked for when the work is done.
            waited_s: how long of the work nothing was computed; asked for then, too.
            milestones: what an emulated device makes known before the end, in time; later by their part of `more_s`.
                On a real device the work itself knows when it gets there.
        """

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


class RealDevice(ComputeDevice):
    """A device whose work takes its own time."""

    def run(
        self,
        work: Callable[[], T],
        seconds: float | None,  # noqa: ARG002
        *,
        more_s: Callable[[], float] = no_seconds,  # noqa: ARG002
        waited_s: Callable[[], float] = no_seconds,  # noqa: ARG002
        milestones: Sequence[Milestone] = (),  # noqa: ARG002
    ) -> T:
        """Do the work to its end and return its result."""
        return self.timed(work)

    @abstractmethod
    def timed(self, work: Callable[[], T]) -> T:
        """Do the work to its end, note its seconds, and return its result."""
