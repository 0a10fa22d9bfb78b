"""The bytes of the protocol (docs/wire-protocol.md): encode, decode, check every bound.

Nothing here is executed or unpickled; whatever breaks a bound raises `Refusal` with a reason that is counted.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from operator import attrgetter
from typing import Any

import torch

from spantrain.core.messages import AnyKey, ControlKey, MessageKey
from spantrain.core.span import Span
from spantrain.formats.codec import DTYPE_BYTES
from spantrain.formats.tensor_bytes import byte_view
from spantrain.transport.connection import bounds
from spantrain.transport.connection.peers import Hello

VERSION = 3
WELCOME, CHUNK, ACK = b"O", b"C", b"A"
CHUNK_BYTES = 128 * 1024
EXPRESS_BYTES = 32 * 1024
"""Messages up to this size use the connection of their own, past any bulk."""
MAX_FRAME_BYTES = 512 * 1024
"""ZeroMQ closes a connection that announces more; frames below it and above a chunk are refused and counted. It has
room for what a greeting says of `MAX_AHEAD` messages on each track."""
EXPRESS, BULK = 0, 1
"""Tracks of messages, each with numbers of its own."""
_MAX_CONNECTIONS = 18
"""One for control, one for small messages, up to 16 for bulk."""
MAX_AHEAD = 16384
"""How far a message's number may be ahead of the first that is not acknowledged: bounds what receivers remember."""
_HEAD_MAX_BYTES = 32 * 1024
_ALIGNMENT = 64
_MESSAGE_COST_BYTES, _TENSOR_COST_BYTES = 6144, 1024
"""What whoever holds a message needs besides its tensors' bytes, at most: for itself, with what is left over of a page
of memory, and for each tensor."""
_MAX_TENSORS, _MAX_DIMENSIONS, _MAX_NAME = 256, 16, 256
MAX_EXTRA_BYTES = _MESSAGE_COST_BYTES + _MAX_TENSORS * _TENSOR_COST_BYTES
"""What a message may be charged besides its tensors' bytes."""
_INT31, _INT63 = 2**31, 2**63
_BOUNDS = {"max_text": _MAX_NAME, "max_entries": MAX_AHEAD}
_GREETING = attrgetter(
    "name", "session", "peer_session", "epoch", "connection", "connections", "done", "first", "granted_bytes"
)
"""What of a greeting goes, in this order."""
_CHUNK_PREFIX = struct.Struct("<BQQI")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

