"""The receiving side of one peer: put chunks together, grant credit, take every message once.

Pure state, no sockets. A chunk may come by any connection and in any order; a chunk that breaks a rule is refused
and leaves everything as it was.
"""

import zlib
from dataclasses import dataclass
from math import prod

import torch

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.interface import Limits, Message


@dataclass(kw_only=True, eq=False)
class _Partial:
    """A message of which some chunks have come."""

    header: wire.Header
    header_bytes: bytes
    buffer: torch.Tensor
    view: memoryview
    started_s: float
    first_chunk_bytes: int
    came: bytearray
    """For each chunk, whether it has come."""


class _Seen:
    """Which numbers of one track have come."""

    def __init__(self) -> None:
        self.upto = 0
        self.later: set[int] = set()
        self._news: set[int] = set()
        """Those of `later` that the peer was not told of."""

    def __contains__(self, number: int) -> bool:
        return number <= self.upto or number in self.later

    def add(self, number: int) -> None:
        self.later.add(number)
        self._news.add(number)
        self._advance()

    def skip_to(self, first: int) -> None:
        """Numbers before `first` will not come (again)."""
        if first - 1 > self.upto:
            self.upto = first - 1
            self.later = {number for number in self.later if number > self.upto}
            self._news &= self.later
        self._advance()

    def _advance(self) -> None:
        while self.upto + 1 in self.later:
            self.upto += 1
            self.later.discard(self.upto)
            self._news.discard(self.upto)

    def take_news(self) -> tuple[int, tuple[int, ...]]:
        news = tuple(sorted(self._news))
        self._news.clear()
        return self.upto, news


