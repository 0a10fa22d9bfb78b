"""What every member of a replica does for an action and for how long, with samples that it reads or was sent."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch

from spantrain.core.action import Direction, Op
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.devices.base import ComputeDevice, EmulatedTime, Milestone, Submitted, Tensors
from spantrain.models.data.dataset import Dataset
from spantrain.models.execution.stage import NamesFinal, StageExecutor
from spantrain.models.sampler import Sampler
from spantrain.models.units import Rows, chosen_rows, counted_labels, for_samples
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.unit_shards import UnitShards


class Feed(Protocol):
    """Reads the samples of a step where they are needed."""

    def rows(self, step: int, span: Span, numbers: Sequence[int]) -> Rows:
        """Return these of the inputs and labels."""


class UnitTimes(Record):
    """When an emulated device is through each unit of its stage."""

    seconds: Callable[[Op, int], Sequence[float]]
    """By operation and samples, of each unit."""
    names: Sequence[Sequence[str]]
    """By unit: parameters whose gradients are whole when a backward pass is through it."""

    def milestones(self, op: Op, samples: int, final: NamesFinal) -> list[Milestone]:
        """Return when gradients are whole in a backward action, which goes from the last unit to the first."""
        found: list[Milestone] = []
        after_s = 0.0
        for seconds, names in zip(reversed(self.seconds(op, samples)), reversed(self.names), strict=True):
            after_s += seconds
            found.append((after_s, partial(final, names)))
        return found


class DeviceClock(Record):
    """The device that computes, and how long an action should take on it (None: as long as it takes).

    In a tensor-parallel group with emulated devices, what the members exchange is real and takes its time on top: that
    of the network, not what a member waits for the real computation of another, which stands for nothing
    (`MemberGroup.exchanged_s`). All members tell each other, and take the same time.
    """

    device: ComputeDevice
    seconds: Callable[[Op, int], float | None]
    group: MemberGroup | None = None
    """The tensor-parallel group, where any of its devices is emulated: then all of them tell each other their times."""
    joined: tuple[MemberGroup | UnitShards, ...] = ()
    """What the stage's replicas exchange inside of actions, statistics of batches or parts of state: waiting for others
    is no work."""
    unit_times: UnitTimes | None = None
    """Of an emulated device: when the work tells is when the machine below gets there, not the device."""

    @property
    def ahead(self) -> int:
        """How many actions may be with the device at once."""
        # One that waits for others while it is launched must have sent what those others wait for.
        return 1 if self.joined else self.device.ahead

    def told_by_work(self, final: NamesFinal | None) -> NamesFinal | None:
        """Return whom the work itself shall tell which gradients are done."""
        return final if self.unit_times is None else None

    def run(self, op: Op, samples: int, work: Callable[[], Tensors], final: NamesFinal | None = None) -> Tensors:
        """Do the work of an action; return its result when its time has passed; `final` as of `submit`."""
        submitted = self.submit(op, samples, work, final)
        submitted.wait()
        return submitted.result

    def submit(
        self, op: Op, samples: int, work: Callable[[], Tensors], final: NamesFinal | None = None
    ) -> Submitted[Tensors]:
        """Hand the work of an action to the device.

        `final` is told which gradients are done, unit by unit, in an emulated device's time.
        """
        seconds = self.seconds(op, samples)
        times = self.unit_times
        milestones = () if times is None or final is None else times.milestones(op, samples, final)
        group, exchanging = self.group, (*self.joined, *((self.group,) if self.group is not None else ()))
        exchanged_s = waited_s = 0.0

        def timed() -> Tensors:
            nonlocal exchanged_s, waited_s
            for one in exchanging:
                one.forget_exchanges()
            result = work()
            waited_s, asked_s = sum(one.exchanging_s for one in exchanging), time.perf_counter()
            if group is not None:
                exchanged_s = group.exchanged_s()
                waited_s += time.perf_counter() - asked_s
            return result

        besides = EmulatedTime(more_s=lambda: exchanged_s, waited_s=lambda: waited_s, milestones=milestones)
        return self.device.submit(timed, seconds, besides)


class ReplicaWork(Record):
    """The computation of a stage on what came from other stages; samples and labels are read here."""

    executors: tuple[StageExecutor, ...]
    """One that runs all steps; or two, each with weights of its own, for even and for odd ones."""
    feed: Feed
    is_first: bool
    is_last: bool

    @property
    def executor(self) -> StageExecutor:
        """The first, which runs held-out samples, too."""
        return self.executors[0]

    @property
    def held_samples(self) -> int:
        """Samples in flight, of all steps."""
        return sum(one.held_samples for one in self.executors)

    def awaits(self, op: Op) -> Direction | None:
        """Return what an action takes from another stage, if anything."""
        match op:
            case Op.FORWARD:
                return None if self.is_first else Direction.FORWARD
            case Op.BACKWARD_WEIGHT:
                return None
            case _:
                return None if self.is_last else Direction.BACKWARD

    def bind(
        self, op: Op, step: int, span: Span, received: Tensors, final: NamesFinal | None = None
    ) -> Callable[[], Tensors]:
        """Return the computation of an action, with what it needs; samples and labels are read at once.

        A backward tells `final` which gradients are done, while it runs.
        """
        executor = self.executors[step % len(self.executors)]
        match op:
            case Op.FORWARD:
                return partial(executor.forward, span, received, self.feed.rows(step, span, executor.reads), step=step)
            case Op.BACKWARD_WEIGHT:
                return partial(executor.backward_weight, span, final)
            case Op.BACKWARD:
                return partial(executor.backward, span, received, final)
            case Op.BACKWARD_INPUT:
                return partial(executor.backward_input, span, received)

    def bind_evaluation(self, step: int, span: Span, received: Tensors, feed: Feed) -> Callable[[], Tensors]:
        """Return the forward pass of held-out samples."""
        return partial(self.executor.evaluate, span, received, feed.rows(step, span, self.executor.reads), step=step)


class SampledFeed:
    """The samples that a deterministic sampler chooses for each step."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        seed: int,
        same_every_step: bool = False,
        first_step: int = 0,
        samples_before: int | None = None,
    ) -> None:
        """Read a data set as a sampler deals it; the last two arguments are the sampler's.

        Args:
            dataset: what is read.
            global_batch: samples of a step.
            seed: of the sampler.
            same_every_step: deal the first step's samples in every step.
            first_step: from which step on steps have this size.
            samples_before: samples dealt before that step.
        """
        self._dataset = dataset
        self._sampler = Sampler(
            dataset_size=len(dataset),
            global_batch=global_batch,
            seed=seed,
            first_step=0 if same_every_step else first_step,
            samples_before=0 if same_every_step else samples_before,
        )
        self.dataset_size = len(dataset)
        """Samples of the data set."""
        self._same_every_step = same_every_step
        self._step_span = Span(0, global_batch)
        self._counted = lru_cache(2)(self._counted_in)

    @property
    def digest(self) -> str:
        """SHA-256 of the whole data set, the same wherever the same data is read."""
        return self._dataset.digest

    def rows(self, step: int, span: Span, numbers: Sequence[int]) -> Rows:
        """Return these of the inputs and labels; first dimension: the span's samples."""
        indices = self._sampler.indices(0 if self._same_every_step else step, span) if numbers else ()
        return chosen_rows(
            numbers,
            lambda: self._dataset.inputs(indices),
            lambda: self._dataset.labels(indices),
            lambda number: for_samples(self._counted(step, number), span.size),
        )

    def _counted_in(self, step: int, number: int) -> torch.Tensor:
        """Return `counted_labels` of a whole step, for one sample."""
        indices = self._sampler.indices(0 if self._same_every_step else step, self._step_span)
        return counted_labels(self._dataset.labels(indices), 1, number)


