"""Versions of a shard that outlive it: safetensors files, written whole or not at all, checked when read.

Di-PS, 4.2: each shard keeps several snapshots of its newest versions, to begin again from and for new clusters. Kept:
that. Decided here: a file is named by its version and its digest, `version-12-0a1b2c3d4e5f6789.safetensors`, holds
parameters and what the update rule keeps of each by name, and gets its name when all of it is on disk. It is written
from where the tensors are, with no copy of them, by a thread beside pushes, pulls and updates: as soon as a version is
served, or not at all, since what waited would take memory, or be another on each shard. A writer that is too slow for
every version writes multiples of a power of two, and of older versions those are kept that other shards are the
likeliest to have, too: all must go back to one version.
"""

import errno
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spantrain.config.files.text_files import sha256_of, sync_folder
from spantrain.core.records import Record
from spantrain.formats.tensor_bytes import tensor_pieces
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.connection.threads import Died, ReliedOnThread

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"version-(\d+)-([0-9a-f]{16})\.safetensors")
_PARAMETERS = "parameters"
_DIGITS = 16
"""Of a file's digest, in its name."""


class ShardVersion(Record):
    """One version of a shard's layers; nothing in it is ever changed."""

    version: int
    parameters: Tensors
    state: Mapping[str, Tensors]
    """What the update rule keeps of each parameter, by its slots."""


def to_keep(versions: Iterable[int], keep: int) -> tuple[int, ...]:
    """Return which versions to keep, from the oldest: the last multiples of 1, 2, 4, ..., and then the newest.

    >>> to_keep(range(1, 15), 4)
    (8, 12, 13, 14)
    """
    newest_first = sorted(versions, reverse=True)
    rounds = (next((one for one in newest_first if one % 2**k == 0), None) for k in range(keep))
    kept = {one for one in rounds if one is not None}
    kept |= set([one for one in newest_first if one not in kept][: keep - len(kept)])
    return tuple(sorted(kept))


class SnapshotStore(Protocol):
    """Where versions are kept."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are there, from the oldest."""

    def save(self, version: ShardVersion) -> None:
        """Keep a version, and as many of those before it as fit."""

    def load(self, version: int) -> ShardVersion | None:
        """Return a version; None if it is not there, or turns out damaged, and from then on it is not there."""

    def of_fragment(self, fragment: int) -> "SnapshotStore":
        """Return where versions of a fragment of the layers are kept; of the first it is this."""


class FolderSnapshots:
    """Keeps versions in a folder of its own."""

    def __init__(self, folder: Path, *, keep: int = 4) -> None:
        """Take up what is in the folder, which is made where there is none; what was not finished is removed."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(".unfinished-*"):
            unfinished.unlink()

    def of_fragment(self, fragment: int) -> "FolderSnapshots":
        """Return where versions of a fragment are kept: here those of the first, of others in a folder in this one."""
        return FolderSnapshots(self._folder / f"fragment-{fragment}", keep=self._keep) if fragment else self

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are there, from the oldest."""
        return tuple(sorted(self._files()))

    def _files(self) -> dict[int, Path]:
        named = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return {int(match[1]): path for match, path in named if match}

    def save(self, version: ShardVersion) -> None:
        """Write a version, then remove those that are too many, or before, where room lacks; for one thread at a time.

        Raises:
            OSError: it cannot be written; the newest of what was there before is still there.
        """
        parts = {_PARAMETERS: version.parameters, **version.state}
        tensors = {f"{part}/{name}": one for part, named in parts.items() for name, one in named.items()}
        hidden = self._folder / f".unfinished-{version.version}"
        try:
            path = self._folder / f"version-{version.version}-{_write(hidden, tensors)}.safetensors"
            before = self._files()
            hidden.rename(path)
        except OSError as error:
            held = self._files()
            if error.errno != errno.ENOSPC or len(held) < 2:
                raise
            held[min(held)].unlink()
            self.save(version)
            return
        finally:
            hidden.unlink(missing_ok=True)
        sync_folder(self._folder)
        if version.version in before and before[version.version] != path:
            before[version.version].unlink()
        files = self._files()
        for old in set(files) - set(to_keep(files, self._keep)):
            files[old].unlink()

    def load(self, version: int) -> ShardVersion | None:
        """Return a version; None if it is not there, or is damaged, which is logged, and the file set aside."""
        path = self._files().get(version)
        if path is None:
            return None
        try:
            if not path.name.endswith(f"-{sha256_of(path)[:_DIGITS]}.safetensors"):
                raise SafetensorError("its digest is not that of its name")
            tensors = load_file(path)
        except (SafetensorError, OSError) as reason:
            aside = path.with_name(f"damaged-{path.name}")
            _LOG.warning("snapshot %s cannot be used: %s; set aside as %s", path, reason, aside.name)
            path.rename(aside)
            return None
        parts: dict[str, dict[str, Tensor]] = {_PARAMETERS: {}}
        for key, one in tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = one
        return ShardVersion(version=version, parameters=parts.pop(_PARAMETERS), state=parts)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, to the disk itself; return the digest of it."""
    sha = hashlib.sha256()
    with path.open("wb") as stream:
        for piece in tensor_pieces(tensors):
            sha.update(piece)
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return sha.hexdigest()[:_DIGITS]


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

    def offer(self, version: ShardVersion | None) -> bool:
        """Write a version that is not there now, or not at all; return whether it will be."""
        if version is None or version.version in self._store.versions:
            return False
        with self._changed:
            if self._writing is not None:
                self._offers += 1
            if self._closed or self._writing is not None or version.version % self._period:
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

    def close(self, last: ShardVersion | None = None) -> None:
        """Write the last version, if it is not there, and stop; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if last is not None and last.version not in self._store.versions:
            self._write(last)
