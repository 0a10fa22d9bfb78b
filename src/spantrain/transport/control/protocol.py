"""What both ends agree on: names, limits, gRPC options, the envelope of an answer.

Strict msgpack: dicts of plain values, within limits. Nothing that arrives is executed (DESIGN idea 9).

Plain values are None, booleans, integers of 64 bits, floats, text, bytes, lists and dicts with text as keys.
A tuple is sent as a list. Extension types, timestamps, other keys, repeated keys and trailing bytes are refused.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from spantrain.errors import ProtocolError, SpanTrainError

_DEPTH_LIMIT = 32
_KEY_LIMIT = 512
_VALUES_LIMIT = 2**20
"""Most values of one message: what takes a byte on the way takes up to a hundred when it is read."""
_SCALARS = (bool, int, float, str, bytes)

_Problem = tuple[str, str]
"""Where, from the value on that was looked at, and what."""


def encode(payload: dict[str, Any], *, limit_bytes: int) -> bytes:
    """Return the bytes of a payload.

    Raises:
        TypeError: it holds something that is not plain; the message says where.
        ProtocolError: it takes more than the limit.
    """
    if type(payload) is not dict:
        raise TypeError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, 0)
    if problem:
        raise TypeError("payload{}: {}".format(*problem))
    data: bytes = msgpack.packb(payload, use_bin_type=True)
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, this one has {len(data)}: send less")
    return data


def decode(data: bytes, *, limit_bytes: int) -> dict[str, Any]:
    """Return the payload in some bytes from the network.

    Raises:
        ProtocolError: too long, not msgpack, too many values, or not a dict of plain values.
    """
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, got {len(data)}")
    counted = _Counted()
    try:
        payload = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=counted.table,
            list_hook=counted.row,
            ext_hook=_refuse_extension,
            max_array_len=_VALUES_LIMIT,
            max_map_len=_VALUES_LIMIT,
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not msgpack of plain values: {error}") from None
    if not isinstance(payload, dict):
        raise ProtocolError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, 0)
    if problem:
        raise ProtocolError("message{}: {}".format(*problem))
    return payload


class _Counted:
    """Counts the values of a message while they are read: what is refused then has not taken much."""

    def __init__(self) -> None:
        self._values = 0

    def row(self, entries: list[Any]) -> list[Any]:
        self._add(len(entries))
        return entries

    def table(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._add(2 * len(pairs))
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key is given twice")
        return table

    def _add(self, count: int) -> None:
        self._values += count
        if self._values > _VALUES_LIMIT:
            raise ValueError(f"it holds over {_VALUES_LIMIT} values")


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} of {len(data)} bytes is not allowed")


def _problem(value: object, depth: int) -> _Problem | None:
    """Return what is not plain about a value, and where; None if all is well."""
    if depth > _DEPTH_LIMIT:
        return "", f"a control message may be nested {_DEPTH_LIMIT} deep, this one goes deeper"
    if value is None or isinstance(value, _SCALARS):
        fits = not isinstance(value, int) or -(2**63) <= value < 2**64
        return None if fits else ("", "a number does not fit in 64 bits")
    # msgpack's own extension and time types are tuples or plain objects: exact types keep them out.
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return _first(enumerate(value), depth, "[{}]")
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                return "", f"keys must be text, got {key!r:.60}"
            if len(key) > _KEY_LIMIT:
                return "", f"keys may have {_KEY_LIMIT} characters, got {key[:60]!r}..."
        return _first(value.items(), depth, ".{}")
    return "", f"{type(value).__name__} is not a plain value"


def _first(entries: Iterable[tuple[object, object]], depth: int, place: str) -> _Problem | None:
    # Where it is told only of what is wrong: to write that down for each value would take far longer than to look.
    for key, entry in entries:
        problem = _problem(entry, depth + 1)
        if problem is not None:
            return place.format(key) + problem[0], problem[1]
    return None


Handler = Callable[[str, dict[str, Any]], dict[str, Any]]
"""(authenticated device name, payload) -> answer. May block; may raise RemoteRefusal."""

MESSAGE_LIMIT_BYTES = 8 * 2**20
JOIN_REQUEST_LIMIT_BYTES = 2**16
"""Less than other messages: whoever sends it has not shown that it holds the token."""
_REFUSAL_LIMIT = 2**16

COORDINATOR_NAME = "spantrain-coordinator"
"""The name in the coordinator's certificate, whatever address it is dialled at."""

JOIN = "join"
HEARTBEAT = "heartbeat"
HELLO = "hello"
"""Answered by the server itself, with nothing: shows that the control port is there and lets this worker in."""
PRESENCE = "presence"
"""Answered by the server itself, when it stops or the worker was released: ends before that with its connection."""

SERVICE = "spantrain.Control"
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_TIMEOUT_S = 10


class RemoteRefusal(SpanTrainError):
    """The coordinator understood and said no; the message is its reason."""


def method_path(method: str) -> str:
    """Return the path that a method has in HTTP/2.

    >>> method_path("heartbeat")
    '/spantrain.Control/heartbeat'
    """
    return f"/{SERVICE}/{method}"


def wrap_answer(answer: dict[str, Any]) -> bytes:
    """Return the message that carries an answer.

    Raises:
        TypeError: it holds something that is not plain.
        ProtocolError: it is over the limit.
    """
    return encode({"answer": answer}, limit_bytes=MESSAGE_LIMIT_BYTES)


def wrap_refusal(reason: str) -> bytes:
    """Return the message that carries a reason why not."""
    return encode({"refusal": reason[:_REFUSAL_LIMIT]}, limit_bytes=MESSAGE_LIMIT_BYTES)


def unwrap(message: bytes) -> dict[str, Any]:
    """Return the answer in a message.

    Raises:
        RemoteRefusal: it carries a refusal.
        ProtocolError: it is neither.
    """
    envelope = decode(message, limit_bytes=MESSAGE_LIMIT_BYTES)
    match envelope:
        case {"refusal": str(reason)} if len(envelope) == 1:
            raise RemoteRefusal(reason)
        case {"answer": dict(answer)} if len(envelope) == 1:
            return answer
    raise ProtocolError(f"an answer must hold `answer` or `refusal` alone, got {sorted(envelope)}")


def _common_options() -> list[tuple[str, Any]]:
    """Notice a peer whose machine or link is gone, though no packet says so."""
    return [
        ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_S * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ]


def server_options(receive_limit_bytes: int) -> list[tuple[str, Any]]:
    """Return gRPC options of a server that takes messages up to a size."""
    return [
        *_common_options(),
        ("grpc.max_receive_message_length", receive_limit_bytes),
        # Without this a second server binds the same port and takes half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_INTERVAL_S * 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]


def channel_options() -> list[tuple[str, Any]]:
    """Return gRPC options of a client's channel."""
    return [
        *_common_options(),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
        # The certificate is pinned: which name it was dialled by does not matter, and is often an address.
        ("grpc.ssl_target_name_override", COORDINATOR_NAME),
        ("grpc.default_authority", COORDINATOR_NAME),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # Between attempts to reach a coordinator that is away; the second is how long one attempt may take.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
