"""Drives one replica's dispatch policy by the wall clock: the live twin of `spantrain.sim`.

Samples that have arrived, in pieces, until an action takes them.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from spantrain.adaptation.local import LocalAdapter
from spantrain.adaptation.monitor import SentMessage
from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Event, Finished, MessageKey, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.span import Span, equal_spans
from spantrain.core.speed import LinkReport
from spantrain.formats.registry import WireFormat
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.step.following import Followers
from spantrain.runtime.step.recorder import StepRecorder
from spantrain.runtime.step.rounding import ErrorFeedback, for_wire, from_wire
from spantrain.runtime.step.work import DeviceClock, Feed, LastBackward, ReplicaWork, Tensors
from spantrain.schedule.dispatch.machine import Machine
from spantrain.schedule.layout import Router
from spantrain.transport.mailbox.interface import Message
from spantrain.transport.mailbox.mailbox import MailboxLike


class SampleInbox:
    """Pieces by (step, lane); handed out as whole spans, however they were cut on the way."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, str], list[tuple[Span, Tensors]]] = {}

    def add(self, step: int, lane: str, span: Span, tensors: Tensors) -> None:
        """Keep one piece; every tensor's first dimension is the span's samples."""
        self._pieces.setdefault((step, lane), []).append((span, tensors))

    def spans(self, step: int, lane: str) -> tuple[Span, ...]:
        """Return what lies here, in order of arrival."""
        return tuple(span for span, _ in self._pieces.get((step, lane), ()))

    def take(self, step: int, lane: str, span: Span) -> Tensors:
        """Hand out the samples of a span and forget them; all of them must be here."""
        kept: list[tuple[Span, Tensors]] = []
        found: list[tuple[Span, Tensors]] = []
        for piece, tensors in self._pieces.get((step, lane), ()):
            part = piece.intersect(span)
            if part is None:
                kept.append((piece, tensors))
                continue
            found.append((part, _slice(tensors, piece, part)))
            kept.extend((rest, _slice(tensors, piece, rest)) for rest in _remainders(piece, part))
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

    def clear(self) -> None:
        """Drop everything."""
        self._pieces.clear()


def _slice(tensors: Tensors, piece: Span, part: Span) -> Tensors:
    if part == piece:
        return tensors
    return tuple(tensor[part.lo - piece.lo : part.hi - piece.lo] for tensor in tensors)


def _remainders(piece: Span, part: Span) -> list[Span]:
    rest = []
    if piece.lo < part.lo:
        rest.append(Span(piece.lo, part.lo))
    if part.hi < piece.hi:
        rest.append(Span(part.hi, piece.hi))
    return rest


_POLL_S = 0.25
"""How often a waiting driver looks whether the run was aborted."""
_EVALUATE = "evaluate"
_PIPELINE = tuple(direction.value for direction in Direction)


