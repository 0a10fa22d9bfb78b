"""One device's own adapter, during a step: it hears what is sent and what arrives, and may re-cut what has not begun.

SpanTrain 3.4 has caches that split tensors anew, or put them together, by a threshold on bandwidth. Here a device cuts
the micro-batches that it has not begun, up to the end of the step or until its links are calm again, and sends messages
in pieces. Those who receive need not know: samples are addressed, not messages.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from spantrain.adaptation.monitor import LinkExpectation, LinkMonitor, MonitorState, RateSample, SentMessage
from spantrain.adaptation.pace import PaceState, SamplePace
from spantrain.core.action import Direction, Op
from spantrain.core.messages import Event, Recut, StepStarted
from spantrain.core.span import Span
from spantrain.core.speed import LinkReport
from spantrain.schedule.dispatch.machine import DispatchPolicy


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """What one device's adapter knows between two steps; can be written as JSON and taken up again."""

    monitor: MonitorState = field(default_factory=lambda: MonitorState(peers={}))
    sending: Mapping[str, PaceState] = field(default_factory=dict)
    arriving: Mapping[str, PaceState] = field(default_factory=dict)
    """Both by direction."""
    action_s: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By operation: samples, and the least seconds that they took."""


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

    def received(self, direction: Direction, samples: int, now_s: float) -> None:
        """Take in that samples have come."""

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:
        """Return other micro-batches for what has not begun, if that pays."""

    def piece_samples(self, peer: str, samples: int) -> int:
        """Return how many of the samples that go to a peer may go in one message."""
        del peer
        return samples

    def reports(self) -> tuple[LinkReport, ...]:
        """Return what is known of the links; those that the step that runs has not used are idle."""
        return self.monitor.reports(self._begun_s)


class CuttingLocal(LocalAdapter):
    """Cuts what has not begun in as many parts as a rule says, and puts it together again when it says fewer."""

    _messages: int
    """Of which a link's pace is taken."""

    def __init__(
        self, expected: Mapping[str, LinkExpectation] | None, *, after: Collection[str], message_s: float
    ) -> None:
        """Take what links should do, who is of the next stage, and what a message takes whatever it holds."""
        super().__init__(expected)
        self._after = frozenset(after)
        self._message_s = message_s
        self._sending: dict[Direction, SamplePace] = {}
        """To all replicas of a neighbour together: they may share a line."""
        self._known_s: dict[Direction, float] = {}
        """When word of the last message came."""
        self._is_cut = self._is_looked_at = False
        """Whether micro-batches of this step have been cut; and whether as is wanted now."""
        self._was_calm = True
        """In all of this step so far."""

    def take_up(self, state: LocalState) -> None:
        """Go on from what was known: after a change of plan, or of a saved run."""
        super().take_up(state)
        self._sending = {Direction(direction): self._pace(kept) for direction, kept in state.sending.items()}

    def heard(self, now_s: float, event: Event) -> None:
        """Note that a step begins, with micro-batches as planned."""
        super().heard(now_s, event)
        if isinstance(event, StepStarted):
            for pace in self._paces:
                pace.begin_step(was_calm=self._was_calm)
            self._is_cut = self._is_looked_at = False
            self._was_calm = not self._is_slow

    def sent(self, message: SentMessage, samples: int) -> RateSample | None:
        """Note how long samples take of the way to a neighbour."""
        rate = super().sent(message, samples)
        if rate is not None and samples:
            direction, now_s = self._direction(message.peer), message.acknowledged_s
            occupied_s = min(rate.occupied_s, now_s - self._known_s.get(direction, -math.inf))
            self._known_s[direction] = max(now_s, self._known_s.get(direction, now_s))
            if occupied_s > 0:
                self._noted(self._sending.setdefault(direction, self._pace()), occupied_s, samples)
        return rate

    def _noted(self, pace: SamplePace, seconds: float, samples: int) -> None:
        """Take in how long samples took, and see what follows."""
        pace.note(seconds, samples)
        self._look()
        self._was_calm = self._was_calm and not self._is_slow

    def _direction(self, peer: str) -> Direction:
        """Return which way what goes to a peer goes."""
        return Direction.FORWARD if peer in self._after else Direction.BACKWARD

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:  # noqa: ARG002 - at any time
        """Return what has not begun in as many pieces as are wanted now, if it is not."""
        if self._is_looked_at or not (self._is_cut or self._wants_cuts):
            return None
        self._is_looked_at = True
        unbegun = frozenset(policy.unbegun)
        pieces = (piece for whole in policy.uncut for piece in _pieces(whole, self._parts(whole.size)))
        changed = tuple(piece for piece in pieces if piece not in unbegun)
        if not changed:
            return None
        self._is_cut = True
        return Recut(changed, self._reason)

    def _pace(self, state: PaceState | None = None) -> SamplePace:
        return SamplePace(state, messages=self._messages, message_s=self._message_s)

    @property
    def _paces(self) -> tuple[SamplePace, ...]:
        return tuple(self._sending.values())

    @abstractmethod
    def _look(self) -> None:
        """See what links do; where micro-batches are to be cut otherwise, say that they are not looked at."""

    @property
    @abstractmethod
    def _is_slow(self) -> bool:
        """Whether a link is slower than on calm links."""

    @property
    @abstractmethod
    def _wants_cuts(self) -> bool:
        """Whether anything is to be cut finer than planned."""

    @abstractmethod
    def _parts(self, samples: int) -> int:
        """Return how many parts a planned micro-batch is to be cut in."""

    @property
    @abstractmethod
    def _reason(self) -> str:
        """Why, in a line."""


def _pieces(whole: Span, parts: int) -> Iterator[Span]:
    """Yield so many pieces of a span, as equal as can be."""
    ends = [whole.lo + whole.size * part // parts for part in range(parts + 1)]
    yield from map(Span, ends[:-1], ends[1:])
