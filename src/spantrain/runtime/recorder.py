"""What one worker did and when: for the trace, and as figures of each step."""

from dataclasses import dataclass, field

from spantrain.core.messages import MessageKey
from spantrain.core.trace import Flow, Interval, Trace
from spantrain.transport.interface import Message

__all__ = ["Recorder", "StepFigures"]


@dataclass
class StepFigures:
    """One device's times within one step."""

    busy_s: float = 0.0
    waiting_s: float = 0.0
    overhead_s: list[float] = field(default_factory=list)
    """Between two actions, outside computation and waiting; one entry an action."""
    peak_held_samples: int = 0


class Recorder:
    """Collects intervals of the steps that are to be traced, on this machine's monotonic clock."""

    def __init__(self, device: str, *, clock_offset_s: float = 0.0) -> None:
        self._device = device
        self._offset_s = clock_offset_s
        self._intervals: list[Interval] = []
        self._flows: list[Flow] = []
        self.figures = StepFigures()
        self.tracing = False

    def begin_step(self, *, tracing: bool) -> None:
        """Start new figures; say whether this step goes into the trace."""
        self.figures = StepFigures()
        self.tracing = tracing

    def computed(self, name: str, step: int, start_s: float, end_s: float, *, held_samples: int) -> None:
        """Note a piece of computation, and how many samples are held after it."""
        self.figures.busy_s += end_s - start_s
        self.figures.peak_held_samples = max(self.figures.peak_held_samples, held_samples)
        self._interval("compute", name, step, start_s, end_s)

    def communicated(self, name: str, step: int, start_s: float, end_s: float) -> None:
        """Note a collective or another exchange that keeps the device from computing."""
        self._interval("compute", name, step, start_s, end_s)

    def sent(self, target: str, key: MessageKey, size_bytes: int, start_s: float, end_s: float) -> None:
        """Note a message on its way out, until it was acknowledged."""
        self._interval("send", f"{key.lane} {key.span} to {target}", key.step, start_s, end_s, size_bytes)

    def received(self, message: Message) -> None:
        """Note a message that came in; when it was sent is on the sender's clock."""
        if not self.tracing:
            return
        key = message.key
        self._interval(
            "receive",
            f"{key.lane} {key.span} from {message.source}",
            key.step,
            message.started_s,
            message.received_s,
            message.size_bytes,
        )
        self._flows.append(
            Flow(
                name=str(key),
                source=message.source,
                target=self._device,
                step=key.step,
                sent_s=message.sent_s,
                received_s=message.received_s + self._offset_s,
                size_bytes=message.size_bytes,
            )
        )

    def trace(self) -> Trace:
        """Return what was collected, on the coordinator's clock."""
        return Trace(intervals=tuple(self._intervals), flows=tuple(self._flows), clock="wall")

    def _interval(
        self, lane: str, name: str, step: int, start_s: float, end_s: float, size_bytes: int | None = None
    ) -> None:
        if not self.tracing:
            return
        self._intervals.append(
            Interval(
                device=self._device,
                lane=lane,
                name=name,
                step=step,
                start_s=start_s + self._offset_s,
                end_s=end_s + self._offset_s,
                detail={} if size_bytes is None else {"bytes": size_bytes},
            )
        )
