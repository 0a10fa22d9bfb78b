"""Threads that others rely on: one that ends before its time says why; one that waits in a poll can be woken."""

import contextlib
import socket as sockets
import threading
from collections.abc import Callable

Died = Callable[[str], None]
"""Told, by a thread that ends before its time, which one and why."""


class ReliedOnThread(threading.Thread):
    """Runs until its work is over; whoever owns it decides what to do where a fault ends it before.

    A process of ours ends with the reason, and is started again by what keeps it up; a user's own process is not ended.

    >>> told = []
    >>> thread = ReliedOnThread(lambda: None, name="copier", died=told.append)
    >>> thread.start(); thread.join(); told
    []
    """

    def __init__(self, work: Callable[[], None], *, name: str, died: Died) -> None:
        """`died` is called in the thread itself; then the interpreter prints the traceback."""
        super().__init__(name=name, daemon=True)
        self._work, self._died = work, died

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        except BaseException as error:
            self._died(f"the thread {self.name!r} has ended: {type(error).__name__}: {error}"[:1000])
            raise


class Waker:
    """A byte on its way to a thread that polls for it.

    >>> import select
    >>> waker = Waker()
    >>> waker.wake()
    >>> select.select([waker], [], [], 0)[0] == [waker]
    True
    >>> waker.drain()
    >>> select.select([waker], [], [], 0)[0]
    []
    >>> waker.close()
    """

    def __init__(self) -> None:
        self._out, self._in = sockets.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        """Return what to poll for reading."""
        return self._in.fileno()

    def wake(self) -> None:
        """Wake the thread; any thread may call this."""
        with contextlib.suppress(OSError):  # it has been told already, or has stopped
            self._out.send(b"\0")

    def drain(self) -> None:
        """Take note of all that woke it; called by the thread."""
        with contextlib.suppress(BlockingIOError):
            while self._in.recv(4096):
                pass

    def close(self) -> None:
        """End; who wakes it after that wakes nobody."""
        self._in.close()
        self._out.close()
