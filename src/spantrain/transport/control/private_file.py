"""Files for their owner's eyes alone; `text_files.write_atomically` writes them."""

import os
from pathlib import Path

from spantrain.errors import UsageError

_MAX_CHARACTERS = 2**27
"""Longest file that is read as a whole."""


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
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise UsageError(f"{path}: others may read it (mode {mode:03o}); if it is a secret still: chmod 600")
            text = file.read(_MAX_CHARACTERS + 1)
            if len(text) > _MAX_CHARACTERS:
                raise UsageError(f"{path}: has more than {_MAX_CHARACTERS} characters; take it from a copy")
            return text
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; take it from a copy, or choose another folder") from None
