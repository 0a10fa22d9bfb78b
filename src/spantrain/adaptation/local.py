"""One device's own adapter, during a step: it hears what is sent and what arrives, and may re-cut what has not begun.

SpanTrain 3.4 has caches that split tensors anew, or put them together, by a threshold on bandwidth. Here a device cuts
the micro-batches that it has not begun, up to the end of the step or until its links are calm again, and sends messages
in pieces. Those who receive need not know: samples are addressed, not messages.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Self

from spantrain.adaptation.monitor import LinkExpectation, LinkMonitor, RateSample, SamplePace
from spantrain.core.action import Direction, Op
from spantrain.core.messages import Event, Recut, StepStarted
from spantrain.core.span import Span
from spantrain.core.speed import LinkReport, SentMessage
from spantrain.schedule.dispatch.machine import DispatchMachine

_OVERHEAD_S = 1e-3
"""What an action or a message takes of the runtime, whatever it holds."""


class LocalAdapter:
    """Hears everything, does nothing but report: `off`."""

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None) -> None:
        self.monitor = LinkMonitor(expected)
        self._begun_s = 0.0

    def take_up(self, last: Self, *, same_messages: bool, same_work: bool) -> None:
        """Go on between two steps from what another one knew, which is not used any more: after a change of plan.

        Seconds of samples are still true where a sample's work is the same (`same_work`). What was found of the
        messages themselves is true where those are the same, too.
        """
        del same_work
        self.monitor.take_up(last.monitor, same_messages=same_messages)

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

    def recut(self, now_s: float, policy: DispatchMachine) -> Recut | None:
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
    """How many messages a link's pace is taken of."""

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None, *, after: Collection[str] = ()) -> None:
        """Take what links should do, and who is of the next stage."""
        super().__init__(expected)
        self._after = frozenset(after)
        self._sending: dict[Direction, SamplePace] = {}
        """The pace to all replicas of a neighbour together: they may share a line."""
        self._known_s: dict[Direction, float] = {}
        """When word of the last message came."""
        self._is_cut = self._is_looked_at = False
        """Whether micro-batches of this step have been cut; and whether as is wanted now."""
        self._was_calm = True
        """In all of this step so far."""

    def take_up(self, last: Self, *, same_messages: bool, same_work: bool) -> None:
        """Go on with the paces as well."""
        super().take_up(last, same_messages=same_messages, same_work=same_work)
        if same_work:
            self._sending = last._sending
        for pace in self._paces if not same_messages else ():
            pace.begin_anew()
        self._look()

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
                self._noted(self._sending, direction, occupied_s, samples)
        return rate

    def _noted(self, paces: dict[Direction, SamplePace], direction: Direction, seconds: float, samples: int) -> None:
        """Take in how long samples took, and see what follows."""
        new = SamplePace(messages=self._messages, message_s=_OVERHEAD_S)
        paces.setdefault(direction, new).note(seconds, samples)
        self._look()
        self._was_calm = self._was_calm and not self._is_slow

    def _direction(self, peer: str) -> Direction:
        """Return which way what goes to a peer goes."""
        return Direction.FORWARD if peer in self._after else Direction.BACKWARD

    def recut(self, now_s: float, policy: DispatchMachine) -> Recut | None:  # noqa: ARG002 - at any time
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
    def _wants_cuts(self) -> bool:
        """Whether anything is to be cut finer than planned."""
        return self._is_slow

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


_SLOW, _CALM_AGAIN = 1.25, 1.15
"""Times the calm pace: a link whose samples take longer than the first is slow, and calm again at the second."""
_TOO_FINE = 1.1
"""Micro-batches are made coarser again where their work takes so many times as long as a link's."""
_PARTS, _MORE_PARTS = 2, 4
"""Messages to a peer behind a slow link go in so many pieces, or in more where it is very slow."""
_VERY_SLOW = 3.0
_WORTH = 1.5
"""What a device that starves wins by beginning must be so many times what it costs."""
_ACTIONS_MORE = 3
"""F, I and W of one more micro-batch."""
_UNKNOWN_PART = 0.1
"""The part of an action's seconds that does not depend on its samples, until two sizes have been seen."""
_INSTEAD = {
    Op.BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT),
    Op.BACKWARD_INPUT: (Op.BACKWARD,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD,),
}
"""Operations that a replica that does one does not do."""
_EVEN = 1e-9
"""Rounding, in samples."""


