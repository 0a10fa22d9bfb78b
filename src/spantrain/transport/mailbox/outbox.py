"""The sending side of one peer: a queue with lanes, credit, and everything that is not acknowledged yet.

Pure state, no sockets. Two tracks number their messages on their own: small messages (express) and large ones (bulk).
Within a track, one message of each lane is under way at a time, and lanes take turns chunk by chunk. A message starts
only when the peer's credit covers all of it, so that messages under way together can always be completed.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from spantrain.core.messages import MessageKey
from spantrain.transport.mailbox.pace import Mark, Pace
from spantrain.transport.mailbox.wire import (
    BULK,
    CHUNK_BYTES,
    EXPRESS,
    EXPRESS_BYTES,
    MAX_AHEAD,
    Payload,
    encode_header,
    header_of,
)

_MAX_UNDER_WAY = 8
_FEWEST_AWAY = 2
"""So many messages of a track may always be on their way."""


@dataclass(kw_only=True, eq=False)
class Parcel:
    """One message on its way out."""

    key: MessageKey
    header: bytes
    payload: Payload
    payload_bytes: int
    size_bytes: int
    """Of the tensors."""
    charge_bytes: int
    """The credit that it takes."""
    queued_s: float
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
        self.track = EXPRESS if self.payload_bytes <= EXPRESS_BYTES else BULK

    @classmethod
    def pack(cls, key: MessageKey, tensors: Sequence[torch.Tensor], max_message_bytes: int, now_s: float) -> "Parcel":
        """Describe tensors for sending; they are not copied.

        Raises:
            ValueError: the message breaks a limit.
        """
        header = header_of(key, tensors, now_s)
        if header.payload_bytes > max_message_bytes:
            raise ValueError(f"{key}: {header.payload_bytes} bytes, at most {max_message_bytes} are allowed; split it")
        return cls(
            key=key,
            header=encode_header(header),
            payload=Payload(header, tensors),
            payload_bytes=header.payload_bytes,
            size_bytes=header.size_bytes,
            charge_bytes=header.charge_bytes,
            queued_s=now_s,
        )

    @property
    def offset(self) -> int:
        """Where its next chunk begins."""
        return self.next_chunk * CHUNK_BYTES

    @property
    def length(self) -> int:
        """How long its next chunk is."""
        return min(CHUNK_BYTES, self.payload_bytes - self.offset)

    @property
    def finished(self) -> bool:
        """Whether every chunk was handed to a connection."""
        return self.next_chunk > 0 and self.offset >= self.payload_bytes


class _Track:
    """Messages that share a sequence of numbers."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[Parcel]] = {}
        self.under_way: OrderedDict[str, Parcel] = OrderedDict()
        self.unacknowledged: dict[int, Parcel] = {}
        self.next_number = 1
        self.next_order = 0
        self._pace = Pace()
        self._away_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether as much is on the way as the link takes at once."""
        return len(self.unacknowledged) >= _FEWEST_AWAY and self._away_bytes >= self._pace.room_bytes

    def startable(self) -> Parcel | None:
        """Return the oldest message whose lane is free."""
        first = next(iter(self.unacknowledged), self.next_number)
        if len(self.under_way) >= _MAX_UNDER_WAY or self.next_number >= first + MAX_AHEAD:
            return None
        heads = (queue[0] for lane, queue in self.waiting.items() if lane not in self.under_way)
        return min(heads, key=lambda parcel: parcel.order, default=None)

    def enqueue(self, parcel: Parcel) -> None:
        self.waiting.setdefault(parcel.key.lane, deque()).append(parcel)

    def unqueue(self, parcel: Parcel) -> None:
        queue = self.waiting[parcel.key.lane]
        queue.remove(parcel)
        if not queue:
            del self.waiting[parcel.key.lane]

    def start(self, parcel: Parcel, now_s: float) -> None:
        self.unqueue(parcel)
        self.under_way[parcel.key.lane] = parcel
        if parcel.started_s is None:
            parcel.started_s = now_s
            parcel.mark = self._pace.left(now_s, others=len(self.unacknowledged))
            parcel.number = self.next_number
            self.next_number += 1
            self.unacknowledged[parcel.number] = parcel
            self._away_bytes += parcel.payload_bytes

    def settle(self, parcel: Parcel, now_s: float) -> None:
        """Forget a message that the peer has."""
        assert parcel.started_s is not None
        assert parcel.mark is not None
        del self.unacknowledged[parcel.number]
        self._away_bytes -= parcel.payload_bytes
        self._pace.came(now_s, parcel.payload_bytes, left_s=parcel.started_s, mark=parcel.mark)

    def restart(self) -> None:
        fresh = [parcel for queue in self.waiting.values() for parcel in queue if not parcel.number]
        self.waiting.clear()
        self.under_way.clear()
        for parcel in self.unacknowledged.values():
            parcel.next_chunk = 0
        for parcel in (*self.unacknowledged.values(), *fresh):
            self.enqueue(parcel)


class Outbox:
    """Messages for one peer that it has not acknowledged."""

    def __init__(self) -> None:
        self._tracks = (_Track(), _Track())
        self._granted_bytes = 0
        self._started_bytes = 0
        self.held_bytes = 0
        """Bytes of all messages that are held, to be compared with the limit of the queue."""

    def offer(self, parcel: Parcel) -> None:
        """Take a message."""
        track = self._tracks[parcel.track]
        parcel.order = track.next_order
        track.next_order += 1
        track.enqueue(parcel)
        self.held_bytes += parcel.charge_bytes

    def peek(self, track_index: int, now_s: float) -> Parcel | None:
        """Return the message whose chunk is to be sent next on a track, if credit allows one."""
        track = self._tracks[track_index]
        while (parcel := track.startable()) is not None:
            if self._started_bytes + parcel.charge_bytes > self._granted_bytes:
                break
            # What begins again on a new link has its number, and does not wait for itself.
            if not parcel.number and track.is_full:
                break
            self._started_bytes += parcel.charge_bytes
            track.start(parcel, now_s)
        return next(iter(track.under_way.values()), None)

    def advance(self, parcel: Parcel) -> None:
        """Note that the chunk of a peeked message was handed over; the next lane has its turn."""
        track = self._tracks[parcel.track]
        parcel.next_chunk += 1
        if parcel.finished:
            del track.under_way[parcel.key.lane]
        else:
            track.under_way.move_to_end(parcel.key.lane)

    def acknowledge(
        self, done: tuple[tuple[int, tuple[int, ...]], ...], granted_bytes: int, now_s: float
    ) -> list[Parcel]:
        """Forget the messages that the peer has, take its credit, and return those messages."""
        self._granted_bytes = max(self._granted_bytes, granted_bytes)
        return [
            parcel for index, (upto, later) in enumerate(done) for parcel in self._settle(index, upto, later, now_s)
        ]

    def _settle(self, index: int, upto: int, later: tuple[int, ...], now_s: float) -> Iterator[Parcel]:
        track = self._tracks[index]
        numbers = [number for number in later if number in track.unacknowledged]
        for number in track.unacknowledged:
            if number > upto:
                break
            numbers.append(number)
        for number in sorted(set(numbers)):
            parcel = track.unacknowledged[number]
            if parcel.finished:
                track.settle(parcel, now_s)
                self.held_bytes -= parcel.charge_bytes
                yield parcel

    def restart(self, done: tuple[tuple[int, tuple[int, ...]], ...], granted_bytes: int, now_s: float) -> list[Parcel]:
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
            fresh = [parcel for queue in track.waiting.values() for parcel in queue if not parcel.number]
            for parcel in [parcel for parcel in fresh if parcel.key.generation < generation]:
                track.unqueue(parcel)
                self.held_bytes -= parcel.charge_bytes
                dropped += 1
        return dropped

    @property
    def first_numbers(self) -> tuple[int, ...]:
        """For each track, the first number that is still held."""
        return tuple(next(iter(track.unacknowledged), track.next_number) for track in self._tracks)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent or is on the way."""
        return not any(track.unacknowledged or track.waiting for track in self._tracks)
