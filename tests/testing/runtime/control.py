"""The control plane in memory."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from spantrain.config.files.json_codec import to_json
from spantrain.runtime.control.plane import AGAIN, Request, read_answer
from spantrain.transport.control.protocol import MESSAGE_LIMIT_BYTES, Handler, decode, encode

A = TypeVar("A")


class MemoryControlPlane:
    """The control plane within one process: what is asked goes through the same forms, and over no network."""

    def __init__(self, handlers: Mapping[str, Handler], peer: str, *, check: Callable[[], None] = lambda: None) -> None:
        """Ask as a worker of this name; `check` raises when the order is over."""
        self._handlers = handlers
        self._peer = peer
        self._check = check

    def ask(self, request: Request[A]) -> A:
        """Return the answer, once there is one."""
        payload = encode(to_json(request), limit_bytes=MESSAGE_LIMIT_BYTES)
        while True:
            answer = self._handlers[request.wire_name](self._peer, decode(payload, limit_bytes=MESSAGE_LIMIT_BYTES))
            if not answer.get(AGAIN):
                return read_answer(
                    request, decode(encode(answer, limit_bytes=MESSAGE_LIMIT_BYTES), limit_bytes=MESSAGE_LIMIT_BYTES)
                )
            self._check()
