"""A thread that does pieces of work beside the main one, in the order in which they are begun.

Collectives need one order, and the main thread computes on meanwhile. A failure ends it: later pieces would meet others
of their peers', so none of them runs, and who waits for any piece gets the failure.
"""

import queue
import threading
from collections.abc import Callable

from spantrain.errors import SpanTrainError, WorkerError

_POLL_S = 0.25
"""How often one who waits looks whether the run was aborted."""
_END_S = 0.5
"""How long the end waits for a piece under way; a collective whose peers are gone ends by itself, later."""


class Piece:
    """Work that was begun."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.over = threading.Event()


class Background:
    """One thread, which starts with the first piece; a process that ends does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: SpanTrainError | RuntimeError | None = None
        self._closed = False

    def begin(self, work: Callable[[], None]) -> Piece:
        """Have work done when all that was begun before is; return at once."""
        assert not self._closed, f"{self._name}: this thread has ended"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        piece = Piece(work)
        self._pieces.put(piece)
        return piece

    @property
    def has_more(self) -> bool:
        """Whether work waits behind that which is done now."""
        return not self._pieces.empty()

    def wait(self, piece: Piece, check_abort: Callable[[], None]) -> None:
        """Wait until a piece is done.

        Raises:
            SpanTrainError: it failed, or one before it did; or `check_abort` has news.
            RuntimeError: the same, of torch.
        """
        while not piece.over.wait(_POLL_S):
            check_abort()
            if self._thread is not None and not self._thread.is_alive():
                break
        if self._failure is not None:
            raise self._failure
        if not piece.over.is_set():
            raise WorkerError(f"{self._name}: the thread ended before its work; its own log says why")

    def close(self) -> None:
        """End the thread; what has not begun is dropped."""
        self._closed = True
        self._pieces.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if self._failure is None and not self._closed:
                try:
                    piece.work()
                except (SpanTrainError, RuntimeError) as error:
                    self._failure = error
            piece.over.set()
