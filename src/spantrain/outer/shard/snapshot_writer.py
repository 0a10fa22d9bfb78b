"""Versions are written down by a thread of their own, beside pushes, pulls and updates.

Di-PS, 4.2: each shard keeps several snapshots. Decided here: a version is written as soon as it is served, or not at
all: what waited would take memory, or be another on each shard. A writer that is too slow for every version writes
multiples of a power of two; so shards of unequal speed still have versions in common.
"""

import logging
import threading
from collections.abc import Callable

from spantrain.outer.shard.snapshots import ShardVersion, SnapshotStore
from spantrain.transport.connection.threads import Died, ReliedOnThread

_LOG = logging.getLogger(__name__)


class SnapshotWriter:
    """Writes the versions that it is offered, when it is free and their turn comes."""

    def __init__(self, store: SnapshotStore, *, name: str, saved: Callable[[int], None], died: Died) -> None:
        """Begin; `saved` is called with each version that is on disk, from the writer's thread.

        `died` is told why that has ended, if a fault ends it.
        """
        self._store, self._name, self._saved = store, name, saved
        self._changed = threading.Condition()
        self._writing: ShardVersion | None = None
        self._offers = 0
        """Since the present one."""
        self._period = 1
        """Multiples of this are written."""
        self._closed = False
        self._thread = ReliedOnThread(self._run, name=f"snapshots of {name}", died=died)
        self._thread.start()

    def offer(self, version: ShardVersion) -> bool:
        """Write a version now, or not at all; return whether it will be."""
        with self._changed:
            if self._closed:
                return False
            if self._writing is not None:
                self._offers += 1
                return False
            if version.version % self._period:
                return False
            self._writing, self._offers = version, 0
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while (version := self._next()) is not None:
            self._write(version)
            with self._changed:
                # So that it is free again when the next multiple comes.
                self._period = 2 ** self._offers.bit_length()
                self._writing = version = None
                self._changed.notify_all()

    def _next(self) -> ShardVersion | None:
        with self._changed:
            self._changed.wait_for(lambda: self._writing is not None or self._closed)
            return self._writing

    def _write(self, version: ShardVersion) -> None:
        try:
            self._store.save(version)
        except OSError as error:
            told = "%s: no snapshot of version %d: %s; make room, or say another folder"
            _LOG.error(told, self._name, version.version, error)
            return
        self._saved(version.version)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; return whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: self._writing is None, timeout_s)

    def close(self, last: ShardVersion | None = None) -> None:
        """Write the last version, if it is not there, and stop; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if last is not None and last.version not in self._store.versions:
            self._write(last)
