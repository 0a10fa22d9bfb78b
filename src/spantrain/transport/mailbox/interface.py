"""What a mailbox takes and gives, whatever carries it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from spantrain.core.messages import AnyKey
from spantrain.core.records import Bounds, Positive, Record, check_bounds
from spantrain.core.speed import SentMessage

if TYPE_CHECKING:
    import torch  # a control plane knows addresses, and no tensors

_MIB = 2**20


class Message(Record):
    """Tensors that arrived whole. No order is promised between messages: the key says what it is."""

    source: str
    key: AnyKey
    tensors: "tuple[torch.Tensor, ...]"
    """On the CPU, writable, not shared with anything else."""
    size_bytes: int
    """Bytes of the tensors."""
    sent_s: float
    """When the sender's `send` was called, on the sender's monotonic clock."""
    received_s: float
    """When the last byte came, on the receiver's monotonic clock."""
    started_s: float = 0.0
    """When the first chunk came, on the receiver's monotonic clock."""
    first_chunk_bytes: int = 0
    """Size of that chunk: `size_bytes` less this came between `started_s` and `received_s`."""


class Limits(Record):
    """Bounds of a mailbox: bytes of tensors, connections, patience."""

    max_message_bytes: Annotated[int, Bounds(low=1)] = 256 * _MIB
    send_queue_bytes: Annotated[int, Bounds(low=1)] = 512 * _MIB
    """Per peer, not acknowledged yet; a message that does not fit makes `send` wait."""
    receive_queue_bytes: int = 512 * _MIB
    """Per peer, credit: what may be under way or waiting for `receive`."""
    bulk_connections: Annotated[int, Bounds(low=1, high=16)] = 2
    """Connections per peer for large messages, besides one for small ones and one for control; one alone does not fill
    a long fat pipe."""
    welcome_s: Positive = 2.0
    """How long the first answer of a peer that was dialled may take until it is dialled anew: several round trips of
    the longest path, and the work of a handshake on a busy machine."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.receive_queue_bytes < 2 * self.max_message_bytes:
            raise ValueError(
                f"receive_queue_bytes must be at least twice max_message_bytes, or a large message could wait for "
                f"ever, got {self.receive_queue_bytes} and {self.max_message_bytes}"
            )


class SentInterval(SentMessage):
    """What message it was that went out."""

    key: AnyKey


class PeerCounters(Record):
    """What went to and came from one peer."""

    messages_sent: int = 0
    messages_received: int = 0
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    wire_bytes_sent: int = 0
    """With headers, acknowledgements, framing and encryption; without TCP and IP headers."""
    wire_bytes_received: int = 0
    send_stall_s: float = 0.0
    """How long `send` waited for room."""
    reconnections: int = 0


class Counters(Record):
    """What a mailbox has done so far."""

    peers: Mapping[str, PeerCounters]
    refused: Mapping[str, int]
    """Number by reason: `unknown peer`, `malformed`, `truncated`, `oversized`, `old generation`, ..."""
