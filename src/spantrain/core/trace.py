"""What happened, or is predicted to happen, on each lane of each device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spantrain.core.action import Action
from spantrain.core.records import Record

TRACE_FORMAT = "spantrain-trace"
TRACE_VERSION = 1
"""Version of a trace's file."""

LANES = ("compute", "send", "receive", "sum", "adapter")
"""`sum`: buckets of gradients that are summed over replicas, beside the last backward and behind it.

`adapter`: moments at which something was decided about micro-batches or plans, with the reason as a detail.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Something that took time on one lane of one device."""

    device: str
    lane: str
    name: str
    """An action's text, or the text of a message's key."""
    step: int
    start_s: float
    end_s: float
    detail: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def action(self) -> Action | None:
        """The action that it is; None if it is something else."""
        try:
            return Action.parse(self.name)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A message from the send lane of one device to the receive lane of another."""

    name: str
    source: str
    target: str
    step: int
    sent_s: float
    received_s: float
    size_bytes: int


class Trace(Record):
    """Intervals and flows of a run, on one clock."""

    intervals: tuple[Interval, ...]
    flows: tuple[Flow, ...]
    clock: str
    """`wall` (one machine's monotonic clock, or clocks brought together) or `virtual`."""

    def of(self, device: str, lane: str = "compute", step: int | None = None) -> tuple[Interval, ...]:
        """Return the intervals of one lane, in time."""
        found = (
            interval
            for interval in self.intervals
            if interval.device == device and interval.lane == lane and step in (None, interval.step)
        )
        return tuple(sorted(found, key=lambda interval: interval.start_s))

    def since(self, step: int) -> "Trace":
        """Return the part from a step on."""
        intervals = (interval for interval in self.intervals if interval.step >= step)
        flows = (flow for flow in self.flows if flow.step >= step)
        return replace(self, intervals=tuple(intervals), flows=tuple(flows))

    @staticmethod
    def joined(traces: Iterable["Trace"], clock: str) -> "Trace":
        """Put the traces of several devices together."""
        parts = list(traces)
        return Trace(
            intervals=tuple(interval for part in parts for interval in part.intervals),
            flows=tuple(flow for part in parts for flow in part.flows),
            clock=clock,
        )


_MAX_ROWS, _MAX_NAME, _MAX_S = 4_000, 200, 1e11


class DeviceStep(Record):
    """What one device did in one step, in few bytes, as it goes to the coordinator."""

    step: int
    work: tuple[tuple[str, float, float], ...]
    """Actions and what stands between them: name, start, end."""
    sums: tuple[tuple[str, float, float], ...]
    """The same of sums beside them."""
    messages: tuple[tuple[str, str, float, float, int], ...]
    """That came: the text of the key, source, when it was sent, when it was there, bytes."""
    peak_bytes: int | None = None
    """The most that its tensors have held at once; None where the device cannot tell."""

    def __post_init__(self) -> None:
        names = [row[0] for row in (*self.work, *self.sums)] + [name for row in self.messages for name in row[:2]]
        times_s = [time_s for row in (*self.work, *self.sums) for time_s in row[1:]]
        times_s += [time_s for row in self.messages for time_s in row[2:4]]
        if len(names) > _MAX_ROWS or any(len(name) > _MAX_NAME or not name.isprintable() for name in names):
            raise ValueError(f"step {self.step}: at most {_MAX_ROWS} names of {_MAX_NAME} printable characters")
        if any(abs(time_s) > _MAX_S for time_s in times_s):
            raise ValueError(f"step {self.step}: no clock shows over {_MAX_S} s")

    def trace(self, device: str) -> Trace:
        """Return it as a trace of this device, without the lanes of messages."""
        intervals = (
            Interval(device=device, lane=lane, name=name, step=self.step, start_s=start_s, end_s=max(start_s, end_s))
            for lane, rows in (("compute", self.work), ("sum", self.sums))
            for name, start_s, end_s in rows
        )
        flows = (
            Flow(
                name=name,
                source=source,
                target=device,
                step=self.step,
                sent_s=sent_s,
                received_s=there_s,
                size_bytes=size_bytes,
            )
            for name, source, sent_s, there_s, size_bytes in self.messages
        )
        return Trace(intervals=tuple(intervals), flows=tuple(flows), clock="wall")
