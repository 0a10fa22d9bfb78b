"""One device's own adapter, during a step: it hears what is sent and what arrives, and re-cuts what has not begun.

SpanTrain 3.4 has caches that split and merge tensors by a threshold on bandwidth. Here a device that starves begins
with what has come of a micro-batch, if the link has become slower than it was and the work that is won is worth the
actions that come on top; and messages to a peer behind a slow link go in pieces, so that it can. Nothing happens on a
calm link.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from spantrain.core.action import Direction, Op
from spantrain.core.links import LinkReport
from spantrain.core.messages import Arrived, Event, Recut, StepStarted
from spantrain.core.spans import Span
from spantrain.policy.machine import DispatchPolicy
from spantrain.policy.monitor import LinkExpectation, LinkMonitor, MonitorState, RateSample, SentMessage

__all__ = ["SLOWER", "AutoLocal", "LocalAdapter", "LocalState", "Pace", "PaceState"]

SLOWER = 1.5
"""How many times the best pace seen a link's must be before a device does anything about it."""
_MESSAGES = 5
"""Of which a pace is the median."""
_WORTH = 1.5
"""What a re-cut wins must be so many times what it costs."""
_ACTIONS_MORE = 3
"""F, I and W of one more micro-batch."""
_UNKNOWN_PART = 0.1
"""Of an action's seconds: what does not depend on its samples, until two sizes have been seen."""


@dataclass(frozen=True, kw_only=True)
class PaceState:
    """What is kept of a pace."""

    last: tuple[float, ...] = ()
    """Seconds per sample of the last messages."""
    best_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """What one device's adapter knows between two steps; can be written as JSON and taken up again."""

    monitor: MonitorState = field(default_factory=lambda: MonitorState(peers={}))
    sending: Mapping[str, PaceState] = field(default_factory=dict)
    """By peer."""
    arriving: PaceState = field(default_factory=PaceState)
    forward_s: tuple[tuple[int, float], ...] = ()
    """Samples, and the least seconds of their forward."""


class Pace:
    """Seconds per sample: the present ones, and the best so far; each the median of five messages.

    >>> pace = Pace()
    >>> for seconds in (4.0, 4.0, 4.0, 4.0, 4.0, 12.0, 12.0, 12.0):
    ...     pace.note(seconds, 4)
    >>> pace.now_s, pace.slowness
    (3.0, 3.0)
    """

    def __init__(self, state: PaceState | None = None) -> None:
        """Begin with nothing known, or go on from a saved state."""
        state = state or PaceState()
        self._last = deque(state.last, maxlen=_MESSAGES)
        self.best_s = state.best_s

    @property
    def state(self) -> PaceState:
        """What is known now."""
        return PaceState(last=tuple(self._last), best_s=self.best_s)

    @property
    def now_s(self) -> float | None:
        """The present pace; None until enough messages went."""
        return median(self._last) if len(self._last) == _MESSAGES else None

    def note(self, seconds: float, samples: int) -> None:
        """Take in how long so many samples took."""
        self._last.append(seconds / samples)
        now_s = self.now_s
        if now_s:
            self.best_s = now_s if self.best_s is None else min(self.best_s, now_s)

    @property
    def slowness(self) -> float:
        """How many times as long as at best a sample takes now; 1 as long as nothing is known."""
        now_s = self.now_s
        return 1.0 if now_s is None or self.best_s is None else max(1.0, now_s / self.best_s)


class LocalAdapter:
    """Hears everything, does nothing but report: `off`."""

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None) -> None:
        self._expected = expected
        self.monitor = LinkMonitor(expected)
        self._begun_s = 0.0

    @property
    def state(self) -> LocalState:
        """What is known now, between two steps."""
        return LocalState(monitor=self.monitor.state)

    def take_up(self, state: LocalState) -> None:
        """Go on from what was known: after a change of plan, or of a saved run."""
        self.monitor = LinkMonitor.resumed(state.monitor, self._expected)

    def heard(self, now_s: float, event: Event) -> None:
        """Take in what the policy is told, before it is."""
        if isinstance(event, StepStarted):
            self._begun_s = now_s

    def finished(self, op: Op, samples: int, seconds: float) -> None:
        """Take in how long an action took."""

    def sent(self, message: SentMessage, samples: int) -> RateSample | None:
        """Take in that a peer has so many samples (0: what is none of the pipeline's); return what it tells."""
        del samples
        return self.monitor.sent(message)

    def received(self, direction: Direction, samples: int, seconds: float) -> None:
        """Take in how long it took from the first to the last byte of samples that came."""

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:
        """Return other micro-batches for what has not begun, if that pays."""

    def piece_samples(self, peer: str, samples: int) -> int:
        """Return how many of the samples that go to a peer may go in one message."""
        del peer
        return samples

    def reports(self) -> tuple[LinkReport, ...]:
        """Return what is known of the links; those that the step that runs has not used are idle."""
        return self.monitor.reports(self._begun_s)


