"""Read a text file with a clear error, write one so that it is never half there, and digest it."""

import hashlib
import os
import secrets
from pathlib import Path

from spantrain.config.problems import shortened
from spantrain.errors import ConfigError, UsageError

__all__ = ["is_file", "read_bytes", "read_text", "sha256_of", "text_of", "write_atomically"]

_MAX_BYTES = 128 * 2**20
"""Of a file that is read as a whole."""


def read_text(path: Path, *, remedy: str, error: type[UsageError] = ConfigError) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that some editors begin it with.

    Raises:
        UsageError: (the class given as `error`) the file is missing, a folder, unreadable, too large or no text.
    """
    return text_of(read_bytes(path, remedy=remedy, error=error), path, remedy=remedy, error=error)


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


def write_atomically(path: Path, text: str, *, error: type[UsageError] = ConfigError) -> None:
    """Write a text file, and the folders it stands in, so that a reader sees the old file or the new one.

    The text goes to a hidden file beside it, which then takes its name, or is removed if anything fails.

    Raises:
        UsageError: (the class given as `error`) it cannot be written there.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hidden.open("x", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as reason:
        raise error(f"{path}: cannot be written: {reason.strerror}; choose another place") from None


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
