"""Who may connect: the answering side of ZeroMQ's authentication (ZAP, RFC 27).

CURVE alone accepts any client that knows the server's key. This admits the public keys of known peers only, and ties
what comes by a connection to the peer's name through the `User-Id` of each frame.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from spantrain.transport.connection.bounds import Refusal

_ENDPOINT = "inproc://zeromq.zap.01"
_MOST_WAITING = 64
"""That may wait to be known; more are refused at once."""


@dataclass(frozen=True, kw_only=True)
class _Question:
    """Of ZeroMQ: whether a key may come in."""

    route: bytes
    number: bytes
    public_key: str
    """Empty where nothing was proved."""
    until_s: float
    """How long its answer may wait for the key to be known."""


class Admission:
    """Answers ZeroMQ's questions about connections; owned by the thread of the sockets."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", name_of: Callable[[str], str | None], *, early_s: float = 0.0
    ) -> None:
        """`early_s`: how long who is not known waits before it is refused: it may only be early."""
        self._name_of, self._early_s = name_of, early_s
        self._waiting: list[_Question] = []
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    @property
    def due_s(self) -> float:
        """When to answer, at the latest; infinite where nobody waits."""
        return min((one.until_s for one in self._waiting), default=math.inf)

    def answer(self) -> list[Refusal]:
        """Answer what was asked, but for those who are not known and may be early; return the refusals."""
        self._hear()
        now_s = time.monotonic()
        asked, self._waiting = self._waiting, []
        refusals: list[Refusal] = []
        for question in asked:
            name = self._name_of(question.public_key) if question.public_key else None
            if name is None and now_s < question.until_s and len(self._waiting) < _MOST_WAITING:
                self._waiting.append(question)
                continue
            if name is None:
                refusals.append(Refusal("unknown peer", "its key is not among those of the current generation"))
            # With 400 the other side's ZeroMQ would give up for good; with 300 it may dial again: it may only be early.
            verdict = [b"300", b"unknown peer", b""] if name is None else [b"200", b"OK", name.encode()]
            self.socket.send_multipart([question.route, b"", b"1.0", question.number, *verdict, b""])
        return refusals

    def _hear(self) -> None:
        while True:
            try:
                request: list[bytes] = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            # ZeroMQ itself asks: the form is given
            route, _, version, number, _, _, _, mechanism, *credentials = request
            proved = version == b"1.0" and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
            key = z85.encode(credentials[0]).decode() if proved else ""
            until_s = time.monotonic() + self._early_s
            self._waiting.append(_Question(route=route, number=number, public_key=key, until_s=until_s))

    def close(self) -> None:
        """Stop answering."""
        self.socket.close()
