"""Texts that come one by one: lines of JSON, and data sets that the `datasets` library saved.

A document has a text (`text`, `content`), or its tokens as numbers (`input_ids`, `tokens`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from spantrain.config.files.parsing import parse_json
from spantrain.errors import ConfigError
from spantrain.models.data.tokenizer import Encoder, IntArray

MOST_BYTES = 2**30
"""Of a user's text: all of it is held in memory, and its digest taken, on every machine that reads it."""

HELD_OUT_EVERY = 16
"""One document in so many is held out; or, of a few documents, one number in so many, at the end."""

_TEXT_FIELDS = ("text", "content")
_TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
_HELD_OUT_SPLITS = ("validation", "valid", "eval", "test")


def document_parts(dataset: str, encoder: Encoder) -> tuple[IntArray, IntArray]:
    """Return the numbers of `jsonl:PATH` or `hf:PATH`: to train on, and held out.

    Raises:
        ConfigError: the path is missing, is none of these, or has no field that can be read.
    """
    kind, _, place = dataset.partition(":")
    path = Path(place)
    if kind == "jsonl":
        return _split([_documents(_json_lines(path), f"data {path}", encoder)])
    return _split([_documents(rows, f"data {path}", encoder) for rows in load_saved_dataset(path)])


def load_saved_dataset(path: Path) -> list[Sequence[Mapping[str, Any]]]:
    """Return what `datasets` saved to a folder: its rows; or its `train` split and the one that is held out.

    Raises:
        ConfigError: the library is not installed, or the folder holds no data set.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"data hf:{path}: needs the `datasets` library; run: pip install datasets") from error
    if not path.is_dir():
        raise ConfigError(f"data {path}: does not exist on this machine; give the folder of Dataset.save_to_disk")
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"data {path}: holds no data set that `datasets` saved: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        return [found]
    if "train" not in found:
        raise ConfigError(f"data {path}: has the splits {', '.join(found)}, but no `train`; save one of that name")
    held_out = next((found[name] for name in _HELD_OUT_SPLITS if name in found), None)
    return [found["train"]] if held_out is None else [found["train"], held_out]


def _split(parts: Sequence[list[IntArray]]) -> tuple[IntArray, IntArray]:
    """Return numbers to train on and held-out ones, from different documents where there are enough."""
    documents = parts[0]
    if len(parts) > 1:
        return _joined(documents), _joined(parts[1])
    if len(documents) >= HELD_OUT_EVERY:
        kept = [one for position, one in enumerate(documents, start=1) if position % HELD_OUT_EVERY]
        return _joined(kept), _joined(documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    everything = _joined(documents)
    cut = len(everything) - len(everything) // HELD_OUT_EVERY
    return everything[:cut], everything[cut:]


def _joined(documents: Sequence[IntArray]) -> IntArray:
    return np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32)


def _documents(rows: Iterable[Mapping[str, Any]], where: str, encoder: Encoder) -> list[IntArray]:
    """Return each document's numbers; the first one tells which field is read."""
    numbered = enumerate(rows, start=1)
    _, first = next(numbered, (0, None))
    if first is None:
        raise ConfigError(f"{where}: has no documents")
    known = (*_TOKEN_FIELDS, *_TEXT_FIELDS)
    field = next((name for name in known if name in first), None)
    if field is None:
        raise ConfigError(f"{where}: the first document has {', '.join(first)}; wanted one of {', '.join(known)}")
    values = (_value(row, field, f"{where}: document {number}") for number, row in chain([(1, first)], numbered))
    if field in _TEXT_FIELDS:
        return encoder.documents(values)
    return [_numbers(value, f"{where}: document {number}: {field!r}") for number, value in enumerate(values, start=1)]


def _value(row: Mapping[str, Any], field: str, where: str) -> Any:
    wanted: type | tuple[type, ...] = str if field in _TEXT_FIELDS else (list, tuple, np.ndarray)
    if not isinstance(row.get(field), wanted):
        raise ConfigError(f"{where} has no {field!r} like the first one's; leave it out")
    return row[field]


def _numbers(values: Sequence[int], where: str) -> IntArray:
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):  # lists of unlike lengths, numbers beyond any type
        found = np.zeros((0, 0))
    if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= 2**31)):
        raise ConfigError(f"{where} must be a list of whole numbers from 0 to 2^31 - 1")
    return found.astype(np.int32)


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"data {path}: does not exist on this machine; give a file with a JSON object on each line")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"data {path}: {path.stat().st_size / 2**30:.1f} GiB of text; at most 1 GiB is read. Give a part of it, or "
            "its tokens as a data set that `datasets` saved (hf:FOLDER)"
        )
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"data {path}, line {number}"
            row = parse_json(line, where, remedy="write one JSON object a line", constants=True, is_line=True)
            if not isinstance(row, dict):
                raise ConfigError(f'{where}: is no JSON object; write {{"text": ...}}')
            yield row
