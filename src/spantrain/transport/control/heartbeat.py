"""Whether the coordinator is silent for too long: the decision (pure), and a worker's thread that is not silent."""

import threading
import time
from collections.abc import Callable
from typing import Any

from spantrain.errors import PeerLostError, SpanTrainError
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.client import ControlClient, PendingCall
from spantrain.transport.control.protocol import HEARTBEAT, PRESENCE

_PAUSE_S = 1.0
"""Who has not looked for so long was not running: in that time nobody could be heard."""
_GRACE_S = 2.0
"""How long after such a pause everybody is given to be heard again."""
_REDIAL_S = 1.0
"""A beat that is not answered by then is sent on a new connection as well: TCP tries an old one again after times that
double, so that after a silence of four seconds it may take as many more to find out that the network is back."""
_LOOK_S = 0.25
_AGAIN_S = 0.05
"""After a connection has failed, a new one is tried so soon."""
_EVER_S = 1e7
_MAX_TRIES = 4
"""So many connections at once: each is given as many times `_REDIAL_S` for its handshake and the answer."""


class Silence:
    """Decide whether somebody has been silent for too long; time is an argument, on any one clock.

    >>> silence = Silence(5.0, begun_s=0.0)
    >>> silence.too_long(5.0), silence.too_long(5.5)
    (None, 'no heartbeat for 5.5 s, limit 5.0 s')

    Ask often: who asks after a pause of its own, in which it heard nobody, waits two seconds more.

    >>> silence.heard(6.0)
    >>> silence.too_long(20.0), silence.too_long(21.0), silence.too_long(21.9), silence.too_long(22.1)
    (None, None, None, 'no heartbeat for 16.1 s, limit 5.0 s')
    """

    def __init__(self, limit_s: float, *, begun_s: float) -> None:
        assert limit_s > 0
        self._limit_s = limit_s
        self._heard_s = begun_s
        self._not_before_s = begun_s
        """Before then it is not too long."""
        self._asked_s: float | None = None

    def heard(self, now_s: float) -> None:
        """Note a sign of life."""
        self._heard_s = max(now_s, self._heard_s)

    def too_long(self, now_s: float) -> str | None:
        """Return what is to be said of a silence over the limit."""
        if self._asked_s is not None and now_s - self._asked_s > _PAUSE_S:
            self._not_before_s = now_s + min(_GRACE_S, self._limit_s)
        self._asked_s = now_s
        silence_s = now_s - self._heard_s
        if now_s < self._not_before_s or silence_s <= self._limit_s:
            return None
        return f"no heartbeat for {silence_s:.1f} s, limit {self._limit_s:.1f} s"


class _Beat:
    """One sign of life on its way, on as many connections as it takes."""

    def __init__(
        self, client: ControlClient, payload: dict[str, Any], *, timeout_s: float, wake: Callable[[], None]
    ) -> None:
        """`client` makes connections, each of which may take `timeout_s`; `wake` is called when one has ended."""
        self._client = client
        self._payload = payload
        self._timeout_s = timeout_s
        self._redial_s = min(_REDIAL_S, timeout_s / _MAX_TRIES)
        self._wake = wake
        self._tries: list[tuple[ControlClient, PendingCall]] = []
        self.due_s = 0.0
        """When to send it on a new connection as well."""
        self.trouble = ""
        """What became of the connection that failed last."""

    def send(self, line: ControlClient | None, now_s: float) -> None:
        """Send it on this connection, or on a new one."""
        if len(self._tries) == _MAX_TRIES:
            self._tries.pop(0)[0].close()
        line = line or self._client.another()
        self._tries.append((line, line.begin(HEARTBEAT, self._payload, timeout_s=self._timeout_s, done=self._wake)))
        self.due_s = now_s + self._redial_s

    def answer(self) -> tuple[ControlClient, dict[str, Any]] | None:
        """Return the first answer and the connection that it came on, which is the caller's then; None: none yet.

        Raises:
            SpanTrainError: the coordinator refuses.
        """
        for one in [one for one in self._tries if one[1].ended]:
            self._tries.remove(one)
            line, call = one
            try:
                return line, call.result()
            except PeerLostError as error:
                self.trouble = str(error)
                self.due_s = min(self.due_s, time.monotonic() + _AGAIN_S)
                line.close()
            except SpanTrainError:
                line.close()
                raise
        return None

    def close(self) -> None:
        """Give up the other connections."""
        for line, _ in self._tries:
            line.close()


