"""Who is silent for too long: the decision (pure), and a worker's thread that is not silent."""

import threading
import time
from collections.abc import Callable
from typing import Any

from spantrain.errors import PeerLostError, SpanTrainError
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.client import ControlClient, PendingCall
from spantrain.transport.control.protocol import HEARTBEAT

_COORDINATOR = "the coordinator"
_PAUSE_S = 1.0
"""Who has not looked for so long was not running: in that time nobody could be heard."""
_GRACE_S = 2.0
"""How long after such a pause everybody is given to be heard again."""
_REDIAL_S = 1.0
"""A beat that is not answered by then is sent on a new connection as well: TCP tries an old one again after times that
double, so that after a silence of four seconds it may take as many more to find out that the network is back."""
_LOOK_S = 0.25
_MAX_TRIES = 4
"""So many connections at once: each is given as many times `_REDIAL_S` for its handshake and the answer."""


class FailureDetector:
    """Decide who is lost; time is an argument, on any one clock. Not for several threads at once.

    >>> detector = FailureDetector(5.0)
    >>> detector.on_heartbeat(0.0, "edge-1"); detector.on_heartbeat(3.0, "edge-2")
    >>> detector.lost(5.0), detector.lost(6.0)
    ((), (('edge-1', 'no heartbeat for 6.0 s, limit 5.0 s'),))

    Ask often: who asks after a pause of its own, in which it heard nobody, gives everybody two seconds more.

    >>> detector.on_heartbeat(6.0, "edge-1"); detector.on_heartbeat(6.0, "edge-2")
    >>> detector.lost(20.0), detector.lost(21.0), detector.lost(21.9), [peer for peer, _ in detector.lost(22.1)]
    ((), (), (), ['edge-1', 'edge-2'])
    """

    def __init__(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._last_s: dict[str, float] = {}
        self._not_before_s: float | None = None
        """Before then nobody is lost."""
        self._asked_s: float | None = None

    def on_heartbeat(self, now_s: float, peer: str) -> None:
        """Note a sign of life; the first one begins the watch, so note a peer when it joins."""
        self._last_s[peer] = max(now_s, self._last_s.get(peer, now_s))

    def forget(self, peer: str) -> None:
        """Watch a peer no more: it has left, or its loss has been dealt with."""
        self._last_s.pop(peer, None)

    def silence_s(self, now_s: float, peer: str) -> float:
        """Return for how long nothing was heard of a peer; without end if it is not watched."""
        return now_s - self._last_s[peer] if peer in self._last_s else float("inf")

    def lost(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return who has been silent for longer than the limit and why that is so, longest first, until forgotten."""
        if self._asked_s is not None and now_s - self._asked_s > _PAUSE_S:
            self._not_before_s = now_s + min(_GRACE_S, self._timeout_s)
        self._asked_s = now_s
        if self._not_before_s is not None and now_s < self._not_before_s:
            return ()
        silent = [(now_s - last_s, peer) for peer, last_s in self._last_s.items() if now_s - last_s > self._timeout_s]
        return tuple(
            (peer, f"no heartbeat for {silence_s:.1f} s, limit {self._timeout_s:.1f} s")
            for silence_s, peer in sorted(silent, key=lambda entry: (-entry[0], entry[1]))
        )


class _Beat:
    """One sign of life on its way, on as many connections as it takes."""

    def __init__(self, client: ControlClient, *, timeout_s: float, wake: Callable[[], None]) -> None:
        """`client` makes connections, each of which may take `timeout_s`; `wake` is called when one has ended."""
        self._client = client
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
        self._tries.append((line, line.begin(HEARTBEAT, {}, timeout_s=self._timeout_s, done=self._wake)))
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
                line.close()
        return None

    def close(self) -> None:
        """Give up the other connections."""
        for line, _ in self._tries:
            line.close()


class HeartbeatThread:
    """Call `heartbeat` again and again, keep the last answer, and notice when the coordinator is gone.

    Beats have a connection of their own, and a new one as soon as the one before does not answer.
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
        self._detector = FailureDetector(timeout_s)
        self._line: ControlClient | None = None
        """The connection that answered last."""
        self._stop = threading.Event()
        self._news = threading.Event()
        """Something that this thread waits for has happened."""
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._answer: dict[str, Any] = {}
        self._lost: str | None = None
        self._thread = ReliedOnThread(self._run, name="heartbeat", died=self._lose)

    def start(self) -> None:
        """Begin."""
        self._detector.on_heartbeat(time.monotonic(), _COORDINATOR)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._news.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def answer(self) -> dict[str, Any]:
        """The coordinator's last answer; empty before the first."""
        with self._lock:
            return self._answer

    @property
    def coordinator_lost(self) -> str | None:
        """Why the coordinator must be taken for lost, or None while it is there. Once lost, this thread has ended."""
        with self._lock:
            return self._lost

    def await_loss(self, timeout_s: float) -> bool:
        """Wait for so long at the most; return whether the coordinator must be taken for lost."""
        return self._gone.wait(timeout_s)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set() and self.coordinator_lost is None:
            beat = _Beat(self._client, timeout_s=self._timeout_s, wake=self._news.set)
            try:
                self._bring(beat)
            except SpanTrainError as error:
                self._lose(str(error))
            finally:
                beat.close()
            # To an absolute time, but never in a burst to make up for beats that a slow link has held.
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._stop.wait(due_s - time.monotonic())
        if self._line is not None:
            self._line.close()

    def _bring(self, beat: _Beat) -> None:
        """Bring one beat through.

        Raises:
            SpanTrainError: the coordinator refuses, or is lost.
        """
        line, self._line = self._line, None
        beat.send(line, time.monotonic())
        while not self._stop.is_set():
            self._news.wait(min(_LOOK_S, max(0.0, beat.due_s - time.monotonic())))
            self._news.clear()
            found = beat.answer()
            if found is not None:
                self._line, answer = found
                self._hear(answer)
                return
            now_s = time.monotonic()
            for _, reason in self._detector.lost(now_s):
                said = beat.trouble or "it does not answer"
                raise PeerLostError(f"the coordinator at {self._client.address} was lost: {reason}; {said}")
            if now_s >= beat.due_s:
                beat.send(None, now_s)

    def _hear(self, answer: dict[str, Any]) -> None:
        self._detector.on_heartbeat(time.monotonic(), _COORDINATOR)
        with self._lock:
            self._answer = answer
        self._on_change()

    def _lose(self, reason: str) -> None:
        if self._stop.is_set():
            return
        with self._lock:
            self._lost = reason
        self._gone.set()
        self._on_change()
