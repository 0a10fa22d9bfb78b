"""Who came to the listening side and went again: counts connections that were cut off before they were anybody's.

libzmq closes by itself what speaks no ZeroMQ, cannot prove a key, or announces a frame over the limit; all that it tells
is that a connection was accepted and that it ended. Both name its file descriptor, and so does every frame that comes
by it: that is enough to know which connections ended without ever having spoken, and which without a goodbye.
"""

from enum import Enum, auto

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Visitors"]


class _Stand(Enum):
    SILENT = auto()
    """Accepted; no frame has come by it."""
    SPEAKING = auto()
    LEAVING = auto()
    """It has said goodbye."""


class Visitors:
    """Follows the connections of a listening socket; owned by the thread of the sockets."""

    def __init__(self, listener: "zmq.Socket[bytes]") -> None:
        self._listener = listener
        self.socket: zmq.Socket[bytes] = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stands: dict[int, _Stand] = {}
        self._events: list[tuple[int, int]] = []
        self._turned_away = 0

    def note_turned_away(self) -> None:
        """Expect a connection to end because its key was refused: that is counted already."""
        self._turned_away += 1

    def note_frame(self, frame: "zmq.Frame", *, leaves: bool) -> None:
        """Take note of a frame: its connection is past the handshake, and may have said goodbye."""
        descriptor = frame.get(zmq.SRCFD)
        if isinstance(descriptor, int) and self._stands.get(descriptor) is not _Stand.LEAVING:
            self._stands[descriptor] = _Stand.LEAVING if leaves else _Stand.SPEAKING

    def listen(self) -> None:
        """Read what happened. Its meaning is known when all frames that came before have been noted: see `judge`."""
        while self.socket.poll(0):
            event = parse_monitor_message(self.socket.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                # The descriptor's connection before has ended, and that was read before.
                yield_to = (zmq.EVENT_ACCEPTED, int(event["value"]))
                self._events.append(yield_to)
            else:
                self._events.append((zmq.EVENT_DISCONNECTED, int(event["value"])))
