"""Read a text file with a clear error, write one so that it is never half there, and digest it, or a whole package's
code; and files for their owner alone.
"""

import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from spantrain.config.files.problems import shortened
from spantrain.errors import ConfigError, UsageError

_MAX_BYTES = 128 * 2**20
"""Size of a file that is read as a whole."""
_MAX_HEADER_BYTES = 16 * 2**20
"""Header of a safetensors file with 150,000 tensors."""
_LOOK_S = 0.1
"""Between two looks at a file that another program has open."""


def read_text(path: Path, *, remedy: str) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that some editors begin it with.

    Raises:
        ConfigError: the file is missing, a folder, unreadable, too large or no text.
    """
    return text_of(read_bytes(path, remedy=remedy), path, remedy=remedy)


def text_of(content: bytes, path: Path, *, remedy: str, error: type[UsageError] = ConfigError) -> str:
    """Return the text that a file's bytes are; `path` is its name in errors.

    Raises:
        UsageError: (the class given as `error`) they are not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: is not UTF-8 text (byte {reason.start}); {remedy}") from None


def is_file(path: Path) -> bool:
    """Whether a file is there that can be looked at; a name that no file can have is no file's.

    >>> is_file(Path("no" * 5000))
    False
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, remedy: str, error: type[UsageError] = ConfigError) -> bytes:
    """Return what is in a file, read once.

    Raises:
        UsageError: (the class given as `error`) the file is missing, a folder, unreadable or too large.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path}: there is no such file; {remedy}") from None
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in {".json", ".yaml", ".yml"})
        hint = f"name the file in it: {', '.join(inside)}" if inside else remedy
        raise error(f"{path}: is a folder, not a file; {hint}") from None
    except (OSError, ValueError) as reason:  # ValueError: no name of a file
        why = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise error(f"{shortened(str(path), 200)}: cannot be read: {why}; {remedy}") from None
    if len(content) > _MAX_BYTES:
        raise error(f"{path}: has more than {_MAX_BYTES >> 20} MiB; {remedy}")
    return content


def write_atomically(
    path: Path, content: str | bytes, *, error: type[UsageError] = ConfigError, private: bool = False
) -> None:
    """Write a file, and the folders it stands in, so that a reader sees the old file or the new one.

    The content goes to a hidden file beside it, which then takes its name, or is removed if anything fails. A `private`
    file goes to a folder that is there; nobody else may read it, and it is there also after a loss of power.

    Raises:
        UsageError: (the class given as `error`) it cannot be written there.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if _is_no_file(path):
            raise error(f"{path}: cannot be written: is no regular file; choose another place")
        if not private:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
        if private:
            sync_folder(path.parent)
    except OSError as reason:
        raise error(f"{path}: cannot be written: {reason.strerror}; choose another place") from None


def locked_file(path: Path, within_s: float = 0.0) -> IO[bytes]:
    """Open a file to write at its end, made if it is not there, that no other program has open by this.

    Raises:
        BlockingIOError: another one has, and does not close it within so many seconds.
        OSError: it cannot be written, or its disk knows no locks.
    """
    file, deadline_s = path.open("ab"), time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= deadline_s:
                file.close()
                raise
            time.sleep(_LOOK_S)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_tensor_header(path: Path) -> None:
    """Refuse a safetensors file whose header is longer than any model's: reading it takes a minute and gigabytes.

    Raises:
        ConfigError: it is, or it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
    except OSError as reason:
        raise ConfigError(f"{path}: cannot be read: {reason.strerror}; copy or save it again") from None
    if size > _MAX_HEADER_BYTES:
        raise ConfigError(f"{path}: is no safetensors file, or has a header of {size} bytes; save it in several files")


def check_can_write(path: Path, what: str) -> None:
    """Refuse a file to write that cannot be written, before any work is done for it; make nothing that stays.

    Raises:
        ConfigError: it cannot; `what` it is for, an option say, begins the message.
    """
    if _is_no_file(path):
        example = f"name the file to write, e.g. {path / 'out.json'}" if path.is_dir() else "name another"
        raise ConfigError(f"{what} {path}: is {'a folder' if path.is_dir() else 'no regular file'}; {example}")
    _try_folder(path.parent, f"{what} {shortened(str(path), 200)}")


def check_can_make(folder: Path, what: str, *, files: Sequence[str] = (), folders: Sequence[str] = ()) -> None:
    """Refuse a folder to write to that cannot be made or written, before any work is done for it.

    Args:
        folder: the folder.
        what: it is for, an option say; begins the message.
        files: names of what is to be written into it.
        folders: names of folders that are to be made in it.

    Raises:
        ConfigError: it cannot, or something else has one of the names.
    """
    _try_folder(folder, f"{what} {shortened(str(folder), 200)}")
    for name in files:
        if _is_no_file(folder / name):
            raise ConfigError(f"{what} {folder}: {folder / name} is no file; move it away, or name another folder")
    for name in folders:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ConfigError(f"{what} {folder}: {folder / name} is a file; move it away, or name another folder")


def _try_folder(folder: Path, told: str) -> None:
    """Make something in a folder, or in the nearest that is there, and take it away again.

    That tells more than permissions do: file systems may be read-only, full, or none that has files.
    """
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise ConfigError(f"{told}: {nearest} is a file; name a folder")
        Path(tempfile.mkdtemp(prefix=".spantrain-", dir=nearest)).rmdir()
    except (OSError, ValueError) as reason:  # ValueError: no name of a folder
        why = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise ConfigError(f"{told}: cannot be written to: {why}; choose another place") from None


def _is_no_file(path: Path) -> bool:
    """Whether something else than a file has this name: a folder, or a device that must not be replaced."""
    return os.path.lexists(path) and path.exists() and not path.is_file()


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those that it stands in, if it is not there.

    Raises:
        UsageError: it cannot be made, or is a file.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; choose another folder") from None


def read_private(path: Path) -> str | None:
    """Return the text of a file, None if there is none.

    Raises:
        UsageError: others may read or write it, or it cannot be read.
    """
    if not path.exists():
        return None
    remedy = "take it from a copy, or choose another folder"
    content, mode = read_bytes(path, remedy=remedy, error=UsageError), path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UsageError(f"{path}: others may read it (mode {mode:03o}); if it is a secret still: chmod 600")
    return text_of(content, path, remedy=remedy, error=UsageError)


def code_digest(*folders: Path) -> str:
    """Return the SHA-256 of all Python files in these folders: what another code would have made is another result."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def own_code() -> str:
    """Return the digest of all of this package."""
    return code_digest(Path(__file__).parents[2])
