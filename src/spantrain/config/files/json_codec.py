"""Dataclass <-> plain JSON, driven by the type hints; reading is strict and tells everything that is wrong.

Dataclasses become objects (fields in their order), tuples lists, mappings objects (keys sorted, so that equal
values give equal text), enums their values, None null; Span, Action and Ticket become their text forms. Bytes stay as
they are: messages have them, files do not.
"""

import json
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from spantrain.config.files.parsing import OutOfRange
from spantrain.config.files.problems import Problems, below, shortened
from spantrain.core.action import Action
from spantrain.core.outer.events import Ticket
from spantrain.core.span import Span
from spantrain.errors import ConfigError, SpanTrainError

T = TypeVar("T")
_WIDTH = 120
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_TEXT_FORMS: Mapping[type[Span] | type[Action] | type[Ticket], str] = {
    Span: "[0:16]",
    Action: "2F[0:16]",
    Ticket: "2.17",
}
"""What is written as its text form, with an example."""
_MAX_TEXT, _MAX_LIST = 65_536, 200_000
"""In `wire` messages."""
_LARGEST = sys.float_info.max
"""Of floats; whole numbers may be larger, and NaN is not at most that."""
_BAD = object()
"""In the place of a value that could not be read; its problem is noted."""


class NamedKinds:
    """Base of what comes in kinds, all dataclasses: written with its `name`, and read as the kind of that name."""

    name: ClassVar[str]

    @classmethod
    def kinds(cls) -> Mapping[str, type["NamedKinds"]]:
        """Return all there are, by name."""
        raise NotImplementedError


def to_json(value: object, *, wire: bool = False) -> Any:
    """Return a value as objects, lists, text, numbers, booleans and None; numbers need not be finite on the `wire`.

    Raises:
        ValueError: a number is not finite (JSON has none), or a type has no JSON form; with the field's path.
    """
    return _write(value, "", wire)


def _write(value: object, path: str, wire: bool) -> Any:
    if type(value) in (str, int):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        if not (wire or math.isfinite(value)):
            raise ValueError(f"{path or 'value'}: {value} cannot be written; JSON has finite numbers only")
        return float(value)
    if value is None or isinstance(value, str | bool | int | bytes):
        return value
    if isinstance(value, tuple(_TEXT_FORMS)):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {"name": value.name} if isinstance(value, NamedKinds) else {}
        return named | {f.name: _write(getattr(value, f.name), below(path, f.name), wire) for f in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key, path): _write(value[key], below(path, str(key)), wire) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return [_write(item, f"{path}[{index}]", wire) for index, item in enumerate(value)]
    raise ValueError(f"{path or 'value'}: a {type(value).__name__} has no JSON form")


def _key(key: object, path: str) -> str:
    if isinstance(key, tuple(_TEXT_FORMS)):
        return str(key)
    if not isinstance(key, str):
        raise ValueError(f"{path or 'value'}: the key {key!r} is not text")
    return key


def render_json(value: Any, indent: int = 0) -> str:
    """Return JSON text for people: what fits on one line stands on one line, the rest is indented.

    >>> print(render_json({"name": "x", "parts": ["y" * 60, "z" * 60]}))
    {
      "name": "x",
      "parts": [
        "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
        "zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz"
      ]
    }
    """
    if not isinstance(value, dict | list):
        return _ENCODER.encode(value)
    if isinstance(value, dict):
        parts = [f"{_ENCODER.encode(k)}: {render_json(v, indent + 2)}" for k, v in value.items()]
    else:
        parts = [render_json(v, indent + 2) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    # A part of several lines is too long for this one.
    if sum(map(len, parts)) + 2 * len(parts) + indent <= _WIDTH or not parts:
        return f"{opening}{', '.join(parts)}{closing}"
    margin = " " * (indent + 2)
    return f"{opening}\n{margin}" + f",\n{margin}".join(parts) + f"\n{' ' * indent}{closing}"


def from_json(
    cls: type[T], data: object, source: str, *, error: type[SpanTrainError] = ConfigError, wire: bool = False
) -> T:
    """Return the dataclass that plain JSON holds; `source` is the file's name in errors.

    Fields that have a default may be left out. What a dataclass itself refuses is told with the field's path. On the
    `wire` numbers need not be finite, whole ones have 64 bits, and texts and lists end somewhere.

    Raises:
        SpanTrainError: (the class given as `error`) keys are unknown or missing, or values wrong; all in one message.
    """
    problems = Problems(source, wire=wire)
    value = read_part(cls, data, "", problems)
    problems.check(error)
    return cast(T, value)


def read_part(cls: type[T], data: object, path: str, problems: Problems) -> T | None:
    """Return the dataclass that the part of a file at `path` holds; None after noting all that is wrong with it."""
    value = _read(cls, data, path, problems)
    return None if value is _BAD else cast(T, value)


def _read(kind: Any, data: object, path: str, problems: Problems) -> object:
    """Return the value, or _BAD after noting what is wrong."""
    if problems.wire and _is_large(data):
        problems.add(path, "is larger than messages have it")
        return _BAD
    if kind is float:
        if isinstance(data, int | float) and not isinstance(data, bool) and (problems.wire or abs(data) <= _LARGEST):
            return float(data)
    elif kind in (int, str, bool, bytes):
        if type(data) is kind:
            return data
    elif kind is Any:
        return data
    elif get_origin(kind) in (Union, types.UnionType):
        return _read_union(kind, data, path, problems)
    elif kind in _TEXT_FORMS or (isinstance(kind, type) and issubclass(kind, Enum)):
        return _read_text_form(kind, data, path, problems)
    elif is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, NamedKinds)):
        if isinstance(data, dict):
            return _read_dataclass(kind, data, path, problems)
    elif get_origin(kind) is tuple:
        if isinstance(data, list):
            return _read_tuple(kind, data, path, problems)
    elif get_origin(kind) is not None and issubclass(get_origin(kind), Mapping):
        if isinstance(data, dict):
            return _read_mapping(kind, data, path, problems)
    else:
        raise AssertionError(f"no JSON form for {kind}")
    problems.add(path, f"must be {_wanted(kind)}, got {_shown(data)}")
    return _BAD