class AutoLocal(LocalAdapter):
    """Begins with what has come where a slow link makes it wait, and sends in pieces over slow links."""

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None, *, overhead_s: float = 1e-3) -> None:
        super().__init__(expected)
        self._overhead_s = overhead_s
        self._sending: dict[str, Pace] = {}
        self._arriving = Pace()
        self._arrived_s: float | None = None
        self._forward_s: dict[int, float] = {}

    @property
    def state(self) -> LocalState:
        """What is known now, between two steps."""
        return LocalState(
            monitor=self.monitor.state,
            sending={peer: pace.state for peer, pace in self._sending.items()},
            arriving=self._arriving.state,
            forward_s=tuple(sorted(self._forward_s.items())),
        )

    def take_up(self, state: LocalState) -> None:
        """Go on from what was known: after a change of plan, or of a saved run."""
        super().take_up(state)
        self._sending = {peer: Pace(kept) for peer, kept in state.sending.items()}
        self._arriving = Pace(state.arriving)
        self._forward_s = dict(state.forward_s)

    def heard(self, now_s: float, event: Event) -> None:
        """Note when the last samples of forwards came."""
        super().heard(now_s, event)
        if isinstance(event, StepStarted):
            self._arrived_s = None
        elif isinstance(event, Arrived) and event.direction is Direction.FORWARD:
            self._arrived_s = now_s

    def received(self, direction: Direction, samples: int, seconds: float) -> None:
        """Note how fast forwards' samples come over the link."""
        if direction is Direction.FORWARD and seconds > 0:
            self._arriving.note(seconds, samples)

    def finished(self, op: Op, samples: int, seconds: float) -> None:
        """Note how long forwards take."""
        if op is Op.FORWARD:
            self._forward_s[samples] = min(seconds, self._forward_s.get(samples, seconds))

    def sent(self, message: SentMessage, samples: int) -> RateSample | None:
        """Note how long samples take of the link to a peer."""
        rate = super().sent(message, samples)
        if rate is not None and samples:
            self._sending.setdefault(message.peer, Pace()).note(rate.occupied_s, samples)
        return rate

    def piece_samples(self, peer: str, samples: int) -> int:
        """Return half of them where the link has become slow, a quarter where it has become very slow."""
        pace = self._sending.get(peer)
        if pace is None or pace.slowness < SLOWER:
            return samples
        parts = 2 if pace.slowness < 2 * SLOWER else 4
        return max(1, -(-samples // parts))

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:
        """Return what has come of the oldest micro-batch, and its rest."""
        starved = policy.starved_of
        if starved is None or self._arriving.slowness < SLOWER or self._arrived_s is None:
            return None
        span, there = starved
        pace_s = self._arriving.now_s
        if not 0 < there < span.size or pace_s is None:
            return None
        wait_s = max(0.0, self._arrived_s + (span.size - there) * pace_s - now_s)
        won_s = min(wait_s, self._action_s(there))
        lost_s = _ACTIONS_MORE * (self._overhead_s + self._fixed_s())
        if won_s < _WORTH * lost_s:
            return None
        reason = (
            f"samples come {self._arriving.slowness:.1f} times slower than at best: F of the {there} that are there "
            f"wins {won_s * 1e3:.1f} ms and costs {lost_s * 1e3:.1f} ms"
        )
        return Recut((Span(span.lo, span.lo + there), Span(span.lo + there, span.hi)), reason)

    def _action_s(self, samples: int) -> float:
        """Return the seconds of F of so many samples, from the sizes that have run; 0 if none has."""
        if not self._forward_s:
            return 0.0
        fixed_s = self._fixed_s()
        size, seconds = max(self._forward_s.items())
        return fixed_s + max(0.0, seconds - fixed_s) * samples / size

    def _fixed_s(self) -> float:
        """Return the part of F that does not depend on its samples."""
        if not self._forward_s:
            return 0.0
        small, large = min(self._forward_s.items()), max(self._forward_s.items())
        if small[0] == large[0]:
            return _UNKNOWN_PART * large[1]
        per_sample_s = (large[1] - small[1]) / (large[0] - small[0])
        return min(small[1], max(0.0, small[1] - per_sample_s * small[0]))
