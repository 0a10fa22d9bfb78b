"""Where results that are worth keeping between runs lie, and what tells whether they still hold."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spantrain.config.artefacts import read_artefact, write_artefact
from spantrain.errors import ConfigError, UsageError

T = TypeVar("T")


def cache_folder() -> Path:
    """Return the user's cache folder for SpanTrain (XDG); made when missing.

    Raises:
        ConfigError: it cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "spantrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise ConfigError(f"{folder}: cannot be made: {reason.strerror}; set XDG_CACHE_HOME to a folder") from None
    return folder


def cached(path: Path, kind: type[T], form: str, note: Callable[[str], None]) -> T | None:
    """Return what is kept at a path of the cache; None where that is nothing, or damaged, which is told."""
    if not path.exists():
        return None
    try:
        return read_artefact(kind, form, path)
    except UsageError as error:
        note(f"The cache cannot be used and is made anew: {error}")
        return None


def keep_cached(value: object, form: str, path: Path, note: Callable[[str], None]) -> None:
    """Keep a value at a path of the cache; where that cannot be it is told, and nothing is lost."""
    try:
        write_artefact(value, form, path)
    except UsageError as error:
        note(f"Not kept for the next time: {error}")


def state_folder() -> Path:
    """Return the user's folder for what SpanTrain leaves to be looked at (XDG); not made."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "spantrain"