def _is_large(data: object) -> bool:
    """Whether a whole number has over 64 bits, or a text or a list does not end soon enough for a message."""
    if isinstance(data, int):
        return not -(2**63) <= data < 2**63
    return isinstance(data, str | list | dict) and len(data) > (_MAX_TEXT if isinstance(data, str) else _MAX_LIST)


def _read_dataclass(kind: Any, data: dict[str, Any], path: str, problems: Problems) -> object:
    if not is_dataclass(kind):
        name, kinds = data.get("name"), kind.kinds()
        if not isinstance(name, str) or name not in kinds:
            problems.add(below(path, "name"), f"must be one of {', '.join(sorted(kinds))}, got {_shown(name)}")
            return _BAD
        kind, data = kinds[name], {key: value for key, value in data.items() if key != "name"}
    before = len(problems.entries)
    known, values = _fields_of(kind), {}
    for key in data:
        if key not in known:
            left = [name for name in known if name not in data] or known
            problems.add(below(path, key), problems.unknown("key", key, left))
    for name, (hint, optional) in known.items():
        if name in data:
            values[name] = _read(hint, data[name], below(path, name), problems)
        elif not optional:
            problems.add(below(path, name), f"is missing; it must be {_wanted(hint)}")
    if len(problems.entries) > before:
        return _BAD
    try:
        return kind(**values)
    except ValueError as reason:
        problems.add(path, str(reason))
        return _BAD


@cache
def _fields_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return, for each field of a dataclass, its type and whether it may be left out."""
    hints = get_type_hints(kind)
    return {
        entry.name: (hints[entry.name], entry.default is not MISSING or entry.default_factory is not MISSING)
        for entry in fields(kind)
    }


def _read_tuple(kind: Any, data: list[Any], path: str, problems: Problems) -> object:
    hints = get_args(kind)
    if len(hints) == 2 and hints[1] is ...:
        hints = (hints[0],) * len(data)
    elif len(hints) != len(data):
        problems.add(path, f"must be a list of {len(hints)}, got {len(data)}")
        return _BAD
    values = tuple(
        _read(hint, item, f"{path}[{i}]", problems) for i, (hint, item) in enumerate(zip(hints, data, strict=True))
    )
    return _BAD if any(value is _BAD for value in values) else values


def _read_mapping(kind: Any, data: dict[str, Any], path: str, problems: Problems) -> object:
    of_keys, hint = get_args(kind)
    keys = [_read(of_keys, key, path, problems) for key in data]
    values = [_read(hint, item, below(path, key), problems) for key, item in data.items()]
    if any(value is _BAD for value in (*keys, *values)):
        return _BAD
    if len(set(keys)) < len(keys):
        problems.add(path, "a key is given twice")
        return _BAD
    return dict(zip(keys, values, strict=True))


def _read_text_form(kind: Any, data: object, path: str, problems: Problems) -> object:
    try:
        if issubclass(kind, Enum):
            return kind(data)
        if isinstance(data, str):
            return kind.parse(data)
    except ValueError as reason:
        if not issubclass(kind, Enum):
            problems.add(path, str(reason))
            return _BAD
    problems.add(path, f"must be {_wanted(kind)}, got {_shown(data)}")
    return _BAD


def _read_union(kind: Any, data: object, path: str, problems: Problems) -> object:
    """Read by the first member that takes this form of JSON; a boolean passes for an int, as in Python."""
    members = get_args(kind)
    if data is None and types.NoneType in members:
        return None
    if type(data) in members:
        return _read(type(data), data, path, problems)
    if isinstance(data, bool) and int in members:
        return data
    for member in members:
        if member is not types.NoneType and _takes(member, data):
            return _read(member, data, path, problems)
    problems.add(path, f"must be {_wanted(kind)}, got {_shown(data)}")
    return _BAD


def _takes(member: Any, data: object) -> bool:
    """Whether a type is written in this form of JSON."""
    if member is float:
        return isinstance(data, int | float) and not isinstance(data, bool)
    if member in (int, str, bool):
        return type(data) is member
    if member in _TEXT_FORMS or (isinstance(member, type) and issubclass(member, Enum)):
        return isinstance(data, str)
    return isinstance(data, list) if get_origin(member) is tuple else isinstance(data, dict)


def _wanted(kind: Any) -> str:
    """Return a type in the words of a person who edits the file."""
    plain = {
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        bytes: "bytes",
        Any: "anything",
    }
    if kind in plain:
        return plain[kind]
    if kind is types.NoneType:
        return "null"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_wanted(member) for member in get_args(kind))
    if kind in _TEXT_FORMS:
        return f'text like "{_TEXT_FORMS[kind]}"'
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(json.dumps(member.value) for member in kind)
    return "a list" if get_origin(kind) is tuple else "an object"


def _shown(data: object) -> str:
    if isinstance(data, dict | list):
        return "an object" if isinstance(data, dict) else "a list"
    if isinstance(data, OutOfRange):
        return f"{shortened(data.written)}, which is out of range"
    return "bytes" if isinstance(data, bytes) else shortened(json.dumps(data, ensure_ascii=False))
