"""The file operations of checkpoints, each one a call, so that a test can end the program between any two of them."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

_PARTIAL = ".partial"


class Storage(Protocol):
    """What a save does to the disk, in single steps."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those that it lies in."""

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; an old one of this name is emptied."""

    def append(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        """Write at the end of a file."""

    def sync(self, stream: BinaryIO) -> None:
        """Wait until the file is on the disk, and close it."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name, in the place of another one of that name."""

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty folder."""


class Disk:
    """The real one."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those that it lies in."""
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; an old one of this name is emptied."""
        return path.open("wb")

    def append(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        """Write at the end of a file."""
        stream.write(data)

    def sync(self, stream: BinaryIO) -> None:
        """Wait until the file is on the disk, and close it."""
        with stream:
            stream.flush()
            os.fsync(stream.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name, in the place of another one of that name."""
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty folder; another device of this machine may have done so before."""
        with suppress(FileNotFoundError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def write_named(
    storage: Storage, folder: Path, label: str, pieces: Iterable[bytes | memoryview], named: Callable[[str], str]
) -> tuple[str, str, int]:
    """Write a file under a passing name, and give it its own one when it is whole.

    Args:
        storage: where the folder lies.
        folder: to write into.
        label: tells the passing name from those of others that write at the same time.
        pieces: of the content.
        named: SHA-256 of the content -> the file's own name.

    Returns:
        Name, SHA-256 and bytes.

    Raises:
        OSError: it cannot be written.
    """
    partial = folder / f".{label}{_PARTIAL}"
    try:
        sha256, size_bytes = _write_whole(storage, partial, pieces)
        name = named(sha256)
        storage.rename(partial, folder / name)
        storage.sync_folder(folder)
    except OSError:
        with suppress(OSError):
            storage.remove(partial)  # or it would keep a full disk full
        raise
    return name, sha256, size_bytes


def remove_partials(storage: Storage, checkpoints: Path) -> None:
    """Remove what writers left that were ended in the middle of a file, from the folders of all steps.

    Raises:
        OSError: something cannot be removed.
    """
    for path in sorted((*checkpoints.glob(f".*{_PARTIAL}"), *checkpoints.glob(f"step-*/.*{_PARTIAL}"))):
        storage.remove(path)


def _write_whole(storage: Storage, path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file, all of it on the disk when this returns; return its SHA-256 and its size in bytes."""
    digest = hashlib.sha256()
    size = 0
    stream = storage.create(path)
    try:
        for piece in pieces:
            storage.append(stream, piece)
            digest.update(piece)
            size += len(piece)
        storage.sync(stream)
    finally:
        stream.close()
    return digest.hexdigest(), size
