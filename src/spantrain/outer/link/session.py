"""One connection to the master: batches of events that arrive once and in order, notices that are heard once.

Calls are numbered and begun again when their answer was lost, so a connection outlives a short failure of the network.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.control.client import ControlClient, PendingCall
from spantrain.transport.control.protocol import MESSAGE_LIMIT_BYTES, decode

HOLD_S = 5.0
"""So long the master holds a call that listens, when there is nothing to tell."""
MAX_BATCH = 1000
"""Events that are told in one message."""
_MIN_PATIENCE_S = 2.0
_PAUSE_S = 0.1
"""Between a call that was lost and the next."""

_log = logging.getLogger(__name__)


class LinkSession:
    """For one thread, which calls `poll` when it is woken, and at `again_s`."""

    def __init__(self, client: ControlClient, number: int, *, patience_s: float, wake: Callable[[], None]) -> None:
        """`patience_s`: without an answer, until the connection is taken for lost. `wake`: called in other threads."""
        patience_s = max(patience_s, _MIN_PATIENCE_S)
        self._client = client
        self._number = number
        self._telling = _Repeated(client, "tell", patience_s, wake)
        self._listening = _Repeated(client, "listen", HOLD_S + patience_s, wake)
        self._batch = 0
        self._heard = 0

    @property
    def sending(self) -> bool:
        """Whether the last batch was not answered yet."""
        return self._telling.busy

    @property
    def again_s(self) -> float:
        """When to call `poll`, if nothing wakes before."""
        return min(self._telling.again_s, self._listening.again_s)

    def send(self, events: list[dict[str, Any]]) -> None:
        """Send a batch."""
        self._batch += 1
        self._telling.begin({"connection": self._number, "batch": self._batch, "events": events})

    def poll(self, now_s: float) -> list[dict[str, Any]]:
        """Go on with what is under way; return the notices that came.

        Raises:
            SpanTrainError: the connection has ended.
        """
        answer = self._telling.poll(now_s)
        refused = answer.get("refused") if answer else None
        if isinstance(refused, list):
            for reason in refused[:5]:
                _log.warning("the master refused what was told: %s", str(reason)[:500])
        heard = self._listening.poll(now_s)
        if self._listening.busy:
            return []
        notices = self._new(heard) if heard is not None else []
        self._listening.begin({"connection": self._number, "after": self._heard})
        return notices

    def _new(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        match answer:
            case {"first": int(first), "notices": list(bodies)} if first <= self._heard + 1:
                new = bodies[self._heard + 1 - first :]
                self._heard = max(self._heard, first + len(bodies) - 1)
                if not all(isinstance(body, bytes) for body in new):
                    raise ProtocolError("a notice of the master is not bytes")
                return [decode(body, limit_bytes=MESSAGE_LIMIT_BYTES) for body in new]
        raise ProtocolError("the master's answer to listening lacks the next notices")

    def leave(self, timeout_s: float) -> None:
        """Say goodbye.

        Raises:
            SpanTrainError: it was not heard.
        """
        self._client.call("leave", {}, timeout_s=max(0.05, timeout_s))


class _Repeated:
    """One call at a time, begun again until it is answered."""

    def __init__(self, client: ControlClient, method: str, patience_s: float, wake: Callable[[], None]) -> None:
        self._client = client
        self._method = method
        self._patience_s = patience_s
        self._wake = wake
        self._payload: dict[str, Any] | None = None
        self._call: PendingCall | None = None
        self._since_s = 0.0
        self.again_s = float("inf")
        """When to begin a call again that was lost."""

    @property
    def busy(self) -> bool:
        """Whether a call was begun and not answered."""
        return self._payload is not None

    def begin(self, payload: dict[str, Any]) -> None:
        assert not self.busy
        self._payload, self._since_s = payload, time.monotonic()
        self._start()

    def _start(self) -> None:
        assert self._payload is not None
        self.again_s = float("inf")
        self._call = self._client.begin(self._method, self._payload, timeout_s=self._patience_s, done=self._wake)

    def poll(self, now_s: float) -> dict[str, Any] | None:
        """Return the answer, if it has come.

        Raises:
            SpanTrainError: it was refused, or did not come for too long.
        """
        if self._call is None:
            if self.busy and now_s >= self.again_s:
                self._start()
            return None
        if not self._call.ended:
            return None
        call, self._call = self._call, None
        try:
            answer = call.result()
        except PeerLostError as error:
            if now_s - self._since_s >= self._patience_s:
                raise
            _log.debug("%s is called again: %s", self._method, error)
            self.again_s = now_s + _PAUSE_S
            return None
        self._payload = None
        return answer
