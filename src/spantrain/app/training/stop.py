"""What a user asks of a run while it goes on: to stop, or to save."""

import threading


class StopRequest:
    """Ctrl-C: the first asks for a checkpoint and a clean end, the second for an end at once.

    Before the first step there is nothing to save: then the first asks for an end at once, too.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.RLock()  # a signal may come while one is counted
        self._save = False
        self.begun = False
        """Whether the first step has begun."""

    def ask(self) -> bool:
        """Count one more request to stop; return whether it is one for an end at once."""
        with self._lock:
            self._count += 1
            return self.at_once or not self.begun

    def ask_save(self) -> None:
        """Wish for a checkpoint behind the next step that ends."""
        self._save = True

    def take_save(self) -> bool:
        """Return whether a checkpoint was asked for since it was last asked."""
        wanted, self._save = self._save, False
        return wanted

    @property
    def wanted(self) -> bool:
        """Whether the run should end after this step."""
        return self._count > 0

    @property
    def at_once(self) -> bool:
        """Whether the run should end now."""
        return self._count > 1
