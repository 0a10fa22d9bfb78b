"""The sending side of one peer: a queue with lanes, credit, and everything that is not acknowledged yet.

Pure state, no sockets. Two tracks number their messages on their own: small messages (express) and large ones (bulk).
Within a track, one message of each lane is under way at a time, and lanes take turns chunk by chunk. A message starts
only when the peer's credit covers all of it, so that messages under way together can always be completed.

Messages of background lanes start when no others wait on their track, and between two of their chunks others go first.
They have a small queue of their own, so that what is in it never makes others wait for room.

How many bytes may be on their way to a peer: what the link takes while the quickest answer comes, and a little more.

More would only wait in queues before the link. There it delays all that comes later, the word of what has come
included, and what finds a queue full is lost. The rate is the largest that was seen of late, of each message from the
word before it left to the word that it has come; as in Cardwell et al., "BBR: congestion-based congestion control",
2016, which this is a plain form of, for whole messages and above TCP. The quickest answer too is of late only: ways
change. It is looked for among those that hardly waited in our own queue, else what waits would be taken for the way's
length and ever more would wait; where a link is never idle, next to nothing is sent now and then until one has come.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from spantrain.core.messages import BACKGROUND, AnyKey
from spantrain.transport.mailbox import wire

_FIRST_BYTES = 64 * 1024
"""Before anything is known: a message or two on a slow link, and soon enough known on a fast one."""
_SLACK_S = 0.2
"""Over the quickest answer: room for answers that come late, and to find out that there is more."""
_OF_LATE_S = 3.0
_OF_LATE_ANSWERS = 2.0
"""A rate is of late for so many seconds, and for so many answers: nothing is learnt while one is awaited."""
_ANSWER_OF_LATE_S = 20.0
_DRAINED_EVERY_S = 10.0
_DRAINED_EVERY_ANSWERS = 30.0
"""So often, in seconds or answers, one is wanted that did not wait behind more than one other message."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known when a message left."""

    done_bytes: int
    since_s: float
    drained: bool
    """Whether at most one other message was on its way."""