class AutoLocal(CuttingLocal):
    """Cuts finer what has not begun while a link is slow, as long as work does not become what is waited for; begins
    with what has come where it starves; sends in pieces over slow links.

    Where links are the limit, a step is longer by what they carry while the pipeline fills and drains, which goes with
    the size of micro-batches. What finer ones cost, the fixed seconds of their actions, is free as long as a sample's
    work takes less than its way. Where work is the limit it is not: a device that starves compares.
    """

    _messages = 5

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None, *, after: Collection[str] = ()) -> None:
        """Take what links should do, and who is of the next stage."""
        super().__init__(expected, after=after)
        self._arriving: dict[Direction, SamplePace] = {}
        self._came_s: dict[Direction, float] = {}
        """When the last samples of this step came."""
        self._action_s: dict[Op, dict[int, float]] = {}
        """By operation: samples, and the least seconds that they took."""
        self._slow_s: float | None = None
        """Seconds of a sample on the slowest link; None: none is slow."""
        self._least: int | None = None
        """Samples of a micro-batch, so that its work takes no longer than a link; None: as planned."""

    def take_up(self, last: Self, *, same_messages: bool, same_work: bool) -> None:
        """Go on with what arrives and with the seconds of actions, too."""
        if same_work:
            self._arriving, self._action_s = last._arriving, last._action_s
        super().take_up(last, same_messages=same_messages, same_work=same_work)

    def heard(self, now_s: float, event: Event) -> None:
        """Note that nothing has come yet in a step that begins."""
        super().heard(now_s, event)
        if isinstance(event, StepStarted):
            self._came_s = {}

    def received(self, direction: Direction, samples: int, now_s: float) -> None:
        """Note how fast samples come, whatever they have waited for: the slow link may be far away."""
        before_s = self._came_s.get(direction, now_s)
        self._came_s[direction] = now_s
        if now_s > before_s:
            self._noted(self._arriving, direction, now_s - before_s, samples)

    def finished(self, op: Op, samples: int, seconds: float) -> None:
        """Note how long actions take."""
        for other in _INSTEAD.get(op, ()):
            self._action_s.pop(other, None)
        known = self._action_s.setdefault(op, {})
        known[samples] = min(seconds, known.get(samples, seconds))

    def piece_samples(self, peer: str, samples: int) -> int:
        """Return half of them where the link has become slow, a quarter where it has become very slow; or fewer, where
        micro-batches are cut finer than that.
        """
        pace = self._sending.get(self._direction(peer))
        if pace is None or pace.slowness < _SLOW:
            return samples
        parts = _PARTS if pace.slowness < _VERY_SLOW else _MORE_PARTS
        return min(self._least or samples, -(-samples // parts))

    def recut(self, now_s: float, policy: DispatchMachine) -> Recut | None:
        """Return what has not begun as fine as links let work be; else what has come of the oldest, and its rest."""
        return super().recut(now_s, policy) or self._what_has_come(now_s, policy)

    def _what_has_come(self, now_s: float, policy: DispatchMachine) -> Recut | None:
        starved = policy.starved_of if self._slow_s is not None and self._least is None else None
        pace = self._arriving.get(Direction.FORWARD)
        if starved is None or pace is None or pace.now_s is None or Op.FORWARD not in self._action_s:
            return None
        span, there = starved
        if not 0 < there < span.size:
            return None
        comes_s = self._came_s.get(Direction.FORWARD, now_s) + (span.size - there) * pace.now_s
        fixed_s, sample_s = _line_of(self._action_s[Op.FORWARD])
        won_s = min(max(0.0, comes_s - now_s), fixed_s + there * sample_s)
        lost_s = _ACTIONS_MORE * (_OVERHEAD_S + fixed_s)
        if won_s < _WORTH * lost_s:
            return None
        self._is_cut = True
        reason = (
            f"samples come every {pace.now_s * 1e3:.1f} ms over slow links: F of the {there} that are there wins "
            f"{won_s * 1e3:.1f} ms and costs {lost_s * 1e3:.1f} ms"
        )
        return Recut((Span(span.lo, span.lo + there), Span(span.lo + there, span.hi)), reason)

    @property
    def _paces(self) -> tuple[SamplePace, ...]:
        return (*self._sending.values(), *self._arriving.values())

    def _look(self) -> None:
        slow = _SLOW if self._slow_s is None else _CALM_AGAIN
        found = [pace.now_s for pace in self._paces if pace.slowness >= slow]
        self._slow_s = max((seconds for seconds in found if seconds is not None), default=None)
        least = None if self._slow_s is None or not self._action_s else self._least_of(self._slow_s)
        if least != self._least:
            self._least, self._is_looked_at = least, False

    @property
    def _is_slow(self) -> bool:
        return self._slow_s is not None

    @property
    def _wants_cuts(self) -> bool:
        return self._least is not None

    def _parts(self, samples: int) -> int:
        return max(1, samples // (self._least or samples))

    @property
    def _reason(self) -> str:
        if self._least is None or self._slow_s is None:
            return "links are calm again, or work takes longer than they do"
        return (
            f"a sample takes {self._slow_s * 1e3:.1f} ms of a slow link, its work in micro-batches of {self._least} "
            f"{self._work_s(self._least) * 1e3:.1f} ms"
        )

    def _least_of(self, link_s: float) -> int | None:
        """Return the samples of the finest micro-batches whose work takes no longer than so many seconds a sample."""
        fixed_s, sample_s = self._fixed_and_sample_s()
        if self._least is not None and self._work_s(self._least) <= _TOO_FINE * link_s:
            link_s = max(link_s, self._work_s(self._least))
        return max(1, math.ceil(fixed_s / (link_s - sample_s) - _EVEN)) if link_s > sample_s else None

    def _work_s(self, samples: int) -> float:
        """Return the seconds of a sample's work in micro-batches of so many."""
        fixed_s, sample_s = self._fixed_and_sample_s()
        return fixed_s / samples + sample_s

    def _fixed_and_sample_s(self) -> tuple[float, float]:
        """Return what all actions on a micro-batch take whatever it holds, and what they take for each sample."""
        lines = [_line_of(known) for known in self._action_s.values()]
        return sum(fixed_s + _OVERHEAD_S for fixed_s, _ in lines), sum(sample_s for _, sample_s in lines)


def _line_of(known: Mapping[int, float]) -> tuple[float, float]:
    """Return what an action takes whatever it holds, and for each sample, by the seconds of numbers of samples."""
    (few, short_s), (many, long_s) = min(known.items()), max(known.items())
    if few == many:
        return _UNKNOWN_PART * long_s, (1 - _UNKNOWN_PART) * long_s / many
    sample_s = max(0.0, min(short_s / few, (long_s - short_s) / (many - few)))
    return short_s - few * sample_s, sample_s
