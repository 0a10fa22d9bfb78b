"""Drives two steps of one replica at once by the wall clock: the live twin of `spantrain.sim.stale`."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from spantrain.core.action import Action
from spantrain.core.messages import Arrived, Event, Finished, MessageKey, StepStarted
from spantrain.core.span import Span
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.rounding import ErrorFeedback
from spantrain.schedule.dispatch.policies import TwoSteps

_POLL_S = 0.25

Tensors = tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class _OpenStep:
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    loss_sum: float = 0.0


class StaleDriver(StepDriver):
    """Runs the actions of two steps: of the older one what is ready, else of the next.

    What is decided is not logged: a log is of one machine, and cannot be made again without the other.
    """

    def __init__(self, *, two_steps: TwoSteps, **rest: Any) -> None:
        """Take the machines of two steps, and what `StepDriver` takes."""
        super().__init__(**rest)
        self._two_steps = two_steps
        self._steps: dict[int, _OpenStep] = {}
        self._heard: list[tuple[int, Event]] = []
        self._ready_since = time.monotonic()
        self._waited_s = 0.0
        self.errands = Errands(self._mailbox.wake, self._check_abort)
        self._count_together()

    def begin_step(self, step: int) -> None:
        """Open a step; its weights are ready here."""
        self._steps[step] = _OpenStep()
        self._heard.append((step, StepStarted(step)))
        self._heard += [(step, event) for event in self._early_arrivals(step)]

    def advance(self) -> tuple[int, float | None] | None:
        """Do one action, or wait a moment for news; return a step whose actions are done here, with its loss sum.

        The loss sum is that of the last stage; None on other stages.
        """
        self._receive(0.0)
        self._note_sends()
        self.errands.serve(self)
        chosen = self._next_choice()
        if chosen is not None:
            self._do(*chosen)
        step = self._two_steps.close()
        if step is not None:
            done = self._steps.pop(step)
            return step, done.loss_sum if self._is_last else None
        if chosen is None:
            before_s = time.monotonic()
            self._receive(_POLL_S)
            self._waited_s += time.monotonic() - before_s
        return None

    def forget(self, step: int) -> None:
        """Keep nothing any more of a step, and of those before."""
        self._inbox.forget_before(step + 1)

    def try_send(self, target: str, key: MessageKey, tensors: Tensors) -> Tensors | None:
        """Send outside the pipeline's routes, if there is room; return nothing, or None if there is none."""
        return () if self._mailbox.send(target, key, tensors, timeout_s=0.0) else None

    def try_take(self, step: int, lane: str) -> Tensors | None:
        """Return a message from outside the pipeline's routes, or None if it has not come."""
        return self._take(step, lane, Span(0, 1)) if self._inbox.spans(step, lane) else None

    def _count_together(self) -> None:
        """Have each set's meter count what the other's steps hold, too, and what waits here."""
        work, inbox = self._replica_work, self._inbox
        assert work.second is not None, "two steps have two sets of weights"
        even, odd = work.executor.meter, work.second.meter
        even.waiting_bytes = lambda: inbox.held_bytes() + odd.now_bytes
        odd.waiting_bytes = lambda: inbox.held_bytes() + even.now_bytes

    def _arrived(self, step: int, event: Arrived) -> None:
        if step in self._steps:
            self._heard.append((step, event))

    def _next_choice(self) -> tuple[int, Action] | None:
        """Tell the machines what has happened since; return what they want run, and in which step."""
        heard, self._heard = self._heard, []
        found: tuple[int, Action] | None = None
        # What arrived while an action ran is told before its end, so that the next choice knows of it.
        for step, event in sorted(heard, key=lambda entry: isinstance(entry[1], Finished)):
            now_s = time.monotonic()
            self._local.heard(now_s, event)
            chosen = self._two_steps.on_event(now_s, step, event)
            if chosen is not None:
                assert found is None, f"{chosen} was commanded while {found} is to run"
                found = chosen[0], chosen[1].action
        return found

    def _do(self, step: int, action: Action) -> None:
        open_step = self._steps[step]
        self._step, self._feedback, self._loss_sum = step, open_step.feedback, open_step.loss_sum
        started_s, ended_s = self._perform(action)
        open_step.loss_sum = self._loss_sum
        self._heard += [(step, event) for event in self._events]
        self._events = []
        figures = self._recorder.figures
        figures.overhead_s.append(max(0.0, started_s - self._ready_since - self._waited_s))
        figures.waiting_s += self._waited_s
        self._ready_since, self._waited_s = ended_s, 0.0


@dataclass(kw_only=True)
class _Errand:
    attempt: Callable[[StaleDriver], Tensors | None]
    """Returns None as long as it cannot be done."""
    result: Tensors = ()
    over: threading.Event = field(default_factory=threading.Event)


class Errands:
    """Messages that the thread of a step's end sends and waits for, by the driver, whose thread has the mailbox."""

    def __init__(self, wake: Callable[[], None], check_abort: Callable[[], None]) -> None:
        """`wake` makes an idle driver look here."""
        self._wake = wake
        self._check_abort = check_abort
        self._asked: SimpleQueue[_Errand] = SimpleQueue()
        self._open: list[_Errand] = []

    def send_message(self, target: str, key: MessageKey, tensors: Tensors) -> None:
        """Send to another device; returns when the mailbox has it."""
        self._have_done(lambda driver: driver.try_send(target, key, tensors))

    def wait_for_message(self, step: int, lane: str) -> Tensors:
        """Wait for a lane's message of a step."""
        return self._have_done(lambda driver: driver.try_take(step, lane))

    def serve(self, driver: StaleDriver) -> None:
        """Do what can be done now; called in the driver's thread."""
        while True:
            try:
                self._open.append(self._asked.get_nowait())
            except Empty:
                break
        for errand in list(self._open):
            result = errand.attempt(driver)
            if result is not None:
                errand.result = result
                self._open.remove(errand)
                errand.over.set()

    def _have_done(self, attempt: Callable[[StaleDriver], Tensors | None]) -> Tensors:
        errand = _Errand(attempt=attempt)
        self._asked.put(errand)
        self._wake()
        while not errand.over.wait(_POLL_S):
            self._check_abort()
        return errand.result