class Pace:
    """Learns from what leaves and what is answered. Times are of any one clock.

    >>> pace = Pace()
    >>> mark = pace.left(0.0, others=0)
    >>> pace.room_bytes
    65536
    >>> pace.came(0.5, 50_000, left_s=0.0, mark=mark)
    >>> pace.room_bytes
    70000
    """

    def __init__(self) -> None:
        self._done_bytes = 0
        self._heard_s = 0.0
        self._rates: deque[tuple[float, float]] = deque()
        """Rates of late: when, and bytes per second; falling, so that the first is the largest."""
        self._answers: deque[tuple[float, float]] = deque()
        """Answers of late: when, and seconds to one that hardly waited; rising, so that the first is the quickest."""

    @property
    def room_bytes(self) -> int:
        """What may be on its way; 0 while the link is to run empty for an answer that did not wait."""
        if not self._rates:
            return _FIRST_BYTES
        answer_s = self._answers[0][1]
        if self._heard_s - self._answers[-1][0] > max(_DRAINED_EVERY_S, _DRAINED_EVERY_ANSWERS * answer_s):
            return 0
        return int(self._rates[0][1] * (answer_s + _SLACK_S))

    def left(self, now_s: float, *, others: int) -> Mark:
        """Note that a message leaves, with so many others on their way; return what to keep with it."""
        return Mark(self._done_bytes, now_s if others == 0 else self._heard_s, others <= 1)

    def came(self, now_s: float, size_bytes: int, *, left_s: float, mark: Mark) -> None:
        """Note the word that a message has come."""
        self._done_bytes += size_bytes
        self._heard_s = now_s
        if mark.drained or not self._answers:
            self._learn_answer(now_s, now_s - left_s)
        if now_s > mark.since_s:
            self._learn_rate(now_s, (self._done_bytes - mark.done_bytes) / (now_s - mark.since_s))

    def _learn_answer(self, now_s: float, answer_s: float) -> None:
        while self._answers and self._answers[-1][1] >= answer_s:
            self._answers.pop()
        self._answers.append((now_s, answer_s))
        while self._answers[0][0] < now_s - _ANSWER_OF_LATE_S:
            self._answers.popleft()

    def _learn_rate(self, now_s: float, rate: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        while self._rates[0][0] < now_s - max(_OF_LATE_S, _OF_LATE_ANSWERS * self._answers[0][1]):
            self._rates.popleft()


_MAX_UNDER_WAY = 8
_FEWEST_AWAY = 2
"""So many messages of a track may always be on their way."""


@dataclass(kw_only=True, eq=False)
class OutgoingMessage:
    """One message on its way out."""

    header: wire.Header
    """Of when it was queued."""
    header_bytes: bytes
    payload: wire.Payload
    track: int = field(init=False)
    order: int = 0
    """Its turn in the queue."""
    number: int = 0
    """Given when it starts for the first time, so that a message dropped before leaves no gap."""
    next_chunk: int = 0
    started_s: float | None = None
    mark: Mark | None = None
    """Since it started."""

    def __post_init__(self) -> None:
        self.track = wire.EXPRESS if self.header.payload_bytes <= wire.EXPRESS_BYTES else wire.BULK

    @property
    def yields(self) -> bool:
        """Whether it lets others go first."""
        return self.header.key.lane.startswith(BACKGROUND)

    @classmethod
    def pack(
        cls, key: AnyKey, tensors: Sequence[torch.Tensor], max_message_bytes: int, now_s: float
    ) -> "OutgoingMessage":
        """Describe tensors for sending; they are not copied.

        Raises:
            ValueError: the message breaks a limit.
        """
        header = wire.header_of(key, tensors, now_s)
        if header.payload_bytes > max_message_bytes:
            raise ValueError(f"{key}: {header.payload_bytes} bytes, at most {max_message_bytes} are allowed; split it")
        return cls(header=header, header_bytes=wire.encode_header(header), payload=wire.Payload(header, tensors))

    @property
    def offset(self) -> int:
        """Where its next chunk begins."""
        return self.next_chunk * wire.CHUNK_BYTES

    @property
    def length(self) -> int:
        """How long its next chunk is."""
        return min(wire.CHUNK_BYTES, self.header.payload_bytes - self.offset)

    @property
    def finished(self) -> bool:
        """Whether every chunk was handed to a connection."""
        return self.next_chunk > 0 and self.offset >= self.header.payload_bytes


class _Track:
    """Messages that share a sequence of numbers."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[OutgoingMessage]] = {}
        self.under_way: OrderedDict[str, OutgoingMessage] = OrderedDict()
        self.unacknowledged: dict[int, OutgoingMessage] = {}
        self.next_number = 1
        self.next_order = 0
        self._pace = Pace()
        self._away_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether as much is on the way as the link takes at once."""
        return len(self.unacknowledged) >= _FEWEST_AWAY and self._away_bytes >= self._pace.room_bytes

    def startable(self) -> OutgoingMessage | None:
        """Return the oldest message whose lane is free."""
        first = next(iter(self.unacknowledged), self.next_number)
        if len(self.under_way) >= _MAX_UNDER_WAY or self.next_number >= first + wire.MAX_AHEAD:
            return None
        heads = (queue[0] for lane, queue in self.waiting.items() if lane not in self.under_way)
        found = min(heads, key=lambda outgoing: (outgoing.yields, outgoing.order), default=None)
        if found is not None and found.yields and any(not one.yields for one in self.under_way.values()):
            return None
        return found

    def enqueue(self, outgoing: OutgoingMessage) -> None:
        self.waiting.setdefault(outgoing.header.key.lane, deque()).append(outgoing)

    def unqueue(self, outgoing: OutgoingMessage) -> None:
        queue = self.waiting[outgoing.header.key.lane]
        queue.remove(outgoing)
        if not queue:
            del self.waiting[outgoing.header.key.lane]

    def start(self, outgoing: OutgoingMessage, now_s: float) -> None:
        self.unqueue(outgoing)
        self.under_way[outgoing.header.key.lane] = outgoing
        if outgoing.started_s is None:
            outgoing.started_s = now_s
            outgoing.mark = self._pace.left(now_s, others=len(self.unacknowledged))
            outgoing.number = self.next_number
            self.next_number += 1
            self.unacknowledged[outgoing.number] = outgoing
            self._away_bytes += outgoing.header.payload_bytes

    def settle(self, outgoing: OutgoingMessage, now_s: float) -> None:
        """Forget a message that the peer has."""
        assert outgoing.started_s is not None
        assert outgoing.mark is not None
        del self.unacknowledged[outgoing.number]
        self._away_bytes -= outgoing.header.payload_bytes
        self._pace.came(now_s, outgoing.header.payload_bytes, left_s=outgoing.started_s, mark=outgoing.mark)

    def restart(self) -> None:
        fresh = [outgoing for queue in self.waiting.values() for outgoing in queue if not outgoing.number]
        self.waiting.clear()
        self.under_way.clear()
        for outgoing in self.unacknowledged.values():
            outgoing.next_chunk = 0
        for outgoing in (*self.unacknowledged.values(), *fresh):
            self.enqueue(outgoing)


class Outbox:
    """Messages for one peer that it has not acknowledged."""

    def __init__(self) -> None:
        self._tracks = (_Track(), _Track())
        self._granted_bytes = 0
        self._started_bytes = 0
        self._held_bytes = {False: 0, True: 0}

    def held_bytes(self, *, yields: bool) -> int:
        """Return the bytes of all messages that are held of one sort, to be compared with the limit of its queue."""
        return self._held_bytes[yields]

    def offer(self, outgoing: OutgoingMessage) -> None:
        """Take a message."""
        track = self._tracks[outgoing.track]
        outgoing.order = track.next_order
        track.next_order += 1
        track.enqueue(outgoing)
        self._held_bytes[outgoing.yields] += outgoing.header.charge_bytes

    def peek(self, track_index: int, now_s: float) -> OutgoingMessage | None:
        """Return the message whose chunk is to be sent next on a track, if credit allows one."""
        track = self._tracks[track_index]
        while (outgoing := track.startable()) is not None:
            if self._started_bytes + outgoing.header.charge_bytes > self._granted_bytes:
                break
            # What begins again on a new link has its number, and does not wait for itself.
            if not outgoing.number and track.is_full:
                break
            self._started_bytes += outgoing.header.charge_bytes
            track.start(outgoing, now_s)
        return min(track.under_way.values(), key=lambda one: one.yields, default=None)

    def advance(self, outgoing: OutgoingMessage) -> None:
        """Note that the chunk of a peeked message was handed over; the next lane has its turn."""
        track = self._tracks[outgoing.track]
        outgoing.next_chunk += 1
        if outgoing.finished:
            del track.under_way[outgoing.header.key.lane]
        else:
            track.under_way.move_to_end(outgoing.header.key.lane)

    def acknowledge(self, done: wire.DoneNumbers, granted_bytes: int, now_s: float) -> list[OutgoingMessage]:
        """Forget the messages that the peer has, take its credit, and return those messages."""
        self._granted_bytes = max(self._granted_bytes, granted_bytes)
        return [
            outgoing for index, (upto, later) in enumerate(done) for outgoing in self._settle(index, upto, later, now_s)
        ]

    def _settle(self, index: int, upto: int, later: tuple[int, ...], now_s: float) -> Iterator[OutgoingMessage]:
        track = self._tracks[index]
        first = takewhile(lambda number: number <= upto, track.unacknowledged)
        for number in sorted({*first, *(track.unacknowledged.keys() & later)}):
            outgoing = track.unacknowledged[number]
            if outgoing.finished:
                track.settle(outgoing, now_s)
                self._held_bytes[outgoing.yields] -= outgoing.header.charge_bytes
                yield outgoing

    def restart(self, done: wire.DoneNumbers, granted_bytes: int, now_s: float) -> list[OutgoingMessage]:
        """Begin again on a new link: what the peer does not have is sent from its first byte.

        Returns:
            The messages that the peer has.
        """
        self._started_bytes = 0
        self._granted_bytes = granted_bytes
        settled = self.acknowledge(done, granted_bytes, now_s)
        for track in self._tracks:
            track.restart()
        return settled

    def drop_older(self, generation: int) -> int:
        """Forget messages of older generations that were not started; return how many."""
        dropped = 0
        for track in self._tracks:
            fresh = [outgoing for queue in track.waiting.values() for outgoing in queue if not outgoing.number]
            for outgoing in [outgoing for outgoing in fresh if outgoing.header.key.generation < generation]:
                track.unqueue(outgoing)
                self._held_bytes[outgoing.yields] -= outgoing.header.charge_bytes
                dropped += 1
        return dropped

    @property
    def first_numbers(self) -> tuple[int, ...]:
        """For each track, the first number that is still held."""
        return tuple(next(iter(track.unacknowledged), track.next_number) for track in self._tracks)
