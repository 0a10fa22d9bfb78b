"""What comes in on a link that is up: chunks and acknowledgements, handed to the exchange."""

import zmq

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.links import Link, frame_overhead_bytes
from spantrain.transport.mailbox.wire import ACK, CHUNK, decode_acknowledgement, decode_chunk


def user_of(frame: "zmq.Frame") -> str:
    """Return the name that admission gave to the key behind a frame."""
    return str(frame.get("User-Id"))


class Receiver:
    """Moves frames from links to the exchange; used by the thread of the sockets."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._overhead_bytes = frame_overhead_bytes(exchange.encrypted)

    def take(self, link: Link, kind: bytes, frames: "list[zmq.Frame]") -> None:
        """Take one message of frames.

        Raises:
            Refusal: it breaks a rule.
        """
        size_bytes = sum(len(frame.buffer) + self._overhead_bytes for frame in frames)
        link.known.count(wire_bytes_received=size_bytes)
        if kind == CHUNK:
            if len(frames) != 2:
                raise Refusal("truncated" if len(frames) < 2 else "malformed", f"a chunk of {len(frames)} frames")
            self._exchange.take_chunk(link.known, decode_chunk(frames[0].buffer), frames[1].buffer)
        elif kind == ACK and len(frames) == 1:
            self._exchange.take_acknowledgement(link.known, decode_acknowledgement(frames[0].buffer))
        else:
            raise Refusal("malformed", f"unknown kind of frame {kind!r} in {len(frames)} parts")
