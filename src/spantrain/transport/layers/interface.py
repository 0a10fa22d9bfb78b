"""What a layer wire takes and gives: keys of layers, limits, what it tells its owner, what it counts.

What both sides of a layer wire's link take, and how they tell each other.

A link lives once: when one of its connections ends, all that was under way by it is lost, and the side that dialled
opens all anew, with a new session. So a piece of one session never ends up in a layer of another.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import zmq
from torch import Tensor

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.records import Bounds, NotNegative, Positive, Record, check_bounds
from spantrain.transport.connection.links import PeerLink

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, order=True)
class LayerKey:
    """One layer of a push or a pull."""

    ticket: Ticket
    way: TransferWay
    layer: int

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise ValueError(f"a layer's index must not be negative, got {self.layer}")

    def __str__(self) -> str:
        return f"layer {self.layer} of {self.way.value} {self.ticket}"


class LayerLimits(Record):
    """Bounds of a layer wire: bytes, patience, connections, threads."""

    frame_bytes: Annotated[int, Bounds(low=65536)] = 4 * _MIB
    """Largest piece of a layer that travels as one; ZeroMQ closes a connection that announces more. Each takes some
    tenths of a millisecond besides its bytes; and on the slowest path one must come within `no_progress_s`."""
    layer_bytes: Annotated[int, Bounds(low=1)] = 8192 * _MIB
    """Largest layer that can be expected or sent."""
    window_bytes: int = 16 * _MIB
    """What of a layer may be under way and not yet at its place: rate times round trip of the longest path, or more."""
    no_progress_s: Positive = 30.0
    """A layer of which nothing has come, or gone, for so long is lost."""
    copiers: Annotated[int, Bounds(low=0, high=64)] = 2
    """Threads that put what comes in its place and hand over whole layers, one for each layer in flight; 0: the thread
    of the sockets does it."""
    welcome_s: Positive = 2.0
    """How long the first answer of a peer that was dialled may take until it is dialled anew."""
    early_s: NotNegative = 1.0
    """How long who dials and is not known waits before it is refused: its name may be on its way to this side."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.window_bytes < self.frame_bytes:
            raise ValueError(
                f"window_bytes must be at least frame_bytes, got {self.window_bytes} and {self.frame_bytes}"
            )


class LayerCounters(Record):
    """What a wire has done so far."""

    layers_sent: int
    layers_received: int
    bytes_sent: Mapping[str, int]
    """By peer: of tensors, handed to the connection."""
    bytes_received: Mapping[str, int]
    """By peer: of tensors."""
    refused: Mapping[str, int]
    """Number by reason: `unknown peer`, `no greeting`, `not as expected`, `oversized`, `malformed`, `cut off`, ..."""


class WireListener(Protocol):
    """What a wire tells its owner, from the wire's threads; none of it may block for long, but for `arrived`.

    A layer is told of once: that it arrived, or was sent, or is lost. What was on its way when it was forgotten may
    still be told of.
    """

    def arrived(self, peer: str, key: LayerKey, tensors: Mapping[str, Tensor]) -> None:
        """Take an expected layer that has come whole; the tensors are the listener's from now on."""

    def sent(self, peer: str, key: LayerKey) -> None:
        """Take note that the peer has all of a layer: its tensors may be changed again."""

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        """Take note that an expected layer will not come, or a layer could not be sent."""

    def died(self, fault: str) -> None:
        """Take note that a fault has ended one of the wire's threads, and with it the wire."""


@dataclass(kw_only=True)
class LayerTerms:
    """What was agreed with a peer; before that, what this side takes."""

    frame_bytes: int
    """Largest piece that both sides take."""
    window_bytes: int
    """What the other side takes of layers that it has not granted anything of."""


LayerLink = PeerLink[LayerTerms]
CONTROL, LAYERS = 0, 1
"""Connections of a link: by one layers go, by the other all that is said of them."""


def tell(link: LayerLink | None, connection: int, head: bytes, piece: "memoryview | bytes | None" = None) -> None:
    """Hand a message to a connection; the piece must not change until it has left. One that is gone drops it."""
    if link is None or not link.up:
        return
    with contextlib.suppress(zmq.ZMQError):  # the monitor tells of it in a moment
        link.send(connection, [head] if piece is None else [head, piece], copy=piece is None)