DoneNumbers = tuple[tuple[int, tuple[int, ...]], ...]
"""For each track: all messages up to this number have come, and these later ones."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor lies in the payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of a message beside its bytes."""

    key: AnyKey
    sent_s: float
    tensors: tuple[TensorLayout, ...]
    payload_bytes: int
    """Tensors with the gaps that align them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def charge_bytes(self) -> int:
        """The credit that it takes: no less than what it costs whoever holds it; both sides count alike."""
        return self.payload_bytes + _MESSAGE_COST_BYTES + _TENSOR_COST_BYTES * len(self.tensors)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a message; each says all, so that pieces may come by several connections in any order."""

    track: int
    number: int
    """The message's, counted by the sender from 1 for each track."""
    offset: int
    checksum: int
    header: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting(Hello):
    """What each side says when a link begins; the session is new with the sender's state: numbers start again."""

    peer_session: int
    """The session of the other side that `done` speaks of; 0 if none is known."""
    done: DoneNumbers
    """For each track: all messages up to this number have come, and these later ones."""
    first: tuple[int, ...]
    """For each track: the first number that the sender of this greeting still has."""
    granted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What has come, and how many bytes may have been started in all since the link began."""

    done: DoneNumbers
    granted_bytes: int


def _layout(kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[tuple[TensorLayout, ...], int]:
    layouts, offset = [], 0
    for dtype, shape in kinds:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        size_bytes = prod(shape) * dtype.itemsize
        layouts.append(TensorLayout(dtype, shape, offset, size_bytes))
        offset += size_bytes
    return tuple(layouts), offset


def header_of(key: AnyKey, tensors: Sequence[torch.Tensor], sent_s: float) -> Header:
    """Describe tensors that are to be sent.

    Raises:
        ValueError: whoever they are for would refuse them.
    """
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    try:
        _check_key(key)
        if len(kinds) > _MAX_TENSORS:
            raise bounds.Refusal("oversized", f"{len(kinds)} tensors, at most {_MAX_TENSORS} are allowed")
        for kind in kinds:
            _check_kind(*kind)
    except bounds.Refusal as refusal:
        raise ValueError(f"{key}: cannot be sent: {refusal}") from None
    layouts, payload_bytes = _layout(kinds)
    return Header(key, sent_s, layouts, payload_bytes)


def _check_key(key: AnyKey) -> None:
    bounds.whole_number(key.generation, 0, _INT31)
    bounds.whole_number(key.step, -1, _INT63)
    bounds.text(key.lane, _MAX_NAME)
    if isinstance(key, ControlKey):
        bounds.whole_number(key.kind, 0, _INT31)
    else:
        bounds.whole_number(key.cut, -1, _INT31)
        bounds.whole_number(key.span.hi, 1, _INT63)


def _check_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype not in _DTYPE_NAMES or len(shape) > _MAX_DIMENSIONS:
        raise bounds.Refusal(
            "malformed", f"a tensor of {dtype} with {len(shape)} dimensions, at most {_MAX_DIMENSIONS}"
        )
    # Also where nothing is in it: torch multiplies the sizes all the same.
    if prod(max(bounds.whole_number(size, 0, _INT31), 1) for size in shape) * dtype.itemsize >= _INT63:
        raise bounds.Refusal("oversized", f"a tensor of shape {shape}")


def encode_header(header: Header) -> bytes:
    """Return the header's bytes."""
    key = header.key
    tensors = [[_DTYPE_NAMES[tensor.dtype], tensor.shape] for tensor in header.tensors]
    rest = [key.kind] if isinstance(key, ControlKey) else [key.cut, key.span.lo, key.span.hi]
    address = [key.generation, key.step, key.lane, *rest]
    data = bounds.packed([VERSION, header.sent_s, address, tensors, header.payload_bytes])
    if len(data) > _HEAD_MAX_BYTES:
        raise ValueError(f"{key}: the header takes {len(data)} bytes, at most {_HEAD_MAX_BYTES} are allowed")
    return data


def decode_header(data: bytes | memoryview, max_message_bytes: int) -> Header:
    """Read a header.

    Raises:
        Refusal: it breaks a bound.
    """
    version, sent_s, address, tensors, payload_bytes = bounds.unpack(data, 5, **_BOUNDS)
    bounds.check_version(version, VERSION)
    if type(sent_s) is not float or not isfinite(sent_s):
        raise bounds.Refusal("malformed", f"sent_s must be a finite float, got {bounds.shown(sent_s)}")
    key = _decode_key(address)
    layouts, total = _layout([_decode_kind(entry) for entry in bounds.array(tensors, 0, _MAX_TENSORS)])
    if total != bounds.whole_number(payload_bytes, 0, _INT63):
        raise bounds.Refusal("malformed", f"{key}: tensors take {total} bytes, the header says {payload_bytes}")
    if total > max_message_bytes:
        raise bounds.Refusal("oversized", f"{key}: {total} bytes, at most {max_message_bytes} are allowed")
    return Header(key, sent_s, layouts, total)


def _decode_key(address: Any) -> AnyKey:
    generation, step, lane, *rest = bounds.array(address, 4, 6)
    key: AnyKey
    if len(rest) == 1:
        key = ControlKey(generation=generation, step=step, lane=lane, kind=rest[0])
    else:
        cut, lo, hi = bounds.array(rest, 3, 3)
        lo = bounds.whole_number(lo, 0, _INT63)
        span = Span(lo, bounds.whole_number(hi, lo + 1, _INT63))
        key = MessageKey(generation=generation, step=step, lane=lane, cut=cut, span=span)
    _check_key(key)
    return key


