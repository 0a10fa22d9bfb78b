"""Text as numbers, cut into windows: the standard library's sources, or the user's files, lines, saved data sets.

A number is a byte, or a token of a tokenizer's file. A document has a text (`text`, `content`), or its tokens as
numbers (`input_ids`, `tokens`).
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.models.data import records

IntArray = npt.NDArray[np.integer]

BYTE_MASK = 256
"""The token in the place of a masked byte: the first that is no byte."""

_LIBRARY_BYTES = 4 * 2**20
_LIBRARY_HELD_OUT_BYTES = 2**18
# Left out: tests, tables and generated files, which are no usual source text; packages, which differ by machine.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_GENERATED = "_sysconfigdata"
_SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|im_end|>")
_MASKS = ("[MASK]", "<mask>")
_TEXTS_AT_ONCE = 4096


class ByteEncoder:
    """UTF-8, a byte a number; documents end with a line feed."""

    mask: int | None = BYTE_MASK
    """The number in the place of a masked one; None where there is none."""

    def text(self, content: bytes) -> IntArray:
        """Return the bytes of one long text."""
        return np.frombuffer(content, dtype=np.uint8)

    def documents(self, texts: Iterable[str]) -> list[IntArray]:
        """Return the bytes of each, with a line feed behind it."""
        return [self.text(f"{text}\n".encode()) for text in texts]


class TokenEncoder:
    """The tokens of a file of the `tokenizers` library (which transformers writes, too).

    Nothing is added at the ends of a text but the separator between documents: the first of the usual names for it
    that the tokenizer knows, or none.
    """

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it is missing, or none of the library.
        """
        from tokenizers import Tokenizer  # imported late: planning needs none

        if not file.is_file():
            raise ConfigError(f"tokenizer {file}: does not exist on this machine; copy it to every machine of the run")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"tokenizer {file}: not a file of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.mask = next(iter(self._known(_MASKS)), None)
        self._separator = self._known(_SEPARATORS)[:1]

    def text(self, content: bytes) -> IntArray:
        """Return the tokens; bytes that are no UTF-8 are replaced."""
        lines = content.decode(errors="replace").splitlines(keepends=True)
        return _joined(self._encoded(lines, []))

    def documents(self, texts: Iterable[str]) -> list[IntArray]:
        """Return the tokens of each, with the separator behind it."""
        return self._encoded(texts, self._separator)

    def _encoded(self, texts: Iterable[str], end: list[int]) -> list[IntArray]:
        found: list[IntArray] = []
        remaining = iter(texts)
        while some := list(islice(remaining, _TEXTS_AT_ONCE)):
            encoded = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            found += [np.asarray([*encoding.ids, *end], dtype=np.int32) for encoding in encoded]
        return found

    def _known(self, names: Iterable[str]) -> list[int]:
        return [number for name in names if (number := self._tokenizer.token_to_id(name)) is not None]


class Windows(Record):
    """Windows of `length` numbers and the one after each; no number of the text is in two windows."""

    rows: IntArray
    """`(windows, length + 1)`."""
    mask: int | None
    """The number in the place of a masked one; None where the tokenizer has none."""

    @property
    def digest(self) -> str:
        """SHA-256 over all windows."""
        return sha256(np.ascontiguousarray(self.rows).tobytes()).hexdigest()

    @property
    def length(self) -> int:
        """Numbers of a window, without the one after it."""
        return int(self.rows.shape[1]) - 1

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
    encoder: ByteEncoder | TokenEncoder = TokenEncoder(Path(tokenizer)) if tokenizer else ByteEncoder()
    source = dataset.partition(":")[2] or dataset
    numbers = _numbers(dataset, encoder, held_out=held_out)
    count = len(numbers) // (length + 1)
    if count == 0:
        part, unit = "held-out part" if held_out else "training part", "tokens" if tokenizer else "bytes"
        raise ConfigError(
            f"data {source}: too short: its {part} has no whole window of {length + 1} {unit}; "
            f"give at least {records.HELD_OUT_EVERY * (length + 1)} of them or a smaller sequence length"
        )
    rows = numbers[: count * (length + 1)].reshape(count, length + 1)
    largest = int(rows.max())
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"data {source}: has the number {largest}, but the model's vocabulary ends at {vocabulary - 1}; give "
            "--tokenizer, or a model with a larger vocabulary"
        )
    return Windows(rows=rows, mask=encoder.mask)


