"""Who is silent for too long: the decision (pure), and a worker's thread that is not silent."""

import threading
import time
from collections.abc import Callable
from typing import Any

from spantrain.errors import PeerLostError, SpanTrainError
from spantrain.transport.control.client import ControlClient
from spantrain.transport.threads import ReliedOnThread

__all__ = ["HEARTBEAT", "FailureDetector", "HeartbeatThread"]

HEARTBEAT = "heartbeat"
_COORDINATOR = "the coordinator"


class FailureDetector:
    """Decide who is lost; time is an argument, on any one clock. Not for several threads at once.

    >>> detector = FailureDetector(5.0)
    >>> detector.on_heartbeat(0.0, "edge-1"); detector.on_heartbeat(3.0, "edge-2")
    >>> detector.lost(5.0), detector.lost(6.0)
    ((), (('edge-1', 'no heartbeat for 6.0 s, limit 5.0 s'),))
    """

    def __init__(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._last_s: dict[str, float] = {}

    def on_heartbeat(self, now_s: float, peer: str) -> None:
        """Note a sign of life; the first one begins the watch, so note a peer when it joins."""
        self._last_s[peer] = max(now_s, self._last_s.get(peer, now_s))

    def forget(self, peer: str) -> None:
        """Watch a peer no more: it has left, or its loss has been dealt with."""
        self._last_s.pop(peer, None)

    def lost(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return who has been silent for longer than the limit and why that is so, longest first, until forgotten."""
        silent = [(now_s - last_s, peer) for peer, last_s in self._last_s.items() if now_s - last_s > self._timeout_s]
        return tuple(
            (peer, f"no heartbeat for {silence_s:.1f} s, limit {self._timeout_s:.1f} s")
            for silence_s, peer in sorted(silent, key=lambda entry: (-entry[0], entry[1]))
        )


class HeartbeatThread:
    """Call `heartbeat` again and again, keep the last answer, and notice when the coordinator is gone."""

    def __init__(
        self,
        client: ControlClient,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 8.0,
        status: Callable[[], dict[str, Any]] = dict,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`status`: what to tell with each beat. `on_change`: called in this thread after each answer and on a loss."""
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._status = status
        self._on_change = on_change
        self._detector = FailureDetector(timeout_s)
        self._stop = threading.Event()
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
        """End, after the beat that is on its way; close the client first to cut that short."""
        self._stop.set()
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
        while not self._stop.is_set():
            self._beat()
            if self.coordinator_lost is not None:
                return
            # To an absolute time, but never in a burst to make up for beats that a slow link has held.
            due_s = max(due_s + self._interval_s, time.monotonic())
            self._stop.wait(due_s - time.monotonic())

    def _lose(self, why: str) -> None:
        with self._lock:
            self._lost = why
        self._gone.set()

    def _beat(self) -> None:
        lost: str | None = None
        try:
            answer = self._client.call(HEARTBEAT, self._status(), timeout_s=self._timeout_s / 2)
        except PeerLostError as error:
            silent = self._detector.lost(time.monotonic())
            if not silent:
                return
            lost = f"{silent[0][1]}: {error}"
        except SpanTrainError as error:
            lost = str(error)
        else:
            self._detector.on_heartbeat(time.monotonic(), _COORDINATOR)
            with self._lock:
                self._answer = answer
        if self._stop.is_set():
            return
        if lost is not None:
            self._lose(lost)
        if self._on_change is not None:
            self._on_change()
