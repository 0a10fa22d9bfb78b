"""Files of tensors in the safetensors format: written piece by piece; checked against a digest, read block by block.

The file operations of checkpoints, each one a call, so that a test can end the program between any two of them.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from spantrain.config.files.text_files import check_tensor_header, sha256_of, sync_folder
from spantrain.core.checkpoint import StoredFile
from spantrain.errors import ConfigError
from spantrain.runtime.redistribution.exchange import TensorBlock, place_of


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint after so many steps lies."""
    return checkpoints / f"step-{step}"


class TensorFiles:
    """The files of one checkpoint that lie here; a file's digest is checked before its first tensor is used."""

    def __init__(self, folder: Path, files: Mapping[str, StoredFile]) -> None:
        self.folder = folder
        self.files = files
        self._checked: set[str] = set()
        self.elsewhere: dict[str, Path] = {}
        """Files that lie here under another path."""

    def path(self, name: str) -> Path:
        """Return where a file lies, or would."""
        return self.elsewhere.get(name, self.folder / name)

    def present(self) -> tuple[str, ...]:
        """Return the names of the files that lie here."""
        return tuple(name for name in sorted(self.files) if self.path(name).is_file())

    def check(self, name: str) -> None:
        """Check one file against its digest, once.

        Raises:
            ConfigError: it is missing, truncated or changed.
        """
        if name in self._checked:
            return
        check_file(self.path(name), self.files[name])
        self._checked.add(name)

    def read(self, name: str, blocks: Sequence[TensorBlock]) -> list[torch.Tensor]:
        """Return blocks of the unsplit model's tensors from one file.

        Raises:
            ConfigError: the file is missing or damaged, or is no file of tensors.
        """
        self.check(name)
        path = self.path(name)
        check_tensor_header(path)
        parts = self.files[name].tensors
        try:
            with safe_open(str(path), framework="pt") as content:
                return [
                    _block(content, block.tensor, place_of(block.box, parts[block.tensor].part)) for block in blocks
                ]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: does not hold what its manifest says: {error}") from None


def check_file(path: Path, stored: StoredFile) -> None:
    """Check a file against its size and digest.

    Raises:
        ConfigError: it is missing, truncated or changed.
    """
    try:
        size = path.stat().st_size
        whole = size == stored.size_bytes and sha256_of(path) == stored.sha256
    except OSError as error:
        raise ConfigError(
            f"{path}, which device {stored.device} wrote: cannot be read ({error.strerror}); resume where it lies"
        ) from None
    if not whole:
        what = f"{size} bytes" if size != stored.size_bytes else "another SHA-256"
        raise ConfigError(
            f"{path}: was changed or damaged since it was written ({what}, wanted {stored.size_bytes} bytes with "
            f"SHA-256 {stored.sha256[:12]}); use an older checkpoint of this run, if one is kept beside it"
        )


def _block(content: Any, name: str, place: tuple[slice, ...]) -> torch.Tensor:
    found: torch.Tensor = content.get_slice(name)[place] if place else content.get_tensor(name)
    return found


PARTIAL = ".partial"
"""The end of a name that a file has until it is whole."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of errors of a disk that has no room."""


class Disk:
    """What a save does to the disk, in single steps, so that a test can fail any of them."""

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
        sync_folder(folder)

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty folder; another device of this machine may have done so before."""
        with suppress(FileNotFoundError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what lies in a folder, by name; none if another device of this machine has removed the folder."""
    try:
        return sorted(folder.glob(pattern))
    except FileNotFoundError:
        return []


def write_named(
    storage: Disk, folder: Path, label: str, pieces: Iterable[bytes | memoryview], named: Callable[[str], str]
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
    partial = folder / f".{label}{PARTIAL}"
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with storage.create(partial) as stream:
            for piece in pieces:
                storage.append(stream, piece)
                digest.update(piece)
                size_bytes += len(piece)
            storage.sync(stream)
        name = named(digest.hexdigest())
        storage.rename(partial, folder / name)
        storage.sync_folder(folder)
    except OSError:
        with suppress(OSError):
            storage.remove(partial)  # or it would keep a full disk full
        raise
    return name, digest.hexdigest(), size_bytes


def remove_partials(storage: Disk, checkpoints: Path) -> None:
    """Remove what writers left that were ended in the middle of a file, from the folders of all steps.

    Raises:
        OSError: something cannot be removed.
    """
    for path in sorted((*checkpoints.glob(f".*{PARTIAL}"), *checkpoints.glob(f"step-*/.*{PARTIAL}"))):
        storage.remove(path)
