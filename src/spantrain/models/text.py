"""Text as bytes, cut into windows: the standard library's sources, or the user's own files."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spantrain.errors import ConfigError

__all__ = ["Windows", "read_windows"]

ByteArray = npt.NDArray[np.uint8]

HELD_OUT_EVERY = 16
"""One file in so many is held out; or, of a few files, one byte in so many, at the end."""

TRAINING_BYTES = 4 * 2**20
HELD_OUT_BYTES = 2**18

# Left out: tests, tables and generated files, which are no usual source text; packages, which differ by machine.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_GENERATED = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of `length` bytes and the byte after each; no byte is in two windows."""

    rows: ByteArray
    """`(windows, length + 1)`."""

    @property
    def digest(self) -> str:
        """SHA-256 over all windows."""
        return sha256(np.ascontiguousarray(self.rows).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)


def read_windows(dataset: str, length: int, *, held_out: bool) -> Windows:
    """Read `stdlib-text` or `text:PATH` and cut it into windows; training and held-out windows share no byte.

    Raises:
        ConfigError: the path is missing or has too little text.
    """
    source = dataset.removeprefix("text:")
    user_text = dataset != source
    if not user_text and dataset != "stdlib-text":
        raise ConfigError(f"data: no data set named {dataset!r}; use stdlib-text, digits or text:PATH")
    files = _user_files(Path(source)) if user_text else _library_files()
    training, reserved = _split(files)
    rows = _rows(reserved if held_out else training, length)
    if len(rows) == 0:
        part = "held-out part" if held_out else "training part"
        raise ConfigError(
            f"data {source}: too short: its {part} has no whole window of {length + 1} bytes; "
            f"give at least {HELD_OUT_EVERY * (length + 1)} bytes of text or a smaller sequence length"
        )
    return Windows(rows=rows)


def _library_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(place, name) for name in files if name.endswith(".py") and not name.startswith(_GENERATED)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _user_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data {path}: does not exist on this machine; give a text file or a folder of text files")
    files = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    if not files:
        raise ConfigError(f"data {path}: the folder has no files; give a text file or a folder of text files")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _split(files: list[Path]) -> tuple[ByteArray, ByteArray]:
    """Return training and held-out bytes, from different files where there are enough of them."""
    if len(files) >= HELD_OUT_EVERY:
        reserved = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        training = [file for position, file in enumerate(files, start=1) if position % HELD_OUT_EVERY]
        return _read(training, TRAINING_BYTES), _read(reserved, HELD_OUT_BYTES)
    everything = _read(files, TRAINING_BYTES + HELD_OUT_BYTES)
    cut = len(everything) - len(everything) // HELD_OUT_EVERY
    return everything[:cut], everything[cut:]


def _read(files: Iterable[Path], limit_bytes: int) -> ByteArray:
    """Return the first bytes of all files together; reading stops at the limit."""
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(limit_bytes - len(text))
        if len(text) >= limit_bytes:
            break
    return np.frombuffer(bytes(text), dtype=np.uint8)


def _rows(text: ByteArray, length: int) -> ByteArray:
    count = len(text) // (length + 1)
    return text[: count * (length + 1)].reshape(count, length + 1)
