"""Read a text file with a clear error, write one so that it is never half there, and digest it."""

import hashlib
import os
import secrets
from pathlib import Path

from spantrain.errors import ConfigError, UsageError

__all__ = ["read_text", "sha256_of", "write_atomically"]


def read_text(path: Path, *, remedy: str, error: type[UsageError] = ConfigError) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        UsageError: (the class given as `error`) the file is missing, a folder, unreadable or no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: there is no such file; {remedy}") from None
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in {".json", ".yaml", ".yml"})
        hint = f"name the file in it: {', '.join(inside)}" if inside else remedy
        raise error(f"{path}: is a folder, not a file; {hint}") from None
    except UnicodeDecodeError as reason:
        raise error(f"{path}: is not UTF-8 text (byte {reason.start}); {remedy}") from None
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}; {remedy}") from None


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
