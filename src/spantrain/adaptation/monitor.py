"""What a sender learns of its links from the messages that it sends anyway; no clock, no probe, no other side's time.

Messages to a peer go out in turn, so the last byte of one leaves no earlier than that of the one before. What one took
of the link is the time from the peer's word on the message before, or from its own start and a round trip if that is
later, to the peer's word on it. Words may come in bunches, so the rate is the median, by bytes, of some runs of
messages: a pause of the link spoils one run, however long it was.
(SpanTrain 3.4 has forward and backward monitors of bandwidth and of a micro-batch's sending time, and compares with one
threshold; kept is what is watched.)
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from spantrain.core.records import Record
from spantrain.core.speed import LinkReport, LinkVerdict, SentMessage

_WINDOW = 64
"""Messages that are kept."""
_USUAL, _ENOUGH = 12, 4
"""A rate is found from the last so many where a step has had fewer than the second."""
_AGREES = 1.25
"""Samples within this factor of the median agree with it."""
_SLOW, _CALM_AGAIN = 0.8, 0.9
"""Parts of what is expected: a link under the first is slow, and calm again over the second."""
_SIZES, _UNLIKE = 8, 1.5
"""Sizes whose fastest message is kept; sizes at least so many times as large tell a round trip from a rate."""
_SMALL_IN_A_ROW = 32
"""Small messages in a row that are the usual ones now: the large ones before were something else, as a plan's units."""
_MIN_S = 1e-6
_MIN_PART = 0.1
"""The part of a message's time since it, or the one before, was under way, that it has taken of the link at least."""


class LinkExpectation(Record):
    """What a link should do."""

    bytes_per_s: float
    round_trip_s: float = 0.0


class RateSample(Record):
    """What one message tells of its link."""

    size_bytes: int
    acknowledged_s: float
    occupied_s: float
    """For how long the link was busy with it."""
    queued_s: float
    """How long it waited before its first byte left."""
    held_back_s: float
    """The part of that in which nothing of ours was on the wire."""


class LinkMonitor:
    """Hears what was sent and says how the links do.

    >>> monitor = LinkMonitor({"b": LinkExpectation(bytes_per_s=1e6)})
    >>> for k in range(4):
    ...     at_s = 2.0 * k
    ...     _ = monitor.sent(SentMessage(
    ...         peer="b", size_bytes=10**6, queued_s=at_s, started_s=at_s, acknowledged_s=at_s + 2.0))
    >>> report, = monitor.reports()
    >>> report.bytes_per_s, str(report.verdict), report.confidence
    (500000.0, 'slow-link', 1.0)
    """

    def __init__(self, expected: Mapping[str, LinkExpectation] | None = None) -> None:
        self._expected = dict(expected or {})
        self._peers: dict[str, _Peer] = {}

    def take_up(self, last: "LinkMonitor", *, same_messages: bool) -> None:
        """Go on from what another monitor knew, which is not used any more.

        Bytes per second are the same under any plan. What messages of unlike sizes told of a round trip is found anew
        where messages are others.
        """
        self._peers = last._peers
        for name, peer in self._peers.items():
            peer.expected = self._expected.get(name)
            if not same_messages:
                peer.fastest.clear()

    def sent(self, message: SentMessage) -> RateSample | None:
        """Take in a message, in the order of the peers' words; return what it tells of its link's rate, if anything."""
        peer = self._peers.get(message.peer)
        if peer is None:
            peer = self._peers[message.peer] = _Peer(self._expected.get(message.peer))
        return peer.sent(message)

    def reports(self, since_s: float = -math.inf) -> tuple[LinkReport, ...]:
        """Return what is known of each peer, by name; one that was sent nothing since then is idle."""
        return tuple(self._peers[name].report(name, since_s) for name in sorted(self._peers))


