"""Drives one replica's dispatch policy by the wall clock: the live twin of `spantrain.sim`.

It runs one step at a time, or two at once (`schedule.dispatch.policies.TwoSteps`): of the older one what is ready, else
of the next. What is decided while two run is not logged: a log is of one machine, and cannot be made again without the
other.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from spantrain.adaptation.local import LocalAdapter
from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import BACKGROUND, Arrived, Command, ControlKey, Event, Finished, MessageKey, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.span import Span, equal_spans
from spantrain.devices.base import Tensors
from spantrain.errors import ProtocolError
from spantrain.models.execution.held import HeldMeter
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.channels import DeferredMessages, MailboxMessages
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.step.ahead import Ahead
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.step.following import Followers
from spantrain.runtime.step.own_stage import EVALUATE, OwnStage, SharedNames, StageWork
from spantrain.runtime.step.rounding import ErrorFeedback, for_wire, from_wire
from spantrain.runtime.step.work import Feed, SampleInbox
from spantrain.schedule.dispatch.machine import DispatchMachine
from spantrain.schedule.dispatch.policies import TwoSteps
from spantrain.schedule.dispatch.several import AnyMachine
from spantrain.schedule.layout import Router
from spantrain.transport.mailbox.interface import Message

_POLL_S = 0.25
"""How often a waiting driver looks whether the run was aborted."""
_BESIDE_S = 0.02
"""How often one looks that waits for what goes on beside."""
_PIPELINE = tuple(direction.value for direction in Direction)


class _OneStep:
    """The policy of one step, with what it decides on record; asked as `TwoSteps` is."""

    def __init__(self, policy: AnyMachine, recorder: StepRecorder) -> None:
        self.policy = policy
        self._recorder = recorder
        self._step: int | None = None

    def on_event(self, now_s: float, step: int, event: Event) -> tuple[int, Command] | None:
        self._step = step
        commands = self.policy.on_event(now_s, event)
        self._recorder.decided(step, now_s, event, commands)
        assert len(commands) < 2, f"{commands} at once"
        return (step, commands[0]) if commands else None

    def close(self) -> int | None:
        return self._step if self.policy.step_complete else None


_StepMachine = _OneStep | TwoSteps
"""Decides over the steps that are open."""


@dataclass(kw_only=True)
class _OpenStep:
    feedback: dict[int, ErrorFeedback] = field(default_factory=dict)
    """By stage."""
    loss_sum: Tensor | float = 0.0
    """Summed where losses are computed; it is read when the step is over."""


class StepDriver(MailboxMessages):
    """Runs steps of one replica: asks the policy, computes, sends, receives; of a group, its leader does."""

    def __init__(
        self,
        here: WorkerContext,
        plan: Plan,
        *,
        stages: Mapping[int, StageWork],
        followers: Followers,
        local: LocalAdapter | None = None,
        two_steps: TwoSteps | None = None,
    ) -> None:
        """Work in a plan, by number of its stages.

        Without an adapter, links are watched and nothing else; `two_steps` runs two at once.
        """
        super().__init__(here.mailbox)
        self._here = here
        self._plan = plan
        replica = plan.crew_of(here.name).replica_index(here.name)
        self._stages = {number: OwnStage(plan, number, replica, work) for number, work in sorted(stages.items())}
        self._stage_at = {lane: number for number, own in self._stages.items() for lane in own.lanes}
        self._is_last = len(plan.stages) - 1 in self._stages
        self._followers = followers
        self.local = local or LocalAdapter()
        """What follows the links to the peers."""
        self._router = Router(plan)
        self._inbox = SampleInbox()
        executors = [one for own in self._stages.values() for one in own.work.executors]
        self._shared = SharedNames(self._stages.values())
        self._keeps_spans = any(one.keeps_spans for one in executors)
        self._device, ahead = next((own.clock.device, own.clock.ahead) for own in self._stages.values())
        self._machine: _StepMachine | None = two_steps
        self._steps: dict[int, _OpenStep] = {}
        self._heard: list[tuple[int, Event]] = []
        self._ahead = Ahead(ahead)
        self._ready_since = time.monotonic()
        self._waited_s = 0.0
        self.deferred = DeferredMessages(here.mailbox.wake, here.check_abort) if two_steps else None
        """Messages of another thread, where two steps run at once."""
        self.beside: list[Callable[[], None]] = []
        """Called between actions: what goes on beside them, a little of it at a time."""
        # Each set's meter counts what waits here, and what the other's steps hold.
        meters = [one.meter for one in executors]
        for meter in meters:
            meter.waiting_bytes = partial(self._held_bytes, [other for other in meters if other is not meter])

    def _held_bytes(self, others: Sequence[HeldMeter]) -> int:
        come = sum(tensor.nbytes for tensors in self._come.values() for tensor in tensors)
        return self._inbox.held_bytes() + come + sum(one.now_bytes for one in others)

    def run_step(self, step: int, policy: AnyMachine, final: NamesFinal | None = None) -> float | None:
        """Run all actions of a step; return the last stage's loss sum (None on other stages).

        `final` is told which gradients are final, while the step's last backward runs here.
        """
        self._machine = _OneStep(policy, self._here.recorder)
        told = self._shared.told(final)
        for number, own in self._stages.items():
            own.last_backward.begin(step, told(number))
        self.forget(step - 1)
        self._followers.begin()
        self._ready_since = time.monotonic()
        self.begin_step(step)
        done = None
        while done is None:
            done = self.advance()
        self._followers.end()
        self._note_sends()
        return done[1]

    def begin_step(self, step: int) -> None:
        """Open a step; its weights are ready here."""
        self._steps[step] = _OpenStep()
        self._heard.append((step, StepStarted(step)))
        for number, own in self._stages.items():  # what arrived before
            for direction in Direction:
                spans = self._inbox.spans(step, own.lane(direction.value))
                self._heard += [(step, self._arrived(direction, span, number)) for span in spans]

    def _arrived(self, direction: Direction, span: Span, stage: int) -> Arrived:
        return Arrived(direction, span, stage if len(self._stages) > 1 else None)

    def advance(self) -> tuple[int, float | None] | None:
        """Do one action, or wait a moment for one; return a step whose actions are done here, with its loss sum.

        The loss sum is that of the last stage; None on other stages.
        """
        self._receive(0.0)
        self._note_sends()
        if self.deferred is not None:
            self.deferred.serve(self.try_send, self.try_take)
        self._go_on_beside()
        assert self._machine is not None
        self._note_ends()
        chosen = None if self._ahead.is_full else self._next_choice(self._machine)
        if chosen is not None:
            self._do(*chosen)
        step = self._machine.close()
        if step is not None:
            self._note_ends(wait=True)
            done = self._steps.pop(step)
            return step, float(done.loss_sum) if self._is_last else None
        if chosen is None:
            before_s, idle = time.monotonic(), not self._ahead
            self._receive(min(_POLL_S, self._ahead.patience_s))
            self._waited_s += time.monotonic() - before_s if idle else 0.0
        return None

    def forget(self, step: int) -> None:
        """Keep nothing any more of a step, and of those before."""
        self._inbox.forget_before(step + 1)
        self._come = {key: tensors for key, tensors in self._come.items() if key[0] > step}

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward, without gradients; return the last stage's loss sum."""
        loss_sum = 0.0
        self._followers.begin()
        for number, own in self._stages.items():
            for span in own.spans:
                received = () if own.work.is_first else self._wait_for_samples(own, step, span)
                outputs = own.clock.run(Op.FORWARD, span.size, self._evaluation(own, step, span, received, feed))
                if own.work.is_last:
                    loss_sum += float(outputs[0])
                else:
                    tensors = for_wire(outputs, own.wire_behind)
                    self._send(step, number, Direction.FORWARD, span, tensors, lane=EVALUATE)
        self._followers.end()
        return loss_sum if self._is_last else None

    def wait(self) -> None:
        """Take in what comes, or return after a moment."""
        self._receive(_POLL_S)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Have what goes on beside actions go on, until then."""
        while not done():
            self._receive(_BESIDE_S)
            self._go_on_beside()

    def _go_on_beside(self) -> None:
        for go_on in self.beside:
            go_on()

    # What to do next, and doing it.

    def _next_choice(self, machine: _StepMachine) -> tuple[int, Action] | None:
        """Tell what has happened since; return what is to be run, and in which step, if anything."""
        heard, self._heard = self._heard, []
        # What arrived while an action ran is told before its end, so that the next choice knows of it.
        chosen = self._tell(machine, sorted(heard, key=lambda entry: isinstance(entry[1], Finished)))
        policy = machine.policy if isinstance(machine, _OneStep) and not self._keeps_spans else None
        if isinstance(policy, DispatchMachine):
            recut = self.local.recut(time.monotonic(), policy)
            if recut is not None:
                chosen = self._tell(machine, [(step, recut) for step in self._steps]) or chosen
        return chosen

    def _tell(self, machine: _StepMachine, events: Iterable[tuple[int, Event]]) -> tuple[int, Action] | None:
        chosen: tuple[int, Action] | None = None
        for step, event in events:
            now_s = time.monotonic()
            self.local.heard(now_s, event)
            found = machine.on_event(now_s, step, event)
            if found is not None:
                assert chosen is None, f"{found} was commanded while {chosen} is to run"
                chosen = found[0], found[1].action
        return chosen

    def _do(self, step: int, action: Action) -> None:
        own = self._stages[action.stage]
        final = own.last_backward.of(step, action)
        work = self._work(own, step, action, own.clock.told_by_work(final))
        since_s = time.monotonic()
        submitted = own.clock.submit(action.op, action.span.size, work, final)
        held_samples = sum(one.work.held_samples for one in self._stages.values())
        self._ahead.submitted(step, action, submitted, since_s=since_s, held_samples=held_samples)
        self._note_ends()

    def _note_ends(self, *, wait: bool = False) -> None:
        """Hand on what actions have made that are over, and tell of those that are or will be."""
        recorder = self._here.recorder
        for entry in self._ahead.over(wait=wait):
            action, start_s, end_s = entry.action, entry.work.started_s, entry.work.ended_s
            self.local.finished(action.op, action.span.size, end_s - start_s)
            recorder.computed(str(action), entry.step, start_s, end_s, held_samples=entry.held_samples)
            self._hand_on(entry.step, action, entry.work.result)
            recorder.figures.overhead_s.append(max(0.0, start_s - self._ready_since - self._waited_s))
            self._ready_since, self._waited_s = end_s, 0.0
            if not entry.told:
                self._heard.append((entry.step, Finished(action)))
        self._heard += [(entry.step, Finished(entry.action)) for entry in self._ahead.ending()]

    def _hand_on(self, step: int, action: Action, outputs: Tensors) -> None:
        """Send what an action has made to those who need it, or count its loss."""
        open_step, own, stage = self._steps[step], self._stages[action.stage], action.stage
        if action.op is Op.FORWARD and own.work.is_last:
            open_step.loss_sum = open_step.loss_sum + outputs[0].double()
        elif action.op is Op.FORWARD:
            self._send_made(step, action, Direction.FORWARD, partial(for_wire, outputs, own.wire_behind))
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and not own.work.is_first:
            feedback = open_step.feedback.setdefault(stage, ErrorFeedback())
            self._send_made(step, action, Direction.BACKWARD, partial(feedback.for_wire, outputs, own.wire_before))

    def _send_made(self, step: int, action: Action, direction: Direction, made: Callable[[], Tensors]) -> None:
        """Send what is made of an action's result; what this device's own next stage alone takes stays on it."""
        targets = {target for target, _ in self._router.destinations(action.stage, direction, action.span)}
        fetched = made() if targets == {self._here.name} else self._device.fetch(made, self._device.torch_device)
        self._send(step, action.stage, direction, action.span, fetched)

    def _work(self, own: OwnStage, step: int, action: Action, final: NamesFinal | None) -> Callable[[], Tensors]:
        """Return the computation of an action, with its inputs bound; followers are told as it begins."""
        op, span, bind = action.op, action.span, own.work.bind
        awaited = own.work.awaits(op)
        received = self._take(own, step, awaited.value, span) if awaited else ()
        if not self._followers.exist:
            return bind(op, step, span, received, final)
        return lambda: bind(op, step, span, self._followers.tell(op, step, span, received), final)()

    def _evaluation(self, own: OwnStage, step: int, span: Span, received: Tensors, feed: Feed) -> Callable[[], Tensors]:
        def work() -> Tensors:
            handed = self._followers.tell(None, step, span, received)
            return own.work.bind_evaluation(step, span, handed, feed)()

        return work

    def _send(
        self, step: int, number: int, direction: Direction, span: Span, tensors: Tensors, *, lane: str | None = None
    ) -> None:
        stage = self._plan.stages[number]
        cut = stage.first_unit - 1 if direction is Direction.BACKWARD else stage.end_unit - 1
        for target, part in self._parts(number, direction, span):
            key = MessageKey(self._plan.generation, step, lane or direction.value, cut, part)
            pieces = tuple(tensor[part.lo - span.lo : part.hi - span.lo] for tensor in tensors)
            if target == self._here.name:
                self._take_in(key, pieces)
            else:
                self.send_message(target, key, pieces)

    def _parts(self, stage: int, direction: Direction, span: Span) -> Iterator[tuple[str, Span]]:
        """Yield who gets which samples, in pieces as small as the adapter wants them."""
        for target, part in self._router.destinations(stage, direction, span):
            for piece in equal_spans(part.size, self.local.piece_samples(target, part.size)):
                yield target, Span(part.lo + piece.lo, part.lo + piece.hi)

    def _receive(self, timeout_s: float) -> None:
        self._here.check_abort()
        self._followers.keep_alive()
        for message in self._here.mailbox.receive(timeout_s):
            self._accept(message)

    def _accept(self, message: Message) -> None:
        key = message.key
        self._here.recorder.received(message)
        if isinstance(key, ControlKey):
            self._come[key.step, key.lane] = message.tensors
            return
        if (key.lane, key.cut) not in self._stage_at:
            raise ProtocolError(f"{message.source} sends {key}, which is for no stage of {self._here.name}")
        self._take_in(key, message.tensors)
        if key.lane in _PIPELINE:
            self.local.received(Direction(key.lane), key.span.size, message.received_s)

    def _take_in(self, key: MessageKey, tensors: Tensors) -> None:
        """Keep samples until an action takes them."""
        self._inbox.add(key.step, (key.lane, key.cut), key.span, tensors)
        if key.lane in _PIPELINE and key.step in self._steps:  # those of others lie in the inbox until it begins
            stage = self._stage_at[key.lane, key.cut]
            self._heard.append((key.step, self._arrived(Direction(key.lane), key.span, stage)))

    def _take(self, own: OwnStage, step: int, name: str, span: Span) -> Tensors:
        """Return samples that have come, as a stage works on them; until then they lie here as they were sent."""
        wire_format = own.wire_behind if name == Direction.BACKWARD.value else own.wire_before
        return from_wire(self._inbox.take(step, own.lane(name), span), wire_format, self._device.torch_device)

    def _wait_for_samples(self, own: OwnStage, step: int, span: Span) -> Tensors:
        spans, lane = self._inbox.spans, own.lane(EVALUATE)
        while sum(both.size for piece in spans(step, lane) if (both := span.intersect(piece))) < span.size:
            self._receive(_POLL_S)
        return self._take(own, step, EVALUATE, span)

    def _note_sends(self) -> None:
        for sent in self._here.mailbox.sent_intervals():
            key = sent.key
            self._here.recorder.sent(sent.peer, key, sent.size_bytes, sent.started_s, sent.acknowledged_s)
            if key.lane.startswith(BACKGROUND):
                continue  # how long it took says nothing of the link: others went first
            samples = key.span.size if isinstance(key, MessageKey) and key.lane in _PIPELINE else 0
            self.local.sent(sent, samples)
