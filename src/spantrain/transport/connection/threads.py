"""Threads that others rely on: one that ends before its time says why, to those who would wait for it."""

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
