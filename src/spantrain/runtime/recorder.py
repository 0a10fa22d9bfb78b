"""What one worker did, when and why: for the trace, the log of decisions, as figures of each step, and told of single
steps beside its further work.

Bytes on the wire since a session began; a mailbox counts on through all its sessions.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread

from spantrain.core.messages import AnyKey, Command, ControlKey, Decision, Event, Recut
from spantrain.core.trace import DeviceStep, Flow, Interval, Trace
from spantrain.errors import SpanTrainError
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.control.requests import TellStep
from spantrain.transport.mailbox.interface import Message, PeerCounters
from spantrain.transport.mailbox.mailbox import MailboxLike


@dataclass
class StepFigures:
    """One device's times within one step."""

    busy_s: float = 0.0
    overhead_s: list[float] = field(default_factory=list)
    """Between two actions, outside computation and waiting; one entry an action."""
    peak_held_samples: int = 0


@dataclass
class _StepRecord:
    intervals: list[Interval] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    decisions: list[tuple[int, float, Event, Sequence[Command]]] = field(default_factory=list)


class StepRecorder:
    """Keeps intervals, flows and decisions of the last steps, on this machine's monotonic clock."""

    def __init__(self, device: str, *, clock_offset_s: float = 0.0, steps: int = 0) -> None:
        """Keep `steps` steps; the offset, added to this machine's clock, gives the coordinator's."""
        self._device = device
        self._offset_s = clock_offset_s
        self._steps: deque[_StepRecord] = deque(maxlen=steps)
        self._now = _StepRecord()
        self._switched: list[Interval] = []
        """For the record of the step to come."""
        self.figures = StepFigures()

    def begin_step(self) -> None:
        """Start new figures; what comes belongs to this step."""
        self.figures = StepFigures()
        self._now = _StepRecord(intervals=self._switched)
        self._switched = []
        self._steps.append(self._now)

    def end_steps(self) -> None:
        """Take what comes as belonging to no step."""
        self.figures, self._now = StepFigures(), _StepRecord()

    def switched(self, name: str, step: int, start_s: float, end_s: float) -> None:
        """Note the change to the plan that the steps from this one on have; decisions under another one are dropped.

        They could not be made again: the log is of one plan.
        """
        for record in self._steps:
            record.decisions.clear()
        self._interval("compute", name, step, start_s, end_s)
        self._switched = [self._now.intervals.pop()]

    def computed(self, name: str, step: int, start_s: float, end_s: float, *, held_samples: int) -> None:
        """Note a piece of computation, and how many samples are held after it."""
        self.figures.busy_s += end_s - start_s
        self.figures.peak_held_samples = max(self.figures.peak_held_samples, held_samples)
        self._interval("compute", name, step, start_s, end_s)

    def communicated(self, name: str, step: int, start_s: float, end_s: float) -> None:
        """Note a collective or another exchange, from when the device waits for nothing else."""
        self._interval("compute", name, step, start_s, end_s)

    def summed(self, step: int, intervals: Sequence[tuple[float, float]]) -> None:
        """Note the sums of buckets of gradients, which go on beside computation."""
        for number, (start_s, end_s) in enumerate(intervals):
            self._interval("sum", f"gradient bucket {number}", step, start_s, end_s)

    def sent(self, target: str, key: AnyKey, size_bytes: int, start_s: float, end_s: float) -> None:
        """Note a message on its way out, until it was acknowledged."""
        self._interval("send", f"{_what(key)} to {target}", key.step, start_s, end_s, bytes=size_bytes)

    def received(self, message: Message) -> None:
        """Note a message that came in; when it was sent is on the sender's clock."""
        key = message.key
        name, size_bytes = f"{_what(key)} from {message.source}", message.size_bytes
        self._interval("receive", name, key.step, message.started_s, message.received_s, bytes=size_bytes)
        self._now.flows.append(
            Flow(
                name=str(key),
                source=message.source,
                target=self._device,
                step=key.step,
                sent_s=message.sent_s,
                received_s=message.received_s + self._offset_s,
                size_bytes=size_bytes,
            )
        )

    def decided(self, step: int, now_s: float, event: Event, commands: Sequence[Command]) -> None:
        """Note what the policy was told and what it answered; as text only at the end, to cost the run little."""
        self._now.decisions.append((step, now_s, event, commands))
        if isinstance(event, Recut):
            spans = " ".join(map(str, event.spans))
            self._interval("adapter", f"recut {spans}", step, now_s, now_s, reason=event.reason)

    def decisions(self) -> tuple[Decision, ...]:
        """Return what the policy was told and what it answered, by the clock that it was told."""
        return tuple(Decision.of(*entry) for record in self._steps for entry in record.decisions)

    def trace(self) -> Trace:
        """Return what was collected, on the coordinator's clock."""
        return Trace(
            intervals=tuple(interval for record in self._steps for interval in record.intervals),
            flows=tuple(flow for record in self._steps for flow in record.flows),
            clock="wall",
        )

    @property
    def step_under_way(self) -> int | None:
        """The last step of which anything was computed or received since it began."""
        return max((one.step for one in self._now.intervals if one.lane in ("compute", "receive")), default=None)

    def record(self, step: int, peak_bytes: int | None = None) -> DeviceStep:
        """Return what was done in the step under way, on the coordinator's clock."""
        intervals, flows = list(self._now.intervals), list(self._now.flows)
        work, sums = (
            tuple((one.name, one.start_s, one.end_s) for one in intervals if one.lane == lane and one.step == step)
            for lane in ("compute", "sum")
        )
        return DeviceStep(
            step=step,
            work=work,
            sums=sums,
            messages=tuple(
                (flow.name, flow.source, flow.sent_s, flow.received_s, flow.size_bytes)
                for flow in flows
                if flow.step == step
            ),
            peak_bytes=peak_bytes,
        )

    def _interval(
        self, lane: str, name: str, step: int, start_s: float, end_s: float, **detail: str | int | float
    ) -> None:
        self._now.intervals.append(
            Interval(
                device=self._device,
                lane=lane,
                name=name,
                step=step,
                start_s=start_s + self._offset_s,
                end_s=end_s + self._offset_s,
                detail=detail,
            )
        )


