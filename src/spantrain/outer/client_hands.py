"""One thread that does what a client's session decided: it tells the master, expects and sends layers, in order.

The session decides under its lock, which the link's and the wire's threads, and the training loop, wait for. Nothing is
called under it that might wait for a lock of theirs, or that makes something large.
"""

import logging
import queue
import threading
from collections.abc import Callable

from spantrain.errors import SpanTrainError

__all__ = ["ClientHands"]

_LOG = logging.getLogger(__name__)


class ClientHands:
    """Does pieces of work one after the other; those of a connection that has ended are left out."""

    def __init__(self, name: str) -> None:
        self._pieces: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._connection = 0
        self._thread = threading.Thread(target=self._run, name=f"outer-{name}", daemon=True)
        self._thread.start()

    def do(self, piece: Callable[[], None]) -> None:
        """Have something done when all before it is."""
        self._pieces.put((self._connection, piece))

    def connect(self) -> None:
        """Begin a new connection: what was not done over the one before it is left undone."""
        self._connection += 1

    def close(self) -> None:
        """Do what is left, and end."""
        self._pieces.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._pieces.get()) is not None:
            connection, piece = entry
            if connection != self._connection:
                continue
            try:
                piece()
            except SpanTrainError as error:
                _LOG.warning("outer optimizer: %s; training goes on", error)
            except Exception:  # noqa: BLE001 - the outermost loop of this thread: training goes on, whatever it was
                _LOG.exception("outer optimizer: a fault of its own; training goes on")
