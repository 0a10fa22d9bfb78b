"""Text as numbers, cut into windows: the standard library's sources, or the user's files, lines, saved data sets."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from spantrain.errors import ConfigError
from spantrain.models.data.documents import HELD_OUT_EVERY, MOST_BYTES, document_parts
from spantrain.models.data.tokenizer import Encoder, IntArray, open_encoder

_LIBRARY_BYTES = 4 * 2**20
_LIBRARY_HELD_OUT_BYTES = 2**18

# Left out: tests, tables and generated files, which are no usual source text; packages, which differ by machine.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_GENERATED = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of `length` numbers and the one after each; no number of the text is in two windows."""

    rows: IntArray
    """`(windows, length + 1)`."""
    mask: int | None
    """The number in the place of a masked one; None where the tokenizer has none."""

    @property
    def digest(self) -> str:
        """SHA-256 over all windows."""
        return sha256(np.ascontiguousarray(self.rows).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)


def read_windows(
    dataset: str, length: int, *, held_out: bool, tokenizer: str = "", vocabulary: int | None = None
) -> Windows:
    """Read text and cut it into windows; training and held-out windows share nothing.

    Args:
        dataset: `stdlib-text`, `text:PATH`, `jsonl:PATH` or `hf:PATH`.
        length: numbers of a window.
        held_out: the part that is held out, instead of the one to train on.
        tokenizer: as `ModelSpec.tokenizer`.
        vocabulary: how many numbers the model knows; None: not known.

    Raises:
        ConfigError: the path is missing, is something else, or has too little text; a number is not the model's.
    """
    encoder = open_encoder(tokenizer)
    source = dataset.partition(":")[2] or dataset
    rows = _rows(_numbers(dataset, encoder, held_out=held_out), length)
    if len(rows) == 0:
        part, unit = "held-out part" if held_out else "training part", "tokens" if tokenizer else "bytes"
        raise ConfigError(
            f"data {source}: too short: its {part} has no whole window of {length + 1} {unit}; "
            f"give at least {HELD_OUT_EVERY * (length + 1)} of them or a smaller sequence length"
        )
    largest = int(rows.max())
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"data {source}: has the number {largest}, but the model's vocabulary ends at {vocabulary - 1}; give "
            "--tokenizer, or a model with a larger vocabulary"
        )
    return Windows(rows=rows, mask=encoder.mask)


def _numbers(dataset: str, encoder: Encoder, *, held_out: bool) -> IntArray:
    """Return the numbers to train on, or the held-out ones."""
    kind, _, place = dataset.partition(":")
    match kind:
        case "stdlib-text" if not place:
            parts = _split(_library_files(), _LIBRARY_BYTES, _LIBRARY_HELD_OUT_BYTES)
        case "text":
            files = _user_files(Path(place))
            _check_size(files, place)
            parts = _split(files, MOST_BYTES, MOST_BYTES)
        case "jsonl" | "hf":
            return document_parts(dataset, encoder)[held_out]
        case _:
            raise ConfigError(
                f"data: no data set named {dataset!r} for models that read text; use stdlib-text, text:PATH, "
                "jsonl:PATH or hf:PATH"
            )
    return encoder.text(parts[held_out])


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


def _check_size(files: Iterable[Path], place: str) -> None:
    size = sum(file.stat().st_size for file in files)
    if size > MOST_BYTES:
        raise ConfigError(
            f"data {place}: {size / 2**30:.1f} GiB of text; at most 1 GiB is read. Give a part of it, or its tokens as "
            "a data set that `datasets` saved (hf:FOLDER)"
        )


def _split(files: list[Path], most_bytes: int, most_held_out_bytes: int) -> tuple[bytes, bytes]:
    """Return training and held-out bytes, from different files where there are enough of them."""
    if len(files) >= HELD_OUT_EVERY:
        reserved = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        training = [file for position, file in enumerate(files, start=1) if position % HELD_OUT_EVERY]
        return _read(training, most_bytes), _read(reserved, most_held_out_bytes)
    everything = _read(files, most_bytes + most_held_out_bytes)
    cut = len(everything) - len(everything) // HELD_OUT_EVERY
    return everything[:cut], everything[cut:]


def _read(files: Iterable[Path], limit_bytes: int) -> bytes:
    """Return the first bytes of all files together; reading stops at the limit."""
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(limit_bytes - len(text))
        if len(text) >= limit_bytes:
            break
    return bytes(text)


def _rows(numbers: IntArray, length: int) -> IntArray:
    count = len(numbers) // (length + 1)
    return numbers[: count * (length + 1)].reshape(count, length + 1)
