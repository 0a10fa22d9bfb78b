"""The bytes that a layer wire speaks: encode, decode, check every bound.

Each message is one head, and for a piece of a layer its bytes in a second frame. A layer is opened with its key and the
names, types and shapes of its parameters; then come its bytes, of one parameter after the other, with no gaps and in
order. The receiver grants how far they may go, and says at the end that all is there, or why it is refused. Sums over
the bytes are not made: encryption authenticates each frame, and without it TCP's own must do.

Nothing here is executed or unpickled; whatever breaks a bound raises `Refusal` with a reason that is counted.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_PARAMETERS, ParameterSpec
from spantrain.transport.connection import bounds
from spantrain.transport.connection.peers import Hello
from spantrain.transport.layers.interface import LayerKey

WELCOME, OPEN, DATA, GRANT, DONE, REFUSED, CANCEL = (bytes([kind]) for kind in b"WODGENC")
"""First byte of each head, beside those that both planes have (`connection.bounds`)."""
HEAD_MAX_BYTES = 2**20
_VERSION = 1
_INT31, _INT63 = 2**31, 2**63
_MAX_CONNECTIONS, _MAX_TEXT = 17, 1000
_WAYS = {one.value: one for one in TransferWay}
_NUMBER, _PAIR = struct.Struct("<Q"), struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHello(Hello):
    """What each side says when a link begins: the dialling side on each connection, the other side once."""

    frame_bytes: int
    """Largest piece that this side takes."""
    window_bytes: int
    """What may come before this side grants more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is said of a layer before its bytes."""

    number: int
    """By which the sender of the layer means it from here on, in this session."""
    key: LayerKey
    parameters: tuple[ParameterSpec, ...]
    """In the order of the bytes."""


def encode_hello(kind: bytes, hello: LayerHello) -> bytes:
    """Return a HELLO or a WELCOME."""
    fields = (hello.name, hello.session, hello.connection, hello.connections, hello.frame_bytes, hello.window_bytes)
    return kind + bounds.packed([_VERSION, *fields])


def decode_hello(head: bytes) -> LayerHello:
    """Read a HELLO or a WELCOME.

    Raises:
        Refusal: it breaks a bound.
    """
    version, name, session, connection, connections, frame_bytes, window_bytes = _unpacked(head[1:], 7)
    bounds.check_version(version, _VERSION)
    connections = bounds.whole_number(connections, 2, _MAX_CONNECTIONS + 1)
    return LayerHello(
        name=bounds.text(name, MAX_NAME_BYTES),
        session=bounds.whole_number(session, 0, _INT63),
        connection=bounds.whole_number(connection, 0, connections),
        connections=connections,
        frame_bytes=bounds.whole_number(frame_bytes, 65536, _INT63),
        window_bytes=bounds.whole_number(window_bytes, 65536, _INT63),
    )


def encode_opening(opening: Opening) -> bytes:
    """Return an OPEN.

    Raises:
        ValueError: it is too large; cut the layer.
    """
    key = opening.key
    specs = [[one.name, one.dtype, one.shape] for one in opening.parameters]
    head = OPEN + _NUMBER.pack(opening.number) + bounds.packed(
        [key.ticket.epoch, key.ticket.number, key.way.value, key.layer, specs]
    )  # fmt: skip
    if len(head) > HEAD_MAX_BYTES or len(specs) > MAX_PARAMETERS:
        raise ValueError(
            f"{key}: its {len(specs)} parameters take {len(head)} bytes to name, at most {MAX_PARAMETERS} and "
            f"{HEAD_MAX_BYTES} are allowed; make smaller layers"
        )
    return head


def decode_opening(head: bytes) -> Opening:
    """Read an OPEN.

    Raises:
        Refusal: it breaks a bound.
    """
    number = decode_number(head[: 1 + _NUMBER.size])
    epoch, count, way, layer, specs = _unpacked(head[1 + _NUMBER.size :], 5)
    if type(way) is not str or way not in _WAYS:
        raise bounds.Refusal("malformed", f"unknown way {bounds.shown(way)}")
    ticket = Ticket(bounds.whole_number(epoch, 0, _INT63), bounds.whole_number(count, 0, _INT63))
    return Opening(
        number=number,
        key=LayerKey(ticket=ticket, way=_WAYS[way], layer=bounds.whole_number(layer, 0, _INT31)),
        parameters=tuple(_spec(one) for one in bounds.array(specs, 1, MAX_PARAMETERS)),
    )


def _spec(entry: Any) -> ParameterSpec:
    name, dtype, shape = bounds.array(entry, 3, 3)
    sizes = tuple(bounds.whole_number(size, 1, _INT63) for size in bounds.array(shape, 0, MAX_DIMENSIONS))
    try:
        return ParameterSpec(
            name=bounds.text(name, MAX_NAME_BYTES), dtype=bounds.text(dtype, MAX_NAME_BYTES), shape=sizes
        )
    except ValueError as error:
        raise bounds.Refusal("malformed", str(error)) from error


def encode_number(kind: bytes, number: int) -> bytes:
    """Return a DONE or a CANCEL."""
    return kind + _NUMBER.pack(number)


def decode_number(head: bytes) -> int:
    """Read a DONE or a CANCEL."""
    return int(_fields(_NUMBER, head)[0])


def encode_pair(kind: bytes, number: int, offset_bytes: int) -> bytes:
    """Return the head of DATA, with the place of its bytes in the layer, or a GRANT, with how far they may go."""
    return kind + _PAIR.pack(number, offset_bytes)


def decode_pair(head: bytes) -> tuple[int, int]:
    """Read the head of DATA, or a GRANT."""
    number, offset_bytes = _fields(_PAIR, head)
    return int(number), int(offset_bytes)


def encode_refused(number: int, reason: str) -> bytes:
    """Return a REFUSED, with a reason for people."""
    return REFUSED + _NUMBER.pack(number) + reason.encode()[:_MAX_TEXT]


def decode_refused(head: bytes) -> tuple[int, str]:
    """Read a REFUSED."""
    reason = head[1 + _NUMBER.size :][:_MAX_TEXT].decode(errors="replace")
    return decode_number(head[: 1 + _NUMBER.size]), bounds.printable(reason)


def unlike(got: Sequence[ParameterSpec], wanted: Sequence[ParameterSpec]) -> str:
    """Return in which parameters two layers differ, by name; empty if in none. Their order does not count.

    >>> one = ParameterSpec(name="0.bias", shape=(3,))
    >>> unlike([ParameterSpec(name="0.bias", shape=(4,))], [one])
    '0.bias: got float32 of shape (4,), wanted float32 of shape (3,)'
    """
    here, there = _told(got), _told(wanted)
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    told = (f"{name}: got {here.get(name, 'none')}, wanted {there.get(name, 'none')}" for name in names[:4])
    if not names and len(got) != len(wanted):
        return "a parameter is there twice"
    return "; ".join(told) + more


def _told(specs: Sequence[ParameterSpec]) -> Mapping[str, str]:
    return {one.name: f"{one.dtype} of shape {one.shape}" for one in specs}


def _fields(form: struct.Struct, head: bytes) -> tuple[Any, ...]:
    if len(head) != 1 + form.size:
        raise bounds.Refusal("malformed", f"a head of {len(head)} bytes, need {1 + form.size}")
    return form.unpack_from(head, 1)


def _unpacked(data: bytes, length: int) -> list[Any]:
    if len(data) > HEAD_MAX_BYTES:
        raise bounds.Refusal("oversized", f"a head of {len(data)} bytes, at most {HEAD_MAX_BYTES} are allowed")
    return bounds.unpack(data, length, max_text=MAX_NAME_BYTES, max_entries=MAX_PARAMETERS)
