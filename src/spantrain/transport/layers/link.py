"""What both sides of a layer wire's link take, and how they tell each other.

A link lives once: when one of its connections ends, all that was under way by it is lost, and the side that dialled
opens all anew, with a new session. So a piece of one session never ends up in a layer of another.
"""

import contextlib

import zmq

from spantrain.transport.connection.links import PeerLink
from spantrain.transport.layers.format import LayerHello
from spantrain.transport.layers.interface import LayerLimits


class LayerTerms:
    """What was agreed with a peer, and what its connections were given."""

    def __init__(self, limits: LayerLimits) -> None:
        self._limits = limits
        self.frame_bytes = limits.frame_bytes
        """Largest piece that both sides take."""
        self.window_bytes = limits.window_bytes
        """What the other side takes of layers that it has not granted anything of."""
        self._poured_bytes: list[int] = []

    def agree(self, hello: LayerHello, connections: int) -> None:
        """Note what the other side said of itself."""
        self.frame_bytes = min(self._limits.frame_bytes, hello.frame_bytes)
        self.window_bytes = hello.window_bytes
        self._poured_bytes = [0] * (connections - 1)

    def choose_connection(self, size_bytes: int) -> int:
        """Return the connection for a layer: the one that was given the fewest bytes."""
        least = min(range(len(self._poured_bytes)), key=self._poured_bytes.__getitem__)
        self._poured_bytes[least] += size_bytes
        return 1 + least


LayerLink = PeerLink[LayerTerms]


def tell(link: LayerLink | None, connection: int, head: bytes, piece: "memoryview | bytes | None" = None) -> None:
    """Hand a message to a connection; the piece must not change until it has left. One that is gone drops it."""
    if link is None or not link.up:
        return
    with contextlib.suppress(zmq.ZMQError):  # the monitor tells of it in a moment
        link.send(connection, [head] if piece is None else [head, piece], copy=piece is None)