def _what(key: AnyKey) -> str:
    return key.lane if isinstance(key, ControlKey) else f"{key.lane} {key.span}"


class StepTeller:
    """Tells the coordinator of one step at a time: while one is on its way, others are left out."""

    def __init__(self, control: ControlPlane, recorder: StepRecorder) -> None:
        self._control, self._recorder = control, recorder
        self._thread: Thread | None = None

    def tell(self, step: int, peak_bytes: int | None) -> None:
        """Send what was done in it; nothing waits for that, and nothing comes of its getting lost."""
        if self._thread is None or not self._thread.is_alive():
            told = self._recorder.record(step, peak_bytes)
            self._thread = Thread(target=self._ask, args=(told,), name="step record", daemon=True)
            self._thread.start()

    def unfinished(self) -> DeviceStep | None:
        """Return what was done in the step that is under way, if anything."""
        step = self._recorder.step_under_way
        return None if step is None else self._recorder.record(step)

    def _ask(self, told: DeviceStep) -> None:
        with contextlib.suppress(SpanTrainError):
            self._control.ask(TellStep(told=told))


class PeerTraffic:
    """What went to each peer and came from it since this was made."""

    def __init__(self, mailbox: MailboxLike) -> None:
        self._mailbox = mailbox
        self._before = mailbox.counters().peers
        self._told: dict[str, int] = {}

    def newly_sent(self) -> dict[str, int]:
        """Return what went to peers since this was asked last; none where nothing did."""
        before, self._told = self._told, self.sent()
        return {peer: new for peer, size in self._told.items() if (new := size - before.get(peer, 0))}

    def sent(self) -> dict[str, int]:
        """Return what went to each peer."""
        return self._since(lambda counters: counters.wire_bytes_sent)

    def received(self) -> dict[str, int]:
        """Return what came from each peer."""
        return self._since(lambda counters: counters.wire_bytes_received)

    def _since(self, value: Callable[[PeerCounters], int]) -> dict[str, int]:
        none = PeerCounters()
        now = self._mailbox.counters().peers
        return {name: value(counters) - value(self._before.get(name, none)) for name, counters in now.items()}
