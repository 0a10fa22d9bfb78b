"""One simulated replica: its policy, what it runs and holds."""

from collections.abc import Callable, Iterable
from functools import cached_property

from spantrain.adaptation.local import LocalAdapter
from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Event, Finished, StepStarted
from spantrain.core.records import Record
from spantrain.core.span import Span, equal_spans
from spantrain.core.speed import SentMessage, SpeedTrace
from spantrain.schedule.dispatch.several import AnyMachine, SeveralStages
from spantrain.sim.record import MemoryLog, TraceRecorder
from spantrain.sim.transfers import VirtualClock


class World(Record):
    """What replicas share."""

    clock: VirtualClock
    recorder: TraceRecorder
    memory: MemoryLog | None
    deliver: Callable[[str, Action, int, float], None]
    """Takes what a device's action, begun at a time, has produced in a step to those who need it."""

    @cached_property
    def is_watched(self) -> bool:
        """Whether anything is kept of what happens."""
        return self.recorder.on or self.memory is not None


class SimulatedReplica:
    """Gives events to a policy and lets the actions that it commands take their time.

    Counts held samples by itself, so that a policy which breaks its limit is seen.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        policy: AnyMachine,
        seconds: Callable[[str, Action], float],
        overhead_s: float,
        *,
        speed: SpeedTrace | None = None,
        clock_offset_s: float = 0.0,
        local: LocalAdapter | None = None,
    ) -> None:
        self.devices = devices
        self.leader = devices[0]
        """The device that decides."""
        self.policy = policy
        self.order: list[Action] = []
        """What it ran in the last step."""
        self.busy_s = 0.0
        """Seconds of work in the last step."""
        self.ended_s = 0.0
        """When its last action ended."""
        self.last_start_s = 0.0
        """When that began."""
        self.peak_held = 0
        self._held = 0
        self._seconds = seconds
        self._known_s: dict[tuple[int, Op, int], float] = {}
        self._overhead_s = overhead_s
        self._speed = speed
        self._clock_offset_s = clock_offset_s
        self.local = local
        """Its adapter; None: it has none."""
        self._free_s = 0.0
        self._step: int | None = None
        self._early: list[Arrived] = []

    def begin(self, step: int, world: World) -> None:
        """Start a step; what has arrived for it already is told next."""
        self._step = step
        self.order, self.busy_s = [], 0.0
        early, self._early = self._early, []
        events: list[Event] = [StepStarted(step), *early]
        for event in events:
            self._tell(event, world)

    def end(self) -> None:
        """Close the step; what arrives from now on belongs to the next one."""
        self._step = None

    def arrive(self, step: int, event: Arrived, world: World) -> None:  # noqa: ARG002 - no two steps are at work here
        """Take in samples of this step, or of the next one."""
        if self._step is None:
            self._early.append(event)
        else:
            self._tell(event, world)

    def pieces(self, target: str, part: Span) -> Iterable[Span]:
        """Return what goes to a device in the messages that it goes in."""
        if self.local is None:
            return (part,)
        pieces = equal_spans(part.size, self.local.piece_samples(target, part.size))
        return tuple(Span(part.lo + piece.lo, part.lo + piece.hi) for piece in pieces)

    def hear_sent(self, peer: str, size_bytes: int, samples: int, start_s: float, known_s: float) -> None:
        """Take in that a peer has samples: when they left, and when the word of it is here, on the simulation's clock.

        It is told as the samples arrive, though its word comes later.
        """
        if self.local is not None:
            start_s, known_s = start_s + self._clock_offset_s, known_s + self._clock_offset_s
            message = SentMessage(
                peer=peer, size_bytes=size_bytes, queued_s=start_s, started_s=start_s, acknowledged_s=known_s
            )
            self.local.sent(message, samples)

    def hear_received(self, direction: Direction, samples: int, time_s: float) -> None:
        """Take in when samples came, on the simulation's clock."""
        if self.local is not None:
            self.local.received(direction, samples, time_s + self._clock_offset_s)

    def last_of(self, stage: int) -> tuple[Action | None, float, float]:  # noqa: ARG002 - it has only one
        """Return the last action of a stage in this step, and when it began and ended; None: it had none."""
        return (self.order[-1] if self.order else None), self.last_start_s, self.ended_s

    def work_ends_s(self, start_s: float, work_s: float) -> float:
        """Return when work that takes so long at the device's normal speed ends."""
        return start_s + work_s if self._speed is None else self._speed.end_s(start_s, work_s)

    def _tell(self, event: Event, world: World) -> None:
        # The device knows its own clock only.
        now_s = world.clock.now_s + self._clock_offset_s
        if self.local is not None:
            self.local.heard(now_s, event)
        for command in self.policy.on_event(now_s, event):
            self._run(command.action, world)
        recut = None
        if self.local is not None and not isinstance(self.policy, SeveralStages):
            recut = self.local.recut(now_s, self.policy)
        if recut is not None:
            what = f"recut {' '.join(map(str, recut.spans))}"
            world.recorder.decided(self.leader, what, recut.reason, self._step or 0, world.clock.now_s)
            for command in self.policy.on_event(now_s, recut):
                self._run(command.action, world)

    def _run(self, action: Action, world: World) -> None:
        op, span = action.op, action.span
        samples = span.hi - span.lo
        kind = action.stage, op, samples
        work_s = self._known_s.get(kind)
        if work_s is None:
            work_s = self._known_s[kind] = self._seconds(self.leader, action)
        clock = world.clock
        now_s, free_s = clock.now_s, self._free_s
        start_s = (now_s if now_s > free_s else free_s) + self._overhead_s
        end_s = start_s + work_s if self._speed is None else self._speed.end_s(start_s, work_s)
        if op is Op.FORWARD:
            self._held += samples
            if self._held > self.peak_held:
                self.peak_held = self._held
        self.order.append(action)
        clock.at(end_s, self._finished, action, start_s, world, last=True)

    def _finished(self, action: Action, start_s: float, world: World) -> None:
        step, end_s, op = self._step, world.clock.now_s, action.op
        assert step is not None, f"{action} ends between two steps"
        self.last_start_s, self.ended_s = start_s, end_s
        self.busy_s += end_s - start_s
        if self.local is not None:
            self.local.finished(op, action.span.size, end_s - start_s)
        if world.is_watched:
            world.recorder.computed(self.devices, action, step, start_s, end_s)
            if world.memory is not None:
                world.memory.computed(self.leader, action, start_s, end_s)
        if op is Op.BACKWARD_WEIGHT:
            self._held -= action.span.size
        else:
            if op is Op.BACKWARD:
                self._held -= action.span.size
            world.deliver(self.leader, action, step, start_s)
        self._tell(Finished(action), world)


class SharedReplica(SimulatedReplica):
    """A replica whose device has several stages."""

    def begin(self, step: int, world: World) -> None:
        """Start a step of all of its stages."""
        self._last: dict[int, tuple[Action, float, float]] = {}
        super().begin(step, world)

    def last_of(self, stage: int) -> tuple[Action | None, float, float]:
        """Return the last action of a stage in this step, and when it began and ended; None: it had none."""
        return self._last.get(stage, (None, self.ended_s, self.ended_s))

    def _finished(self, action: Action, start_s: float, world: World) -> None:
        self._last[action.stage] = action, start_s, world.clock.now_s
        super()._finished(action, start_s, world)
