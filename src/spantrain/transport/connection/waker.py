"""How other threads wake the one that owns the sockets, which waits in a poll."""

import socket as sockets


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
        try:
            self._out.send(b"\0")
        except (BlockingIOError, OSError):
            return  # it has been told already, or has stopped

    def drain(self) -> None:
        """Take note of all that woke it; called by the thread."""
        try:
            while self._in.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """End; who wakes it after that wakes nobody."""
        self._in.close()
        self._out.close()