class Inbox:
    """What one peer has sent and this side has not consumed."""

    def __init__(self, source: str, limits: Limits, *, checked: bool) -> None:
        self._source = source
        self._max_message_bytes = limits.max_message_bytes
        self._window_bytes = limits.receive_queue_bytes + wire.MAX_EXTRA_BYTES
        self._checked = checked
        self._partials: dict[tuple[int, int], _Partial] = {}
        self._seen = (_Seen(), _Seen())
        self._queued_bytes = 0
        """Cost of messages that are whole and were not consumed."""
        self._started_bytes = 0
        self.granted_bytes = 0
        """Credit since the link began."""
        self._announced_bytes = 0
        self.acknowledgement_due = False

    def restart(self, *, anew: bool) -> None:
        """Begin again on a new link: half messages are forgotten, whole ones are not.

        `anew`: the peer's numbers begin again as well.
        """
        self._partials.clear()
        if anew:
            self._seen = (_Seen(), _Seen())
        self._started_bytes = 0
        self.granted_bytes = self._announced_bytes = self._window_bytes - self._queued_bytes
        self.acknowledgement_due = False

    def skip_to(self, first: tuple[int, ...]) -> None:
        """Take the peer's word that earlier messages will not come (again)."""
        for seen, number in zip(self._seen, first, strict=True):
            seen.skip_to(number)

    @property
    def done(self) -> wire.DoneNumbers:
        """For each track, what has come, in full."""
        return tuple((seen.upto, tuple(sorted(seen.later))) for seen in self._seen)

    def take_acknowledgement(self) -> wire.Acknowledgement:
        """Return what is to be told to the peer since the last time."""
        self.acknowledgement_due = False
        self._announced_bytes = self.granted_bytes
        return wire.Acknowledgement(
            done=tuple(seen.take_news() for seen in self._seen), granted_bytes=self.granted_bytes
        )

    def accept(self, chunk: wire.Chunk, data: memoryview, now_s: float) -> tuple[Message, int] | None:
        """Take a chunk; return the message, and what `consume` needs, if it is whole now.

        Raises:
            Refusal: the chunk breaks a rule; nothing has changed.
        """
        if chunk.number in self._seen[chunk.track]:
            raise Refusal("repeated", f"message {chunk.number} is here already")
        address = (chunk.track, chunk.number)
        partial = self._partials.get(address)
        known = partial is not None
        if partial is None:
            partial = self._begin(chunk, len(data), now_s)
        self._check(partial, chunk, data)
        if not known:
            self._started_bytes += partial.header.charge_bytes
            self._partials[address] = partial
        partial.view[chunk.offset : chunk.offset + len(data)] = data
        partial.came[chunk.offset // wire.CHUNK_BYTES] = 1
        if 0 in partial.came:
            return None
        return self._complete(address, partial, now_s)

    def _begin(self, chunk: wire.Chunk, first_chunk_bytes: int, now_s: float) -> _Partial:
        header = wire.decode_header(chunk.header, self._max_message_bytes)
        if chunk.number > self._seen[chunk.track].upto + wire.MAX_AHEAD:
            raise Refusal("over credit", f"{header.key}: message {chunk.number} is too far ahead")
        if self._started_bytes + header.charge_bytes > self.granted_bytes:
            raise Refusal("over credit", f"{header.key}: {header.charge_bytes} bytes are more than was granted")
        buffer = torch.empty(header.payload_bytes, dtype=torch.uint8)
        return _Partial(
            header=header,
            header_bytes=chunk.header,
            buffer=buffer,
            view=buffer.numpy().data,
            started_s=now_s,
            first_chunk_bytes=first_chunk_bytes,
            came=bytearray(max(1, -(-header.payload_bytes // wire.CHUNK_BYTES))),
        )

    def _check(self, partial: _Partial, chunk: wire.Chunk, data: memoryview) -> None:
        if partial.header_bytes != chunk.header:
            raise Refusal("malformed", f"two headers for message {chunk.number}")
        payload_bytes = partial.header.payload_bytes
        beginning = chunk.offset % wire.CHUNK_BYTES == 0 and chunk.offset < max(payload_bytes, 1)
        if not beginning or partial.came[chunk.offset // wire.CHUNK_BYTES]:
            raise Refusal("malformed", f"{partial.header.key}: no chunk begins at {chunk.offset}")
        expected = min(wire.CHUNK_BYTES, payload_bytes - chunk.offset)
        if len(data) != expected:
            reason = "truncated" if len(data) < expected else "oversized"
            raise Refusal(reason, f"{partial.header.key}: chunk of {len(data)} bytes, {expected} expected")
        if self._checked and zlib.crc32(data) != chunk.checksum:
            raise Refusal("bad checksum", f"{partial.header.key}: chunk at {chunk.offset}")

    def _complete(self, address: tuple[int, int], partial: _Partial, now_s: float) -> tuple[Message, int]:
        del self._partials[address]
        track, number = address
        self._seen[track].add(number)
        self.acknowledgement_due = True
        cost = partial.header.charge_bytes
        self._queued_bytes += cost
        header = partial.header
        message = Message(
            source=self._source,
            key=header.key,
            tensors=_tensors(header, partial.buffer),
            size_bytes=header.size_bytes,
            sent_s=header.sent_s,
            received_s=now_s,
            started_s=partial.started_s,
            first_chunk_bytes=partial.first_chunk_bytes,
        )
        return message, cost

    def consume(self, cost: int) -> bool:
        """Give back the credit of a message that left the queue; return whether the peer should hear of it soon."""
        self._queued_bytes -= cost
        self.granted_bytes += cost
        if 2 * (self._announced_bytes - self._started_bytes) > self._window_bytes:
            return False
        self.acknowledgement_due = True
        return True


def _tensors(header: wire.Header, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    storage = buffer.untyped_storage()
    tensors = []
    for layout in header.tensors:
        if layout.dtype == torch.bool:
            buffer[layout.offset : layout.offset + layout.size_bytes].ne_(0)  # any byte may come, torch takes 0 and 1
        # Views would take three times the memory: autograd follows them.
        first = layout.offset // layout.dtype.itemsize
        strides = tuple(prod(max(size, 1) for size in layout.shape[k + 1 :]) for k in range(len(layout.shape)))
        tensors.append(torch.empty(0, dtype=layout.dtype).set_(storage, first, layout.shape, strides))
    return tuple(tensors)
