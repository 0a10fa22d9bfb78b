"""Rows of what people have: JSON lines, a JSON list, Parquet, a folder of those, a data set that `datasets` saved."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import read_text
from spantrain.errors import ConfigError

RECORD_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".parquet"})
SAVED_SET_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")
MAX_TEXT_BYTES = 2**30
"""The most of a user's text: it is held in memory, and its digest taken, on every machine that reads it."""
HELD_OUT_EVERY = 16
"""One file, document or conversation in so many is held out; or, of a few, one number in so many, at the end."""
TEXT_FIELDS = ("text", "content")
TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
_HELD_OUT_SPLITS = ("validation", "valid", "eval", "dev", "test")

Fields = Mapping[str, Any]
Record = tuple[str, Fields]
"""Where it stands, for messages, and what is in it."""
T = TypeVar("T")


def apart(everything: Sequence[T], every: int = HELD_OUT_EVERY) -> tuple[list[T], list[T]]:
    """Return what is trained on, and what is held out: the last of each so many."""
    return [one for number, one in enumerate(everything, start=1) if number % every], [*everything[every - 1 :: every]]


def is_saved_set(path: Path) -> bool:
    """Whether `datasets` saved something to a folder."""
    return any((path / name).is_file() for name in SAVED_SET_FILES)


def saved_columns(path: Path) -> list[str]:
    """Return the fields of what `datasets` saved to a folder, as it says; none if it does not."""
    told = next(
        (file for file in (path / "dataset_info.json", path / "train/dataset_info.json") if file.is_file()), None
    )
    said = {} if told is None else parse_json(read_text(told, remedy="save it again"), str(told), constants=True)
    return list(said.get("features") or ()) if isinstance(said, dict) else []


def record_files(path: Path) -> list[Path]:
    """Return the files with rows of a path, in the order of their names; none if it holds other files, too."""
    if path.is_file():
        return [path] if path.suffix in RECORD_SUFFIXES else []
    inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
    found = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    return found if all(file.suffix in RECORD_SUFFIXES for file in found) else []


def record_parts(path: Path) -> list[Iterator[Record]]:
    """Return the rows of a path; or those to train on, and those of a split or files that are called held out.

    Raises:
        ConfigError: nothing is there, or it is none of these; a row that is none, when it is come to.
    """
    if not path.exists():
        raise ConfigError(f"data {path}: does not exist on this machine; give a file with a JSON object on each line")
    if path.is_dir() and is_saved_set(path):
        saved = [enumerate(rows, start=1) for rows in load_saved_dataset(path)]
        return [((f"data {path}: row {number}", row) for number, row in rows) for rows in saved]
    files = [path] if path.is_file() else record_files(path)
    if not files:
        wanted = ", ".join(sorted(RECORD_SUFFIXES))
        raise ConfigError(f"data {path}: no folder of rows: wanted files {wanted} and no others; move others away")
    check_size(files, str(path))
    held_out = [file for file in files if file.stem.partition("-")[0] in _HELD_OUT_SPLITS]
    training = [file for file in files if file not in held_out]
    if not training:
        raise ConfigError(f"data {path}: all of its files are called held out ({held_out[0].name}); call one train")
    return [_rows(some) for some in (training, held_out) if some]


def check_size(files: Sequence[Path], place: str) -> None:
    """Refuse more text than is held in memory."""
    size = sum(file.stat().st_size for file in files)
    if size > MAX_TEXT_BYTES:
        raise ConfigError(
            f"data {place}: {size / 2**30:.1f} GiB of text; at most 1 GiB is read. Give a part of it, or its tokens as "
            "a data set that `datasets` saved (hf:FOLDER)"
        )


def _rows(files: Sequence[Path]) -> Iterator[Record]:
    readers = {".json": _json_list, ".parquet": _parquet_rows}
    for file in files:
        for where, row in readers.get(file.suffix, _json_lines)(file):
            if not isinstance(row, dict):
                raise ConfigError(f'{where}: is no JSON object; write {{"text": ...}}')
            yield where, row


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"data {path}, line {number}"
            if line.strip():
                remedy = "write one JSON object a line"
                yield where, parse_json(line, where, remedy=remedy, constants=True, is_line=True)


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    remedy = "write a list of objects, or one object a line in a .jsonl file"
    found = parse_json(read_text(path, remedy=remedy), f"data {path}", remedy=remedy, constants=True)
    if not isinstance(found, list):
        raise ConfigError(f"data {path}: holds a {type(found).__name__}, wanted a list; {remedy}")
    for number, row in enumerate(found, start=1):
        yield f"data {path}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"data {path}: reading Parquet needs pyarrow; run: pip install pyarrow") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"data {path}: is no Parquet file that pyarrow reads ({error}); write it again") from error
    for number, row in enumerate(rows, start=1):
        yield f"data {path}, row {number}", row


def load_saved_dataset(path: Path) -> list[Sequence[Fields]]:
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
    return [found["train"], *[found[name] for name in _HELD_OUT_SPLITS if name in found][:1]]
