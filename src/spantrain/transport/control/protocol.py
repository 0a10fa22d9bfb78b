"""What both ends agree on: names, limits, gRPC options, the envelope of an answer."""

from typing import Any

from spantrain.errors import ProtocolError, SpanTrainError
from spantrain.transport.control.codec import decode, encode

PROTOCOL_VERSION = 1
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

_SERVICE = "spantrain.Control"
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_TIMEOUT_S = 10


class RemoteRefusal(SpanTrainError):
    """The coordinator understood and said no; the message is its reason."""


def method_path(method: str) -> str:
    """Return the path that a method has in HTTP/2.

    >>> method_path("heartbeat")
    '/spantrain.Control/heartbeat'
    """
    return f"/{_SERVICE}/{method}"


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
