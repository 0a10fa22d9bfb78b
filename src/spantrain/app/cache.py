"""Where results that are worth keeping between runs lie, and what tells whether they still hold."""

import hashlib
import os
from pathlib import Path

__all__ = ["cache_folder", "code_digest"]


def cache_folder() -> Path:
    """Return the user's cache folder for SpanTrain (XDG); made when missing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "spantrain"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def code_digest(*folders: Path) -> str:
    """Return the SHA-256 of all Python files in these folders: what another code would have made is another result."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
