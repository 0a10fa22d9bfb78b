"""Gives a run's journal to the worker of the device whose machine is the standby coordinator, as it is written."""

import threading
from collections.abc import Callable
from pathlib import Path

from spantrain.runtime.control.data_requests import FollowJournal, JournalPiece
from spantrain.runtime.control.plane import HOLD_S
from spantrain.runtime.coordinator.roster import printable
from spantrain.transport.control.protocol import RemoteRefusal

_PIECE_BYTES = 2**20
_MOST_MANIFEST = 2**22
"""Characters of a manifest; what is larger is not told: it would not go into a message."""
_PATIENCE_S = 2.0
"""How long a step waits for a copy that was whole; then it is waited for no longer until it is whole again."""


class JournalFeed:
    """Safe from any thread."""

    def __init__(self, device: str, credentials: str, tell: Callable[[str], None]) -> None:
        """Give the journal to a device.

        Args:
            device: that keeps the copy.
            credentials: what workers know this coordinator by; it is to have them.
            tell: hears what a person should know, in any thread.
        """
        self.device = device
        self._credentials, self._tell = credentials, tell
        self._changed = threading.Condition()
        self._path: Path | None = None
        self._size_bytes = 0
        self._copied_bytes = 0
        """So many are on the device's disk."""
        self._is_followed = False
        """Whether its copy has been whole, and steps wait for it."""
        self._newest = JournalPiece(piece=b"")
        """Of all manifests, as it is told."""
        self._ended = False
        self._knows_end = False

    def written(self, path: Path, size_bytes: int) -> None:
        """Note how far the journal has been written; wait until the copy has that, if it had all before."""
        with self._changed:
            self._path, self._size_bytes = path, size_bytes
            self._changed.notify_all()
            if self._is_followed and not self._changed.wait_for(self._is_copied, _PATIENCE_S):
                self._is_followed = False
                self._tell(
                    f"The copy of the journal on {self.device} is behind: steps do not wait for it, and until it is "
                    "whole again the run cannot go on from there"
                )

    def saved(self, step: int, manifest: str) -> None:
        """Note the manifest of a checkpoint that is complete; nothing waits until the copy has it."""
        with self._changed:
            if len(manifest) > _MOST_MANIFEST:
                self._tell(f"{self.device} is not told of the checkpoint after {step} steps: its manifest is too large")
                return
            count = self._newest.manifests + 1
            self._newest = JournalPiece(piece=b"", manifest=manifest, manifest_step=step, manifests=count)
            self._changed.notify_all()

    def end(self) -> None:
        """Have the copy removed: the run has ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            if self._is_followed:
                self._changed.wait_for(lambda: self._knows_end, _PATIENCE_S)

    def answer(self, device: str, request: FollowJournal) -> JournalPiece | None:
        """Return what comes next, once there is more; None: ask again.

        Raises:
            RemoteRefusal: another device keeps the copy, or the journal has not so much.
        """
        with self._changed:
            if device != self.device or not 0 <= request.offset <= self._size_bytes:
                raise RemoteRefusal(f"device {device} keeps no copy of the journal up to {request.offset}")
            self._copied_bytes = request.offset
            self._is_followed = self._is_followed and request.offset > 0
            self._changed.notify_all()
            if self._is_copied() and not self._is_followed:
                self._is_followed = True
                self._tell(
                    f"{self.device} has a copy of the journal: should this machine be lost, go on there by spantrain "
                    f"train --resume {printable(request.folder)} --steps N --listen HOST:PORT, where workers look by "
                    "--or-join HOST:PORT"
                )
            if not self._changed.wait_for(lambda: self._has_more(request), HOLD_S):
                return None
            self._knows_end |= self._ended
            self._changed.notify_all()
            if self._newest.manifests > request.manifests and not self._ended:
                return self._newest
        return self._next(request.offset)

    def _has_more(self, known: FollowJournal) -> bool:
        return self._ended or known.offset != self._size_bytes or known.manifests < self._newest.manifests

    def _is_copied(self) -> bool:
        return 0 < self._size_bytes == self._copied_bytes

    def _next(self, offset: int) -> JournalPiece:
        if self._ended or self._path is None:
            return JournalPiece(piece=b"", ended=self._ended)
        try:
            with self._path.open("rb") as journal:
                journal.seek(offset)
                piece = journal.read(min(_PIECE_BYTES, self._size_bytes - offset))
        except OSError as error:
            raise RemoteRefusal(f"the journal cannot be read: {error.strerror}") from None
        return JournalPiece(piece=piece, credentials="" if offset else self._credentials)
