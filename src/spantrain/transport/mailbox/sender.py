"""What goes out: control frames first, then chunks of small messages, then of large ones, as far as there is room."""

import time
import zlib

from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.links import Link, frame_overhead_bytes
from spantrain.transport.mailbox.outbox import Parcel
from spantrain.transport.mailbox.wire import BULK, EXPRESS, Chunk, encode_acknowledgement, encode_chunk

_BURST = 64


class Sender:
    """Moves frames from the exchange to links; used by the thread of the sockets, with the exchange's lock held."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._overhead_bytes = frame_overhead_bytes(exchange.encrypted)

    def flush(self, link: Link) -> bool:
        """Send what may be sent; return False if there was no room for something.

        Raises:
            zmq.ZMQError: the connection is gone.
        """
        while link.control:
            if not link.send_control(link.control[0]):
                return False
            del link.control[0]
        known = link.known
        self.acknowledge(link)
        roomy = not link.control
        for track in (EXPRESS, BULK):
            for _ in range(_BURST):
                parcel = known.outbox.peek(track, time.monotonic())
                if parcel is None:
                    break
                if not self._send_chunk(link, parcel):
                    roomy = False
                    break
                known.outbox.advance(parcel)
            else:
                self._exchange.dirty.add(known.peer.name)
        return roomy

    def acknowledge(self, link: Link) -> None:
        """Tell the peer what has come, if that is news.

        Raises:
            zmq.ZMQError: the connection is gone.
        """
        inbox = link.known.inbox
        if inbox.acknowledgement_due:
            self._control(link, encode_acknowledgement(inbox.take_acknowledgement()))

    def _send_chunk(self, link: Link, parcel: Parcel) -> bool:
        piece = parcel.payload.piece(parcel.offset, parcel.length)
        checksum = 0 if self._exchange.encrypted else zlib.crc32(piece)
        head = encode_chunk(Chunk(parcel.track, parcel.number, parcel.offset, checksum, parcel.header))
        sent = (link.send_express if parcel.track == EXPRESS else link.send_bulk)([head, piece])
        if sent:
            link.known.count(wire_bytes_sent=len(head) + len(piece) + 2 * self._overhead_bytes)
        return sent

    def _control(self, link: Link, frame: bytes) -> None:
        link.control.append(frame)
        link.known.count(wire_bytes_sent=len(frame) + self._overhead_bytes)
        if len(link.control) == 1 and link.send_control(frame):
            link.control.clear()
