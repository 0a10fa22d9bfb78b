"""What the master has for one member, until the member says that it has it."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from spantrain.transport.control.codec import encode
from spantrain.transport.control.protocol import MESSAGE_LIMIT_BYTES, RemoteRefusal

_NOTICE_LIMIT_BYTES = MESSAGE_LIMIT_BYTES - 2**16
_WAITING_BYTES = 64 * 2**20
"""Of all notices that wait for a member."""
_ANSWER_BYTES = 2 * 2**20
"""After so much an answer is sent, and the next asked for."""


class NoticeQueue:
    """Notices numbered from 1; safe from any thread.

    A notice is kept until a later `take` says that it arrived, so an answer that is lost on its way is given again.

    >>> outbox = Outbox(limit=10)
    >>> outbox.put({"kind": "x"}), outbox.put({"kind": "y"})
    (True, True)
    >>> first, notices = outbox.take(0, timeout_s=0.0)
    >>> first, len(notices), outbox.take(1, timeout_s=0.0)[0]
    (1, 2, 2)
    """

    def __init__(self, *, limit: int) -> None:
        """`limit`: notices that may wait; of their bytes no more than `_WAITING_BYTES`, but for one."""
        self._limit = limit
        self._waiting_bytes = 0
        self._first = 1
        self._waiting: deque[bytes] = deque()
        self._ended: str | None = None
        self._changed = threading.Condition()

    def put(self, notice: Mapping[str, Any]) -> bool:
        """Add a notice; return whether there was room.

        Raises:
            ProtocolError: it is too large for a message.
        """
        body = encode(dict(notice), limit_bytes=_NOTICE_LIMIT_BYTES)
        with self._changed:
            if len(self._waiting) >= self._limit or self._waiting_bytes > _WAITING_BYTES:
                return False
            self._waiting.append(body)
            self._waiting_bytes += len(body)
            self._changed.notify_all()
            return True

    def end(self, reason: str) -> None:
        """Drop all; whoever takes is refused with this reason."""
        with self._changed:
            self._ended = self._ended or reason
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def take(self, after: int, *, timeout_s: float) -> tuple[int, list[bytes]]:
        """Drop notices up to `after`; wait for one; return the number of the first, and those that wait, encoded.

        Raises:
            RemoteRefusal: it was ended, or `after` is a number that was not given out.
        """
        with self._changed:
            if not self._first - 1 <= after < self._first + len(self._waiting):
                raise RemoteRefusal(self._ended or f"there is no notice {after}: begin a new connection")
            for _ in range(after - self._first + 1):
                self._waiting_bytes -= len(self._waiting.popleft())
            self._first = after + 1
            self._changed.wait_for(lambda: self._waiting or self._ended, timeout_s)
            if self._ended:
                raise RemoteRefusal(self._ended)
            return self._first, self._some()

    def _some(self) -> list[bytes]:
        taken: list[bytes] = []
        size_bytes = 0
        for body in self._waiting:
            if taken and size_bytes + len(body) > _ANSWER_BYTES:
                break
            taken.append(body)
            size_bytes += len(body)
        return taken
