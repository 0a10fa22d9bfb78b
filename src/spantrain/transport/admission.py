"""Who may connect: the answering side of ZeroMQ's authentication (ZAP, RFC 27).

CURVE alone accepts any client that knows the server's key. This admits the public keys of known peers only, and ties
what comes by a connection to the peer's name through the `User-Id` of each frame.
"""

from collections.abc import Callable

import zmq
from zmq.utils import z85

from spantrain.transport.bounds import Refusal

__all__ = ["Admission"]

_ENDPOINT = "inproc://zeromq.zap.01"


class Admission:
    """Answers ZeroMQ's questions about connections; owned by the thread of the sockets."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", name_of: Callable[[str], str | None]) -> None:
        self._name_of = name_of
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def answer(self) -> list[Refusal]:
        """Answer what was asked; return the refusals."""
        refusals: list[Refusal] = []
        while True:
            try:
                request: list[bytes] = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return refusals
            name = self._judge(request)
            if name is None:
                refusals.append(Refusal("unknown peer", "its key is not among those of the current generation"))
            # With 400 the other side's ZeroMQ would give up for good; with 300 it may dial again: it may only be early.
            verdict = [b"300", b"unknown peer", b""] if name is None else [b"200", b"OK", name.encode()]
            self.socket.send_multipart([b"1.0", request[1], *verdict, b""])

    def _judge(self, request: list[bytes]) -> str | None:
        version, _, _, _, _, mechanism, *credentials = request  # ZeroMQ itself asks: the form is given
        if version != b"1.0" or mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return None
        return self._name_of(z85.encode(credentials[0]).decode())

    def close(self) -> None:
        """Stop answering."""
        self.socket.close()
