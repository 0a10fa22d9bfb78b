"""Drives one replica's dispatch policy by the wall clock: the live twin of `spantrain.sim`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Event, Finished, MessageKey, StepStarted
from spantrain.core.plan import Plan, WireFormat
from spantrain.core.spans import Span
from spantrain.models.device import Device
from spantrain.models.stage import StageExecutor
from spantrain.policy.dispatch import DispatchPolicy
from spantrain.policy.routing import Router
from spantrain.runtime.inbox import Inbox
from spantrain.runtime.recorder import Recorder
from spantrain.runtime.rounding import for_wire, from_wire
from spantrain.transport.interface import MailboxLike, Message

__all__ = ["DeviceClock", "Feed", "StepDriver"]

_POLL_S = 0.25
"""How often a waiting driver looks whether the run was aborted."""
_EVALUATE = "evaluate"

Tensors = tuple[torch.Tensor, ...]


class Feed(Protocol):
    """Reads the samples of a step where they are needed."""

    def inputs(self, step: int, span: Span) -> Tensors:
        """Return what the first stage takes."""

    def labels(self, step: int, span: Span) -> torch.Tensor:
        """Return what the last stage compares with."""


@dataclass(frozen=True, kw_only=True)
class DeviceClock:
    """The device that computes, and how long an action should take on it (None: as long as it takes)."""

    device: Device
    seconds: Callable[[Op, int], float | None]


class StepDriver:
    """Runs steps of one replica: asks the policy, computes, sends, receives."""

    def __init__(
        self,
        *,
        plan: Plan,
        name: str,
        executor: StageExecutor,
        clock: DeviceClock,
        mailbox: MailboxLike,
        feed: Feed,
        recorder: Recorder,
        check_abort: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._name = name
        self._executor = executor
        self._clock = clock
        self._mailbox = mailbox
        self._feed = feed
        self._recorder = recorder
        self._check_abort = check_abort
        self._router = Router(plan)
        self._inbox = Inbox()
        self._stage, self._replica = plan.place(name)
        stages = plan.stages
        self._wire_before = stages[self._stage - 1].wire_format if self._stage else WireFormat.NATIVE
        self._wire_behind = stages[self._stage].wire_format
        self._is_first = self._stage == 0
        self._is_last = self._stage == len(plan.stages) - 1
        self._events: list[Event] = []
        self._step = 0
        self._loss_sum = 0.0

    def run_step(self, step: int, policy: DispatchPolicy) -> float | None:
        """Run all actions of a step; return the last stage's loss sum (None on other stages)."""
        self._step, self._loss_sum = step, 0.0
        self._inbox.forget_before(step)
        self._events = [StepStarted(step), *self._early_arrivals(step)]
        ready_since = time.monotonic()
        waited_s = 0.0
        action = self._next_action(policy)
        while not policy.step_complete:
            if action is None:
                before = time.monotonic()
                self._receive(_POLL_S)
                waited_s += time.monotonic() - before
            else:
                started_s, ended_s = self._perform(action)
                figures = self._recorder.figures
                figures.overhead_s.append(max(0.0, started_s - ready_since - waited_s))
                figures.waiting_s += waited_s
                ready_since, waited_s = ended_s, 0.0
            action = self._next_action(policy)
        self._note_sends()
        return self._loss_sum if self._is_last else None

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward, without gradients; return the last stage's loss sum."""
        self._step = step
        loss_sum = 0.0
        for span in self._plan.stages[self._stage].replica_spans(self._replica):
            inputs = feed.inputs(step, span) if self._is_first else self._wait_for(step, _EVALUATE, span)
            labels = feed.labels(step, span) if self._is_last else None
            outputs = self._compute(Op.FORWARD, span, partial(self._executor.evaluate, inputs, labels))
            if self._is_last:
                loss_sum += float(outputs[0])
            else:
                self._send(Direction.FORWARD, span, outputs, lane=_EVALUATE)
        return loss_sum if self._is_last else None

    def wait_for_message(self, step: int, lane: str) -> Tensors:
        """Wait for one particular message outside the pipeline's routes, e.g. a sum of shared gradients."""
        return self._wait_for(step, lane, Span(0, 1))

    def send_message(self, target: str, key: MessageKey, tensors: Tensors) -> None:
        """Send outside the pipeline's routes; waits while the peer's queue is full, receiving meanwhile."""
        while not self._mailbox.send(target, key, tensors, timeout_s=0.0):
            self._receive(_POLL_S)

    def _next_action(self, policy: DispatchPolicy) -> Action | None:
        """Tell the policy what has happened since; return what it wants run, if anything."""
        self._receive(0.0)
        # What arrived while an action ran is told before its end, so that the next choice knows of it.
        events = sorted(self._events, key=lambda event: isinstance(event, Finished))
        self._events = []
        chosen: Action | None = None
        for event in events:
            now_s = time.monotonic()
            commands = policy.on_event(now_s, event)
            self._recorder.decided(self._step, now_s, event, commands)
            for command in commands:
                assert chosen is None, f"{command.action} was commanded while {chosen} is to run"
                chosen = command.action
        return chosen

    def _perform(self, action: Action) -> tuple[float, float]:
        work = self._work(action)
        start_s = time.monotonic()
        outputs = self._compute(action.op, action.span, work)
        end_s = time.monotonic()
        self._recorder.computed(str(action), self._step, start_s, end_s, held_samples=self._executor.held_samples)
        if action.op is Op.FORWARD and self._is_last:
            self._loss_sum += float(outputs[0])
        elif action.op is Op.FORWARD:
            self._send(Direction.FORWARD, action.span, outputs, lane=Direction.FORWARD.value)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and not self._is_first:
            self._send(Direction.BACKWARD, action.span, outputs, lane=Direction.BACKWARD.value)
        self._events.append(Finished(action))
        return start_s, end_s

    def _work(self, action: Action) -> Callable[[], Tensors]:
        """Return the computation of an action, with its inputs bound."""
        executor, span, step = self._executor, action.span, self._step
        if action.op is Op.FORWARD:
            inputs = (
                self._feed.inputs(step, span)
                if self._is_first
                else self._inbox.take(step, Direction.FORWARD.value, span)
            )
            labels = self._feed.labels(step, span) if self._is_last else None
            return lambda: executor.forward(span, inputs, labels)
        if action.op is Op.BACKWARD_WEIGHT:
            return partial(_without_result, executor.backward_weight, span)
        gradients = () if self._is_last else self._inbox.take(step, Direction.BACKWARD.value, span)
        if action.op is Op.BACKWARD:
            return lambda: executor.backward(span, gradients)
        return lambda: executor.backward_input(span, gradients)

    def _compute(self, op: Op, span: Span, work: Callable[[], Tensors]) -> Tensors:
        return self._clock.device.run(work, self._clock.seconds(op, span.size))

    def _send(self, direction: Direction, span: Span, tensors: Tensors, *, lane: str) -> None:
        cut, wire_format = self._plan.stages[self._stage].end_unit - 1, self._wire_behind
        if direction is Direction.BACKWARD:
            cut, wire_format = self._plan.stages[self._stage].first_unit - 1, self._wire_before
        tensors = for_wire(tensors, wire_format)
        for target, part in self._router.destinations(self._name, direction, span):
            key = MessageKey(self._plan.generation, self._step, lane, cut, part)
            pieces = tuple(tensor[part.lo - span.lo : part.hi - span.lo] for tensor in tensors)
            self.send_message(target, key, pieces)

    def _receive(self, timeout_s: float) -> None:
        self._check_abort()
        for message in self._mailbox.receive(timeout_s):
            self._accept(message)

    def _accept(self, message: Message) -> None:
        key = message.key
        self._recorder.received(message)
        self._inbox.add(key.step, key.lane, key.span, self._received(key.lane, message.tensors))
        if key.step == self._step and key.lane in (Direction.FORWARD.value, Direction.BACKWARD.value):
            self._events.append(Arrived(Direction(key.lane), key.span))

    def _received(self, lane: str, tensors: Tensors) -> Tensors:
        """Return tensors of a message as this stage works on them."""
        if lane == Direction.BACKWARD.value:
            return from_wire(tensors, self._wire_behind)
        return from_wire(tensors, self._wire_before) if lane in (Direction.FORWARD.value, _EVALUATE) else tensors

    def _early_arrivals(self, step: int) -> list[Event]:
        """Return what arrived before this step began here."""
        return [
            Arrived(direction, span) for direction in Direction for span in self._inbox.spans(step, direction.value)
        ]

    def _wait_for(self, step: int, lane: str, span: Span) -> Tensors:
        while sum(_common(span, piece) for piece in self._inbox.spans(step, lane)) < span.size:
            self._receive(_POLL_S)
        return self._inbox.take(step, lane, span)

    def _note_sends(self) -> None:
        for sent in self._mailbox.sent_intervals():
            self._recorder.sent(sent.peer, sent.key, sent.size_bytes, sent.started_s, sent.acknowledged_s)


def _without_result(work: Callable[[Span], None], span: Span) -> Tensors:
    work(span)
    return ()


def _common(a: Span, b: Span) -> int:
    both = a.intersect(b)
    return 0 if both is None else both.size