class _Peer:
    def __init__(self, expected: LinkExpectation | None) -> None:
        self.expected = expected
        self.fastest: dict[int, float] = {}
        """Messages that had the link to themselves: bytes, and the least seconds from start to word."""
        self._samples: deque[RateSample] = deque(maxlen=_WINDOW)
        self._round_trip_s: float | None = None
        self._acknowledged_s: float | None = None
        """When the last word came."""
        self._slow = False
        self._small_in_a_row = 0

    def sent(self, message: SentMessage) -> RateSample | None:
        taken_s = message.acknowledged_s - message.started_s
        before_s = message.queued_s if self._acknowledged_s is None else self._acknowledged_s
        self._acknowledged_s = max(before_s, message.acknowledged_s)
        if self._is_small(message):
            known_s = self._round_trip_s
            self._round_trip_s = taken_s if known_s is None else min(known_s, taken_s)
            return None
        if message.started_s >= before_s:  # it had the link to itself; the least and the most bytes tell most
            self.fastest[message.size_bytes] = min(taken_s, self.fastest.get(message.size_bytes, taken_s))
            if len(self.fastest) > _SIZES:
                del self.fastest[sorted(self.fastest)[_SIZES // 2]]
        begun_s = max(before_s, message.started_s + self._latency_s)
        alone_s = message.acknowledged_s - max(before_s, message.started_s)
        sample = RateSample(
            size_bytes=message.size_bytes,
            acknowledged_s=message.acknowledged_s,
            occupied_s=max(message.acknowledged_s - begun_s, _MIN_PART * alone_s, _MIN_S),
            queued_s=message.started_s - message.queued_s,
            held_back_s=max(0.0, message.started_s - max(message.queued_s, before_s)),
        )
        self._samples.append(sample)
        return sample

    def _is_small(self, message: SentMessage) -> bool:
        """Whether a message tells of latency rather than of the rate: far smaller than what is usual."""
        if message.size_bytes == 0:
            return True
        usual = max((sample.size_bytes for sample in self._samples), default=0)
        if message.size_bytes * 16 < usual:
            self._small_in_a_row += 1
            if self._small_in_a_row < _SMALL_IN_A_ROW:
                return True
            self._samples.clear()
            self.fastest.clear()
            self._round_trip_s = None
        self._small_in_a_row = 0
        return False

    @property
    def _latency_s(self) -> float:
        """Seconds of a round trip: as expected, or more where messages of unlike sizes, or small ones, say so."""
        known_s = self.expected.round_trip_s if self.expected else 0.0
        if not self.fastest:
            return known_s
        (small, short_s), (large, long_s) = min(self.fastest.items()), max(self.fastest.items())
        fitted_s = 0.0
        if large >= _UNLIKE * small and long_s > short_s:
            fitted_s = short_s - small * (long_s - short_s) / (large - small)
        least_s = min(short_s, long_s)
        return min(max(known_s, fitted_s, self._round_trip_s or 0.0), (1 - _MIN_PART) * least_s)

    def report(self, name: str, since_s: float) -> LinkReport:
        idle = self._acknowledged_s is None or self._acknowledged_s < since_s
        recent = [sample for sample in self._samples if sample.acknowledged_s >= since_s]
        # A few are filled up with those of before; where there are none at all, old ones say nothing of the link now.
        enough = len(recent) >= _ENOUGH or not recent
        samples = [] if idle else recent if enough else list(self._samples)[-_USUAL:]
        # About four runs of messages: words on several may come together.
        size = max(1, len(samples) // _ENOUGH)
        runs = (samples[k : k + size] for k in range(0, len(samples), size))
        blocks = [(sum(one.size_bytes for one in run), sum(one.occupied_s for one in run)) for run in runs]
        rate = _median(blocks) if blocks else None
        agreeing = sum(rate is not None and rate / _AGREES <= s / t <= rate * _AGREES for s, t in blocks)
        return LinkReport(
            peer=name,
            verdict=self._verdict(rate, samples),
            bytes_per_s=rate,
            latency_s=self._round_trip_s,
            queued_s=max((sample.queued_s for sample in samples), default=0.0),
            busy_s=sum(sample.occupied_s for sample in recent),
            messages=len(recent),
            confidence=agreeing / max(len(blocks), _ENOUGH),
            newest_bytes_per_s=blocks[-1][0] / blocks[-1][1] if len(recent) >= _ENOUGH and not idle else None,
        )

    def _verdict(self, rate: float | None, samples: Sequence[RateSample]) -> LinkVerdict:
        if rate is None:
            return LinkVerdict.IDLE
        if sum(s.held_back_s for s in samples) > sum(s.occupied_s for s in samples):
            return LinkVerdict.SLOW_PEER
        if self.expected is None:
            return LinkVerdict.CALM
        self._slow = rate < (_CALM_AGAIN if self._slow else _SLOW) * self.expected.bytes_per_s
        return LinkVerdict.SLOW_LINK if self._slow else LinkVerdict.CALM


def _median(blocks: Sequence[tuple[int, float]]) -> float:
    """Return the rate that half of the bytes went faster than."""
    ordered = sorted((size / seconds, size) for size, seconds in blocks)
    passed = list(accumulate(size for _, size in ordered))
    return next(rate for (rate, _), so_far in zip(ordered, passed, strict=True) if so_far >= passed[-1] / 2)


class SamplePace:
    """Seconds per sample, the median of the last messages; each counts without what a message takes whatever it holds.

    A link that several devices share is faster while few of them send, so the best pace of all would make every busy
    moment look slow. What is compared with is the slowest moment of the step in which that was fastest.

    >>> pace = SamplePace(messages=5)
    >>> for seconds in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
    ...     pace.note(4 * seconds, 4)
    >>> pace.begin_step()
    >>> for _ in range(3):
    ...     pace.note(24.0, 4)
    >>> pace.now_s, pace.slowness
    (6.0, 3.0)
    """

    def __init__(self, *, messages: int, message_s: float = 0.0) -> None:
        """Take the pace of so many messages, each of which takes `message_s` besides its samples."""
        self._last_s: deque[float] = deque(maxlen=messages)
        """Seconds per sample of the last messages."""
        self._message_s = message_s
        self._slowest_s: float | None = None
        """The slowest pace of this step so far."""
        self._calm_s: float | None = None
        """The slowest pace of the calmest step."""

    def begin_anew(self) -> None:
        """Forget the present pace, which is of other messages, but not what is calm."""
        self._last_s.clear()
        self._slowest_s = None

    @property
    def now_s(self) -> float | None:
        """The present pace; None until enough messages went."""
        return median(self._last_s) if len(self._last_s) == self._last_s.maxlen else None

    def begin_step(self, *, was_calm: bool = True) -> None:
        """Take in that a step is over, and whether it may tell what is calm.

        What a slow link lets through comes evenly, and what work lets through by fits and starts: the slowest moment of
        a slow step may be faster than that of a calm one.
        """
        if self._slowest_s is not None and was_calm:
            self._calm_s = min(self._slowest_s, self._calm_s or self._slowest_s)
        self._slowest_s = None

    def note(self, seconds: float, samples: int) -> None:
        """Take in how long so many samples took: more than nothing."""
        self._last_s.append(max(seconds - self._message_s, seconds / 2) / samples)
        now_s = self.now_s
        if now_s is not None:
            self._slowest_s = max(now_s, self._slowest_s or 0.0)

    @property
    def slowness(self) -> float:
        """How many times as long as in the slowest moment of a calm step a sample takes; 1 as long as none is known."""
        now_s = self.now_s
        return 1.0 if now_s is None or self._calm_s is None else max(1.0, now_s / self._calm_s)