class StepDriver:
    """Runs steps of one replica: asks the policy, computes, sends, receives; of a group, its leader does."""

    def __init__(
        self,
        *,
        plan: Plan,
        name: str,
        work: ReplicaWork,
        clock: DeviceClock,
        mailbox: MailboxLike,
        followers: Followers,
        recorder: StepRecorder,
        check_abort: Callable[[], None],
        local: LocalAdapter | None = None,
    ) -> None:
        """Take everything that a step needs; without an adapter, links are watched and nothing else."""
        self._plan = plan
        self._name = name
        self._replica_work = work
        self._clock = clock
        self._mailbox = mailbox
        self._followers = followers
        self._recorder = recorder
        self._check_abort = check_abort
        self._local = local or LocalAdapter()
        self._router = Router(plan)
        self._inbox = SampleInbox()
        self._feedback = ErrorFeedback()
        work.executor.meter.waiting_bytes = self._inbox.held_bytes
        self._stage, self._replica = plan.place(name)
        stages = plan.stages
        own_spans = stages[self._stage].replica_spans(self._replica)
        self._last_backward = LastBackward(sum(span.size for span in own_spans))
        self._wire_before = stages[self._stage - 1].wire_format if self._stage else WireFormat.NATIVE
        self._wire_behind = stages[self._stage].wire_format
        self._is_first = work.is_first
        self._is_last = work.is_last
        self._events: list[Event] = []
        self._step = 0
        self._loss_sum = 0.0

    def run_step(self, step: int, policy: Machine, final: NamesFinal | None = None) -> float | None:
        """Run all actions of a step; return the last stage's loss sum (None on other stages).

        `final` is told which gradients are final, while the step's last backward runs here.
        """
        self._step, self._loss_sum = step, 0.0
        self._last_backward.begin(step, final)
        self._inbox.forget_before(step)
        self._feedback.forget()
        self._events = [StepStarted(step), *self._early_arrivals(step)]
        self._followers.begin()
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
        self._followers.end()
        self._note_sends()
        return self._loss_sum if self._is_last else None

    def link_reports(self) -> tuple[LinkReport, ...]:
        """Return what is known of the links to the peers, by name, from the messages of the last step."""
        return self._local.reports()

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward, without gradients; return the last stage's loss sum."""
        self._step = step
        loss_sum = 0.0
        self._followers.begin()
        for span in self._plan.stages[self._stage].replica_spans(self._replica):
            received = () if self._is_first else self._wait_for(step, _EVALUATE, span)
            work = self._evaluation(step, span, received, feed)
            outputs = self._clock.run(Op.FORWARD, span.size, work)
            if self._is_last:
                loss_sum += float(outputs[0])
            else:
                self._send(Direction.FORWARD, span, outputs, lane=_EVALUATE)
        self._followers.end()
        return loss_sum if self._is_last else None

    def wait_for_message(self, step: int, lane: str) -> Tensors:
        """Wait for one particular message outside the pipeline's routes, e.g. a sum of shared gradients."""
        return self._wait_for(step, lane, Span(0, 1))

    def send_message(self, target: str, key: MessageKey, tensors: Tensors) -> None:
        """Send outside the pipeline's routes; waits while the peer's queue is full, receiving meanwhile."""
        while not self._mailbox.send(target, key, tensors, timeout_s=0.0):
            self._receive(_POLL_S)

    def _next_action(self, policy: Machine) -> Action | None:
        """Tell the policy what has happened since; return what it wants run, if anything."""
        self._receive(0.0)
        self._note_sends()
        # What arrived while an action ran is told before its end, so that the next choice knows of it.
        events = sorted(self._events, key=lambda event: isinstance(event, Finished))
        self._events = []
        chosen = self._tell(policy, events)
        recut = self._local.recut(time.monotonic(), policy)
        return chosen if recut is None else self._tell(policy, [recut]) or chosen

    def _tell(self, policy: Machine, events: Iterable[Event]) -> Action | None:
        chosen: Action | None = None
        for event in events:
            now_s = time.monotonic()
            self._local.heard(now_s, event)
            commands = policy.on_event(now_s, event)
            self._recorder.decided(self._step, now_s, event, commands)
            for command in commands:
                assert chosen is None, f"{command.action} was commanded while {chosen} is to run"
                chosen = command.action
        return chosen

    def _perform(self, action: Action) -> tuple[float, float]:
        final = self._last_backward.of(self._step, action)
        work = self._work(action, self._clock.told_by_work(final))
        start_s = time.monotonic()
        outputs = self._clock.run(action.op, action.span.size, work, final)
        end_s = time.monotonic()
        self._local.finished(action.op, action.span.size, end_s - start_s)
        held_samples = self._replica_work.held_samples
        self._recorder.computed(str(action), self._step, start_s, end_s, held_samples=held_samples)
        if action.op is Op.FORWARD and self._is_last:
            self._loss_sum += float(outputs[0])
        elif action.op is Op.FORWARD:
            self._send(Direction.FORWARD, action.span, outputs, lane=Direction.FORWARD.value)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and not self._is_first:
            self._send(Direction.BACKWARD, action.span, outputs, lane=Direction.BACKWARD.value)
        self._events.append(Finished(action))
        return start_s, end_s

    def _work(self, action: Action, final: NamesFinal | None) -> Callable[[], Tensors]:
        """Return the computation of an action, with its inputs bound; followers are told as it begins."""
        op, span, step = action.op, action.span, self._step
        awaited = self._replica_work.awaits(op)
        received = self._take(step, awaited.value, span) if awaited else ()
        if not self._followers.exist:
            return self._replica_work.bind(op, step, span, received, final)
        return lambda: self._replica_work.bind(op, step, span, self._followers.tell(op, step, span, received), final)()

    def _evaluation(self, step: int, span: Span, received: Tensors, feed: Feed) -> Callable[[], Tensors]:
        def work() -> Tensors:
            handed = self._followers.tell(None, step, span, received)
            return self._replica_work.bind_evaluation(step, span, handed, feed)()

        return work

    def _send(self, direction: Direction, span: Span, tensors: Tensors, *, lane: str) -> None:
        cut, wire_format = self._plan.stages[self._stage].end_unit - 1, self._wire_behind
        if direction is Direction.BACKWARD:
            cut, wire_format = self._plan.stages[self._stage].first_unit - 1, self._wire_before
        send_as = self._feedback.for_wire if direction is Direction.BACKWARD else for_wire
        tensors = send_as(tensors, wire_format)
        for target, part in self._parts(direction, span):
            key = MessageKey(self._plan.generation, self._step, lane, cut, part)
            pieces = tuple(tensor[part.lo - span.lo : part.hi - span.lo] for tensor in tensors)
            self.send_message(target, key, pieces)

    def _parts(self, direction: Direction, span: Span) -> Iterator[tuple[str, Span]]:
        """Yield who gets which samples, in pieces as small as the adapter wants them."""
        for target, part in self._router.destinations(self._name, direction, span):
            for piece in equal_spans(part.size, self._local.piece_samples(target, part.size)):
                yield target, Span(part.lo + piece.lo, part.lo + piece.hi)

    def _receive(self, timeout_s: float) -> None:
        self._check_abort()
        self._followers.keep_alive()
        for message in self._mailbox.receive(timeout_s):
            self._accept(message)

    def _accept(self, message: Message) -> None:
        key = message.key
        self._recorder.received(message)
        self._inbox.add(key.step, key.lane, key.span, message.tensors)
        if key.lane in _PIPELINE:
            self._local.received(Direction(key.lane), key.span.size, message.received_s)
            self._arrived(key.step, Arrived(Direction(key.lane), key.span))

    def _arrived(self, step: int, event: Arrived) -> None:
        """Have the policy told of samples of a step that has begun; those of others lie in the inbox until then."""
        if step == self._step:
            self._events.append(event)

    def _take(self, step: int, lane: str, span: Span) -> Tensors:
        """Return samples that have come, as this stage works on them; until then they lie here as they were sent."""
        tensors, device = self._inbox.take(step, lane, span), self._clock.device.torch_device
        if lane == Direction.BACKWARD.value:
            return from_wire(tensors, self._wire_behind, device)
        if lane in (Direction.FORWARD.value, _EVALUATE):
            return from_wire(tensors, self._wire_before, device)
        return tensors

    def _early_arrivals(self, step: int) -> list[Event]:
        """Return what arrived before this step began here."""
        return [
            Arrived(direction, span) for direction in Direction for span in self._inbox.spans(step, direction.value)
        ]

    def _wait_for(self, step: int, lane: str, span: Span) -> Tensors:
        while sum(_common(span, piece) for piece in self._inbox.spans(step, lane)) < span.size:
            self._receive(_POLL_S)
        return self._take(step, lane, span)

    def _note_sends(self) -> None:
        for sent in self._mailbox.sent_intervals():
            self._recorder.sent(sent.peer, sent.key, sent.size_bytes, sent.started_s, sent.acknowledged_s)
            message = SentMessage(
                peer=sent.peer,
                size_bytes=sent.size_bytes,
                queued_s=sent.queued_s,
                started_s=sent.started_s,
                acknowledged_s=sent.acknowledged_s,
            )
            self._local.sent(message, sent.key.span.size if sent.key.lane in _PIPELINE else 0)


def _common(a: Span, b: Span) -> int:
    both = a.intersect(b)
    return 0 if both is None else both.size
