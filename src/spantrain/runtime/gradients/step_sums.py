"""The sums of one step's gradients, begun bucket by bucket while the last backward pass of the step still runs.

A backward pass goes through the units from the last to the first, so gradients become final in that order, and buckets
are filled in it: which gradients share a bucket, and which bucket is summed first, depends on the stage alone and is
the same on all devices of a ring, whenever each of them gets that far. (Li et al., "PyTorch Distributed", VLDB 2020,
section 3.2.3 has buckets in reverse order, summed beside the backward pass. Kept: that. Not kept: hooks in the model's
forward pass, and buckets that are rebuilt by the order in which gradients came.) How large buckets are, and how many
are under way at once, is the plan's (`core.plan`).

A thread that does pieces of work beside the main one, in the order in which they are begun.

Collectives need one order, and the main thread computes on meanwhile. A failure ends it: later pieces would meet others
of their peers', so none of them runs, and who waits for any piece gets the failure.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from spantrain.core.plan import OWN_SUMS, GradientSums
from spantrain.devices.registry import class_of
from spantrain.errors import SpanTrainError, WorkerError

_POLL_S = 0.25
"""How often one who waits looks whether the run was aborted."""
_END_S = 0.5
"""How long the end waits for a piece under way; a collective whose peers are gone ends by itself, later."""


class Background:
    """One thread, which starts with the first piece; a process that ends does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: SpanTrainError | RuntimeError | None = None
        self._closed = False

    def begin(self, work: Callable[[], None]) -> threading.Event:
        """Have work done when all that was begun before is; return at once what is set when it is over."""
        assert not self._closed, f"{self._name}: this thread has ended"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        over = threading.Event()
        self._pieces.put((work, over))
        return over

    @property
    def has_more(self) -> bool:
        """Whether work waits behind that which is done now."""
        return not self._pieces.empty()

    def wait(self, over: threading.Event, check_abort: Callable[[], None]) -> None:
        """Wait until a piece is over.

        Raises:
            SpanTrainError: it failed, or one before it did; or `check_abort` has news.
            RuntimeError: the same, of torch.
        """
        while not over.wait(_POLL_S):
            check_abort()
            if self._thread is not None and not self._thread.is_alive():
                break
        if self._failure is not None:
            raise self._failure
        if not over.is_set():
            raise WorkerError(f"{self._name}: the thread ended before its work; its own log says why")

    def close(self) -> None:
        """End the thread; what has not begun is dropped."""
        self._closed = True
        self._pieces.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            work, over = piece
            if self._failure is None and not self._closed:
                try:
                    work()
                except (SpanTrainError, RuntimeError) as error:
                    self._failure = error
            over.set()


Parameters = Mapping[str, nn.Parameter]
BeginSum = Callable[[Sequence[Tensor]], Callable[[], None]]
"""Begins to sum a bucket, in place, and returns what waits until that is done."""


@dataclass(eq=False)
class StepSums:
    """The sums of one step on one device; `StageSum.begin` makes it, with nothing final.

    A gradient is taken (`.grad`) when its bucket leaves, and summed in place: after that, `.grad` may be anything.
    """

    parameters: Parameters
    """Of the stage, by name."""
    _: KW_ONLY
    beside: Sequence[Sequence[str]]
    """Names of the gradients of each bucket that is summed in the background, in the order of the sums."""
    begin_sum: BeginSum
    background: Background
    """Begins to sum buckets."""
    behind: Callable[[Mapping[str, Tensor]], None] | None
    """Takes all gradients and does what must wait for the end of the pass, in the calling thread."""
    sums: GradientSums = OWN_SUMS
    """Whether buckets leave beside the pass, and how many are under way at once."""

    def __post_init__(self) -> None:
        self._missing = [set(names) for names in self.beside]
        self._bucket_of = {name: number for number, names in enumerate(self.beside) for name in names}
        self._left = 0
        """How many buckets have left."""
        self._last: threading.Event | None = None
        self._under_way: deque[tuple[float, Callable[[], None]]] = deque()
        """When each sum began that is not known to have ended, and what waits for it; the background's own."""
        self._gradients: dict[str, Tensor] = {}
        self.intervals: list[tuple[float, float]] = []
        """When each sum began and ended, by this machine's monotonic clock; to be read when all is done."""

    def final(self, names: Iterable[str]) -> None:
        """Take in that nothing more is added to these gradients; whole buckets leave, in their order."""
        if self.sums.beside_backward:
            self._leave_whole(names)

    def _leave_whole(self, names: Iterable[str]) -> None:
        for name in names:
            number = self._bucket_of.get(name)
            if number is not None:
                self._missing[number].discard(name)
        while self._left < len(self.beside) and not self._missing[self._left]:
            self._left += 1
            self._leave(self.beside[self._left - 1])

    def all_final(self) -> None:
        """Take in that nothing more is added to any gradient: all that goes into the background leaves."""
        self._leave_whole(self.parameters)
        for name, parameter in self.parameters.items():
            if name not in self._gradients:
                self._gradients[name] = gradient_of(parameter)

    def finish(self, check_abort: Callable[[], None]) -> None:
        """Return when all gradients are summed.

        Raises:
            PeerLostError: another device went away in a sum.
        """
        self.all_final()
        if self._last is not None:
            self.background.wait(self._last, check_abort)
        if self.behind is not None:
            start_s = time.monotonic()
            self.behind(self._gradients)
            self.intervals.append((start_s, time.monotonic()))

    def _leave(self, names: Collection[str]) -> None:
        gradients = [gradient_of(self.parameters[name]) for name in names]
        self._gradients |= dict(zip(names, gradients, strict=True))
        device, is_last = gradients[0].device, self._left == len(self.beside)
        ready = class_of(device).mark(device)
        at_once = self.sums.at_once if ready is None else 1

        def work() -> None:
            with class_of(device).beside(device, ready):
                self._under_way.append((time.monotonic(), self.begin_sum(gradients)))
                while self._under_way and (is_last or len(self._under_way) >= at_once or not self.background.has_more):
                    start_s, wait = self._under_way.popleft()
                    wait()
                    self.intervals.append((start_s, time.monotonic()))

        self._last = self.background.begin(work)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; one that is missing counts as zero."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def buckets_of(
    gradients: Iterable[tuple[str, Tensor]], elements: Mapping[str, int], sums: GradientSums
) -> list[list[str]]:
    """Group gradients, of so many elements each, in buckets of one dtype; each is in exactly one.

    A gradient belongs to the bucket that it begins in, so that a bucket is whole with the unit that fills it
    (`cost.sums.fill_buckets`); a large one takes up the buckets that it reaches into.
    """
    buckets: dict[tuple[int, torch.dtype], list[str]] = {}
    begin = 0
    for name, tensor in gradients:
        buckets.setdefault((sums.bucket_of(begin), tensor.dtype), []).append(name)
        begin += elements[name] * tensor.element_size()
    return list(buckets.values())