class HeartbeatThread:
    """Call `heartbeat` again and again, keep the last answer, and notice when the coordinator is gone.

    Beats have a connection of their own, and a new one as soon as the one before does not answer. On the client's, a
    call is held that ends with it: so the coordinator hears at once when this process has ended. It is answered when
    there is news, which the beat that is then sent at once brings.
    """

    def __init__(
        self,
        client: ControlClient,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 8.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: after what silence the coordinator is lost. `on_change`: called in this thread after each
        answer and on a loss.
        """
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._silence = Silence(timeout_s, begun_s=time.monotonic())
        self._presence: PendingCall | None = None
        self._round_trip_s = 0.0
        """How long the last beat took to be answered."""
        self.leaving = ""
        """What beats say of why this process wants to leave."""
        self._line: ControlClient | None = None
        """The connection that answered last."""
        self._stop = threading.Event()
        self._news = threading.Event()
        """Something that this thread waits for has happened."""
        self._hurry = threading.Event()
        """The next beat is to be sent at once: the connection that shows presence has ended, or there is news."""
        self._gone = threading.Event()
        self.answer: dict[str, Any] = {}
        """The coordinator's last answer; empty before the first."""
        self.coordinator_lost: str | None = None
        """Why the coordinator must be taken for lost, or None while it is there. Once lost, this thread has ended."""
        self._thread = ReliedOnThread(self._run, name="heartbeat", died=self._lose)

    def start(self) -> None:
        """Begin."""
        self._silence.heard(time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._news.set()
        self._hurry.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def await_loss(self, timeout_s: float) -> bool:
        """Wait for so long at the most; return whether the coordinator must be taken for lost."""
        return self._gone.wait(timeout_s)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set() and self.coordinator_lost is None:
            beat = _Beat(
                self._client,
                {"round_trip_s": self._round_trip_s, "leaving": self.leaving},
                timeout_s=self._timeout_s,
                wake=self._news.set,
            )
            try:
                self._show_presence()
                self._bring(beat)
            except SpanTrainError as error:
                self._lose(str(error))
            finally:
                beat.close()
            # To an absolute time, but never in a burst to make up for beats that a slow link has held.
            due_s = max(due_s + self._interval_s, time.monotonic())
            if not self._stop.wait(min(_AGAIN_S, due_s - time.monotonic())):
                self._hurry.wait(max(0.0, due_s - time.monotonic()))
        if self._line is not None:
            self._line.close()

    def _show_presence(self) -> None:
        if self._presence is None or self._presence.ended:
            self._hurry.clear()
            self._presence = self._client.begin(PRESENCE, {}, timeout_s=_EVER_S, done=self._hurry.set)

    def _bring(self, beat: _Beat) -> None:
        """Bring one beat through.

        Raises:
            SpanTrainError: the coordinator refuses, or is lost.
        """
        line, self._line = self._line, None
        sent_s = time.monotonic()
        beat.send(line, sent_s)
        while not self._stop.is_set():
            self._news.wait(min(_LOOK_S, max(0.0, beat.due_s - time.monotonic())))
            self._news.clear()
            found = beat.answer()
            if found is not None:
                self._line, self.answer = found
                self._round_trip_s = time.monotonic() - sent_s
                self._silence.heard(time.monotonic())
                self._on_change()
                return
            now_s = time.monotonic()
            reason = self._silence.too_long(now_s)
            if reason is not None:
                said = beat.trouble or "it does not answer"
                raise PeerLostError(f"the coordinator at {self._client.address} was lost: {reason}; {said}")
            if now_s >= beat.due_s:
                beat.send(None, now_s)

    def _lose(self, reason: str) -> None:
        if self._stop.is_set():
            return
        self.coordinator_lost = reason
        self._gone.set()
        self._on_change()