def _decode_kind(entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    name, shape = bounds.array(entry, 2, 2)
    if type(name) is not str or name not in _DTYPES:
        raise bounds.Refusal("malformed", f"unknown dtype {bounds.shown(name)}")
    dtype, sizes = _DTYPES[name], tuple(bounds.array(shape, 0, _MAX_DIMENSIONS))
    _check_kind(dtype, sizes)
    return dtype, sizes


def encode_chunk(chunk: Chunk) -> bytes:
    """Return the first frame of a chunk; the second is its bytes."""
    return CHUNK + _CHUNK_PREFIX.pack(chunk.track, chunk.number, chunk.offset, chunk.checksum) + chunk.header


def decode_chunk(head: bytes | memoryview) -> Chunk:
    """Read the first frame of a chunk; its header is left for `decode_header`."""
    if len(head) <= 1 + _CHUNK_PREFIX.size:
        raise bounds.Refusal("truncated", f"a chunk's first frame has {len(head)} bytes")
    if len(head) > _HEAD_MAX_BYTES + 64:
        raise bounds.Refusal("oversized", f"a chunk's first frame has {len(head)} bytes")
    track, number, offset, checksum = _CHUNK_PREFIX.unpack_from(head, 1)
    if track not in (EXPRESS, BULK):
        raise bounds.Refusal("malformed", f"unknown track {track}")
    return Chunk(track, number, offset, checksum, bytes(head[1 + _CHUNK_PREFIX.size :]))


def encode_greeting(kind: bytes, greeting: Greeting) -> bytes:
    """Return a HELLO or WELCOME."""
    return kind + bounds.packed([VERSION, *_GREETING(greeting)])


def decode_greeting(head: bytes | memoryview) -> Greeting:
    """Read a HELLO or WELCOME."""
    version, name, session, peer_session, epoch, connection, connections, done, first, granted = bounds.unpack(
        head[1:], 10, **_BOUNDS
    )
    bounds.check_version(version, VERSION)
    connections = bounds.whole_number(connections, 1, _MAX_CONNECTIONS + 1)
    return Greeting(
        name=bounds.text(name, _MAX_NAME),
        session=bounds.whole_number(session, 0, _INT63),
        peer_session=bounds.whole_number(peer_session, 0, _INT63),
        epoch=bounds.whole_number(epoch, 0, _INT63),
        connection=bounds.whole_number(connection, 0, connections),
        connections=connections,
        done=_decode_done(done),
        first=tuple(bounds.whole_number(number, 1, _INT63) for number in bounds.array(first, 2, 2)),
        granted_bytes=bounds.whole_number(granted, 0, _INT63),
    )


def encode_acknowledgement(acknowledgement: Acknowledgement) -> bytes:
    """Return an ACK."""
    return ACK + bounds.packed([acknowledgement.done, acknowledgement.granted_bytes])


def decode_acknowledgement(head: bytes | memoryview) -> Acknowledgement:
    """Read an ACK."""
    done, granted = bounds.unpack(head[1:], 2, **_BOUNDS)
    return Acknowledgement(done=_decode_done(done), granted_bytes=bounds.whole_number(granted, 0, _INT63))


def encode_bye(generation: int) -> bytes:
    """Return a goodbye, with the generation in which the sender has no more to do with the other side."""
    return bounds.BYE + bounds.packed([generation])


def decode_bye(head: bytes | memoryview) -> int:
    """Read the generation of a goodbye."""
    (generation,) = bounds.unpack(head[1:], 1, **_BOUNDS)
    return bounds.whole_number(generation, 0, _INT31)


def _decode_done(value: Any) -> DoneNumbers:
    tracks = []
    for entry in bounds.array(value, 2, 2):
        upto, later = bounds.array(entry, 2, 2)
        numbers = tuple(bounds.whole_number(number, 1, _INT63) for number in bounds.array(later, 0, MAX_AHEAD))
        tracks.append((bounds.whole_number(upto, 0, _INT63), numbers))
    return tuple(tracks)


class Payload:
    """The bytes of tensors, read piece by piece with no copy of the whole."""

    def __init__(self, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        self._parts: list[tuple[int, memoryview]] = []
        for layout, tensor in zip(header.tensors, tensors, strict=True):
            if layout.size_bytes:
                self._parts.append((layout.offset, byte_view(tensor.cpu())))

    def piece(self, offset: int, length: int) -> memoryview | bytearray:
        """Return bytes [offset, offset + length); gaps are zero."""
        for start, view in self._parts:
            if start <= offset and offset + length <= start + len(view):
                return view[offset - start : offset - start + length]
        joined = bytearray(length)
        for start, view in self._parts:
            lo, hi = max(start, offset), min(start + len(view), offset + length)
            if lo < hi:
                joined[lo - offset : hi - offset] = view[lo - start : hi - start]
        return joined