Lane = tuple[str, int]
"""The lane of a message, and the cut that it crosses (`core.messages.MessageKey`)."""


class SampleInbox:
    """Pieces by (step, lane); handed out as whole spans, however they were cut on the way."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, Lane], list[tuple[Span, Tensors]]] = {}

    def add(self, step: int, lane: Lane, span: Span, tensors: Tensors) -> None:
        """Keep one piece; every tensor's first dimension is the span's samples."""
        self._pieces.setdefault((step, lane), []).append((span, tensors))

    def spans(self, step: int, lane: Lane) -> tuple[Span, ...]:
        """Return what lies here, in order of arrival."""
        return tuple(span for span, _ in self._pieces.get((step, lane), ()))

    def take(self, step: int, lane: Lane, span: Span) -> Tensors:
        """Hand out the samples of a span and forget them; all of them must be here."""
        kept: list[tuple[Span, Tensors]] = []
        found: list[tuple[Span, Tensors]] = []
        for piece, tensors in self._pieces.get((step, lane), ()):
            part = piece.intersect(span)
            if part is None:
                kept.append((piece, tensors))
                continue
            found.append((part, _slice(tensors, piece, part)))
            rests = [Span(lo, hi) for lo, hi in ((piece.lo, part.lo), (part.hi, piece.hi)) if lo < hi]
            kept.extend((rest, _slice(tensors, piece, rest)) for rest in rests)
        found.sort(key=lambda entry: entry[0])
        assert sum(part.size for part, _ in found) == span.size, f"samples of {span} are missing"
        self._pieces[step, lane] = kept
        if len(found) == 1:
            return found[0][1]
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in found), strict=True))

    def held_bytes(self) -> int:
        """Return the bytes of all that lies here."""
        return sum(tensor.nbytes for pieces in self._pieces.values() for _, tensors in pieces for tensor in tensors)

    def forget_before(self, step: int) -> int:
        """Drop what belongs to earlier steps; return how many pieces that was."""
        old = [key for key in self._pieces if key[0] < step]
        return sum(len(self._pieces.pop(key)) for key in old)


def _slice(tensors: Tensors, piece: Span, part: Span) -> Tensors:
    if part == piece:
        return tensors
    return tuple(tensor[part.lo - piece.lo : part.hi - piece.lo] for tensor in tensors)
