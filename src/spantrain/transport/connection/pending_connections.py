"""Who came to the listening side and went again: what libzmq cuts off by itself is counted here.

libzmq closes what speaks no ZeroMQ, does not prove a key, or announces a frame over the limit, and tells only that a
connection was accepted and that it ended. Both events name its file descriptor, and so does each frame that came by it:
enough to know which connections ended without ever having spoken, and which without a goodbye.
"""

from enum import Enum, auto

import zmq
from zmq.utils.monitor import parse_monitor_message

from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.mailbox.wire import MAX_FRAME_BYTES


class _Stand(Enum):
    SILENT = auto()
    """Accepted, and no frame has come by it: the handshake is not over."""
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

    def note_turned_away(self, count: int) -> None:
        """Expect connections to end because their keys were refused: that is counted already."""
        self._turned_away += count

    def note_frame(self, frame: "zmq.Frame", *, leaves: bool) -> None:
        """Take note of a frame: its connection is past the handshake, and may be saying goodbye."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # libzmq does not know it for peers of ZeroMQ's first protocol, which is none of ours
        if self._stands.get(descriptor) is not _Stand.LEAVING:
            self._stands[descriptor] = _Stand.LEAVING if leaves else _Stand.SPEAKING

    def listen(self) -> None:
        """Read what happened; `judge` says what it means, once all frames that came before have been noted."""
        while self.socket.poll(0):
            event = parse_monitor_message(self.socket.recv_multipart())
            self._events.append((int(event["event"]), int(event["value"])))

    def judge(self) -> list[Refusal]:
        """Return what is to be counted of the events read so far."""
        events, self._events = self._events, []
        refusals = []
        for event, descriptor in events:
            if event == zmq.EVENT_ACCEPTED:
                self._stands.setdefault(descriptor, _Stand.SILENT)
            elif (refusal := self._ended(self._stands.pop(descriptor, _Stand.SILENT))) is not None:
                refusals.append(refusal)
        return refusals

    def _ended(self, stand: _Stand) -> Refusal | None:
        if stand is _Stand.LEAVING:
            return None
        if stand is _Stand.SPEAKING:
            return Refusal(
                "cut off",
                f"a connection ended without a goodbye: it broke, or announced a frame over {MAX_FRAME_BYTES} bytes",
            )
        if self._turned_away:
            self._turned_away -= 1
            return None
        return Refusal("handshake", "a connection ended before it had spoken ZeroMQ and proved its key")

    def close(self) -> None:
        """Stop following."""
        self._listener.disable_monitor()
        self.socket.close(linger=0)
