"""What every member of a replica does for an action, and for how long."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from spantrain.core.action import Direction, Op
from spantrain.core.spans import Span
from spantrain.models.device import Device
from spantrain.models.stage import StageExecutor
from spantrain.runtime.groups import MemberGroup

__all__ = ["DeviceClock", "Feed", "ReplicaWork"]

Tensors = tuple[torch.Tensor, ...]


class Feed(Protocol):
    """Reads the samples of a step where they are needed."""

    def inputs(self, step: int, span: Span) -> Tensors:
        """Return what the first stage takes."""

    def labels(self, step: int, span: Span) -> torch.Tensor:
        """Return what the last stage compares with."""


@dataclass(frozen=True, kw_only=True)
class DeviceClock:
    """The device that computes, and how long an action should take on it (None: as long as it takes).

    In a tensor-parallel group with emulated devices, what the members exchange is real and takes its time on top: that
    of the network, not what a member waits for the real computation of another, which stands for nothing
    (`MemberGroup.exchanged_s`). All members tell each other, and take the same time.
    """

    device: Device
    seconds: Callable[[Op, int], float | None]
    group: MemberGroup | None = None
    """The tensor-parallel group, where any of its devices is emulated: then all of them tell each other their times."""

    def run(self, op: Op, samples: int, work: Callable[[], Tensors]) -> Tensors:
        """Do the work of an action; return its result when its time has passed."""
        seconds = self.seconds(op, samples)
        if self.group is None:
            return self.device.run(work, seconds)
        group = self.group
        exchanged_s = waited_s = 0.0

        def timed() -> Tensors:
            nonlocal exchanged_s, waited_s
            group.forget_exchanges()
            result = work()
            waited_s, asked_s = group.exchanging_s, time.perf_counter()
            exchanged_s = group.exchanged_s()
            waited_s += time.perf_counter() - asked_s
            return result

        return self.device.run(timed, seconds, more_s=lambda: exchanged_s, waited_s=lambda: waited_s)


@dataclass(frozen=True, kw_only=True)
class ReplicaWork:
    """The computation of a stage on what came from other stages; samples and labels are read here."""

    executor: StageExecutor
    feed: Feed
    is_first: bool
    is_last: bool

    def awaits(self, op: Op) -> Direction | None:
        """Return what an action takes from another stage, if anything."""
        match op:
            case Op.FORWARD:
                return None if self.is_first else Direction.FORWARD
            case Op.BACKWARD_WEIGHT:
                return None
            case _:
                return None if self.is_last else Direction.BACKWARD

    def bind(self, op: Op, step: int, span: Span, received: Tensors) -> Callable[[], Tensors]:
        """Return the computation of an action, with what it needs; samples and labels are read at once."""
        executor = self.executor
        match op:
            case Op.FORWARD:
                inputs = self.feed.inputs(step, span) if self.is_first else received
                labels = self.feed.labels(step, span) if self.is_last else None
                return partial(executor.forward, span, inputs, labels)
            case Op.BACKWARD_WEIGHT:
                return partial(_without_result, executor.backward_weight, span)
            case Op.BACKWARD:
                return partial(executor.backward, span, received)
            case Op.BACKWARD_INPUT:
                return partial(executor.backward_input, span, received)

    def bind_evaluation(self, step: int, span: Span, received: Tensors, feed: Feed) -> Callable[[], Tensors]:
        """Return the forward pass of held-out samples."""
        inputs = feed.inputs(step, span) if self.is_first else received
        labels = feed.labels(step, span) if self.is_last else None
        return partial(self.executor.evaluate, inputs, labels)


def _without_result(work: Callable[[Span], None], span: Span) -> Tensors:
    work(span)
    return ()
