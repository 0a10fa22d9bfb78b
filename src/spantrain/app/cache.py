"""Where results that are worth keeping between runs lie."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the user's cache folder for SpanTrain (XDG); made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "spantrain"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
