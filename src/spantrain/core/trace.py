"""What happened, or is predicted to happen, on each lane of each device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spantrain.core.action import Action

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


@dataclass(frozen=True, kw_only=True)
class Trace:
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