def _numbers(dataset: str, encoder: ByteEncoder | TokenEncoder, *, held_out: bool) -> IntArray:
    """Return the numbers to train on, or the held-out ones."""
    kind, _, place = dataset.partition(":")
    match kind:
        case "stdlib-text" if not place:
            parts = _library_parts()
        case "text":
            files = _user_files(Path(place))
            records.check_size(files, place)
            parts = _file_parts(files, records.MAX_TEXT_BYTES, records.MAX_TEXT_BYTES)
        case "jsonl" | "hf":
            return document_parts(place, encoder)[held_out]
        case _:
            raise ConfigError(
                f"data: no data set named {dataset!r} for models that read text; use stdlib-text, text:PATH, "
                "jsonl:PATH or hf:PATH"
            )
    return encoder.text(parts[held_out])


@cache
def _library_parts() -> tuple[bytes, bytes]:
    return _file_parts(_library_files(), _LIBRARY_BYTES, _LIBRARY_HELD_OUT_BYTES)


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
    inside = ((file, file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    files = {name.as_posix(): file for file, name in inside if not any(part.startswith(".") for part in name.parts)}
    if not files:
        raise ConfigError(f"data {path}: the folder has no files; give a text file or a folder of text files")
    return [files[name] for name in sorted(files)]


def _file_parts(files: list[Path], max_bytes: int, max_held_out_bytes: int) -> tuple[bytes, bytes]:
    """Return training and held-out bytes, from different files where there are enough of them."""
    if len(files) >= records.HELD_OUT_EVERY:
        training, held_out = records.apart(files)
        return _read(training, max_bytes), _read(held_out, max_held_out_bytes)
    everything = _read(files, max_bytes + max_held_out_bytes)
    cut = len(everything) - len(everything) // records.HELD_OUT_EVERY
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


def document_parts(place: str, encoder: ByteEncoder | TokenEncoder) -> tuple[IntArray, IntArray]:
    """Return the numbers of rows of text or of tokens (`records.record_parts`): to train on, and held out.

    They are of different documents where there are enough of them.

    Raises:
        ConfigError: the path is missing, is none of these, or has no field that can be read.
    """
    parts = records.record_parts(Path(place))
    documents, *held_out = [_documents(rows, f"data {place}", encoder) for rows in parts]
    if held_out:
        return _joined(documents), _joined(held_out[0])
    if len(documents) >= records.HELD_OUT_EVERY:
        training, others = records.apart(documents)
        return _joined(training), _joined(others)
    everything = _joined(documents)
    cut = len(everything) - len(everything) // records.HELD_OUT_EVERY
    return everything[:cut], everything[cut:]


def _joined(documents: Sequence[IntArray]) -> IntArray:
    return np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32)


def _documents(rows: Iterator[records.Record], where: str, encoder: ByteEncoder | TokenEncoder) -> list[IntArray]:
    """Return each document's numbers; the first one tells which field is read."""
    place, first = next(rows, (where, None))
    if first is None:
        raise ConfigError(f"{where}: has no documents")
    known = (*records.TOKEN_FIELDS, *records.TEXT_FIELDS)
    field = next((name for name in known if name in first), None)
    if field is None:
        raise ConfigError(f"{where}: the first document has {', '.join(first)}; wanted one of {', '.join(known)}")
    values = ((place, _value(row, field, place)) for place, row in chain([(place, first)], rows))
    if field in records.TEXT_FIELDS:
        return encoder.documents(value for _, value in values)
    return [_token_ids(value, f"{place}: {field!r}") for place, value in values]


def _value(row: records.Fields, field: str, where: str) -> Any:
    wanted: type | tuple[type, ...] = str if field in records.TEXT_FIELDS else (list, tuple, np.ndarray)
    if not isinstance(row.get(field), wanted):
        raise ConfigError(f"{where} has no {field!r} like the first one's; leave it out")
    return row[field]


def _token_ids(values: Sequence[int], where: str) -> IntArray:
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):  # lists of unlike lengths, numbers beyond any type
        found = np.zeros((0, 0))
    if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= 2**31)):
        raise ConfigError(f"{where} must be a list of whole numbers from 0 to 2^31 - 1")
    return found.astype(np.int32)
