"""Events and commands of the outer optimizer as plain values for the control plane, and back, strictly.

Driven by the dataclasses' own types, so that each thing is described once, in `core`. A dataclass becomes an object
with all its fields, a tuple a list, an enum its value, a ticket its text; an event or a command has its name beside its
fields, and the number of its fragment if that is over 0. Reading takes exactly that: what is unknown, missing, of
another type or over a bound is refused by name, and what a dataclass itself refuses is told with its place. Nothing is
looked up by a name that came over the network but in the tables here.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, Ticket
from spantrain.errors import ProtocolError
from spantrain.outer.rules.registry import OuterRule, rules

T = TypeVar("T")
_Reader = Callable[[object, str], Any]
"""(what came, its place in the message) -> value; raises ProtocolError."""

_KIND, _FRAGMENT, _NAME = "kind", "fragment", "name"
_MAX_TEXT = 65_536
_MAX_LIST = 200_000
_EVENTS = {kind.__name__: kind for kind in get_args(OuterEvent)}
_COMMANDS = {kind.__name__: kind for kind in get_args(OuterCommand)}


def encode_message(one: OuterEvent | OuterCommand) -> dict[str, Any]:
    """Return an event or a command as plain values.

    >>> from spantrain.core.outer.events import PushSent
    >>> encode_message(PushSent(cluster="a", push=Ticket(2, 17)))
    {'kind': 'PushSent', 'cluster': 'a', 'push': '2.17'}
    """
    plain = encode_value(one)
    if not one.fragment:
        del plain[_FRAGMENT]
    return {_KIND: type(one).__name__, **plain}


def decode_event(data: object) -> OuterEvent:
    """Return the event in some plain values.

    Raises:
        ProtocolError: it is none; the message says which field is wrong, and how.
    """
    return cast(OuterEvent, _decode_kind(_EVENTS, "event", data))


def decode_command(data: object) -> OuterCommand:
    """Return the command in some plain values.

    Raises:
        ProtocolError: it is none; the message says which field is wrong, and how.
    """
    return cast(OuterCommand, _decode_kind(_COMMANDS, "command", data))


def encode_value(value: Any) -> Any:
    """Return plain values for a dataclass, or what may be in one."""
    if isinstance(value, Ticket):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: encode_value(getattr(value, field.name)) for field in fields(value)}
        return {_NAME: value.name, **plain} if isinstance(value, OuterRule) else plain
    if isinstance(value, Mapping):
        return {str(key): encode_value(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [encode_value(entry) for entry in value]
    assert value is None or isinstance(value, str | bool | int | float), f"{type(value).__name__} has no plain form"
    return value


def decode_value(kind: type[T], data: object, where: str) -> T:
    """Return a dataclass from plain values; `where` is its name in errors.

    Raises:
        ProtocolError: it is none.
    """
    return cast(T, _reader(cast(Any, kind))(data, where))


def _decode_kind(table: Mapping[str, type], what: str, data: object) -> object:
    if not isinstance(data, dict):
        raise ProtocolError(f"the {what} must be an object, got {_shown(data)}")
    name = data.get(_KIND)
    kind = table.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown {what} {_shown(name)}: install the same SpanTrain on both sides")
    plain = {_FRAGMENT: 0, **data}
    del plain[_KIND]
    if _FRAGMENT in data and _read_int(data[_FRAGMENT], f"{name}.{_FRAGMENT}") < 1:
        raise _wrong(f"{name}.{_FRAGMENT}", "a number over 0, or left out", data[_FRAGMENT])
    return _reader(kind)(plain, kind.__name__)


@cache
def _reader(kind: Any) -> _Reader:
    """Return what reads a type; made once for each."""
    if kind in (bool, int, float, str, Ticket):
        return _SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_reader(kind)
    if kind is OuterRule:
        return _read_rule
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, hints = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        assert len(hints) == 2, f"only one type or None is read, not {kind}"
        assert hints[1] is types.NoneType, f"only one type or None is read, not {kind}"
        inner = _reader(hints[0])
        return lambda data, where: None if data is None else inner(data, where)
    if origin is tuple:
        assert len(hints) == 2, f"only tuples of one type are read, not {kind}"
        assert hints[1] is ..., f"only tuples of one type are read, not {kind}"
        return _tuple_reader(_reader(hints[0]))
    assert origin is Mapping, f"no plain form for {kind}"
    return _mapping_reader(_reader(hints[0]), _reader(hints[1]))


def _read_bool(data: object, where: str) -> bool:
    if type(data) is bool:
        return data
    raise _wrong(where, "true or false", data)


def _read_int(data: object, where: str) -> int:
    if type(data) is int and -(2**63) <= data < 2**63:
        return data
    raise _wrong(where, "a whole number of 64 bits", data)


def _read_float(data: object, where: str) -> float:
    """Read a number; one that is not finite may be what somebody measured."""
    if type(data) is float:
        return data
    return float(_read_int(data, where))


def _read_text(data: object, where: str) -> str:
    if type(data) is not str:
        raise _wrong(where, "text", data)
    if len(data) > _MAX_TEXT:
        raise ProtocolError(f"{where}: may have {_MAX_TEXT} characters, got {len(data)}")
    return data


def _read_ticket(data: object, where: str) -> Ticket:
    if type(data) is str and len(data) <= 40:
        try:
            return Ticket.parse(data)
        except ValueError:
            pass
    raise _wrong(where, "a ticket like 2.17", data)


def _read_rule(data: object, where: str) -> OuterRule:
    name = data.get(_NAME) if isinstance(data, dict) else None
    known = rules()
    if not isinstance(data, dict) or not isinstance(name, str) or name not in known:
        raise _wrong(f"{where}.{_NAME}", f"one of {', '.join(sorted(known))}", name)
    return cast(OuterRule, _reader(known[name])({key: one for key, one in data.items() if key != _NAME}, where))


_SCALARS: Mapping[Any, _Reader] = {
    bool: _read_bool, int: _read_int, float: _read_float, str: _read_text, Ticket: _read_ticket,
}  # fmt: skip


def _enum_reader(kind: type[Enum]) -> _Reader:
    members = {member.value: member for member in kind}

    def read(data: object, where: str) -> Enum:
        member = members.get(data) if isinstance(data, str) else None
        if member is None:
            raise _wrong(where, f"one of {', '.join(members)}", data)
        return member

    return read


def _tuple_reader(inner: _Reader) -> _Reader:
    def read(data: object, where: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong(where, "a list", data)
        _check_length(data, where)
        return tuple(inner(entry, f"{where}[{index}]") for index, entry in enumerate(data))

    return read


def _mapping_reader(key: _Reader, inner: _Reader) -> _Reader:
    def read(data: object, where: str) -> dict[Any, Any]:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        _check_length(data, where)
        table = {key(name, f"{where}: a key"): inner(entry, f"{where}.{name}") for name, entry in data.items()}
        if len(table) < len(data):
            raise ProtocolError(f"{where}: a key is given twice")
        return table

    return read


def _check_length(data: list[Any] | dict[Any, Any], where: str) -> None:
    if len(data) > _MAX_LIST:
        raise ProtocolError(f"{where}: may have {_MAX_LIST} entries, got {len(data)}")


def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}

    def read(data: object, where: str) -> object:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        if data.keys() != readers.keys():
            raise _wrong_fields(where, data, readers)
        values = {name: reader(data[name], f"{where}.{name}") for name, reader in readers.items()}
        try:
            return kind(**values)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from None

    return read


def _wrong_fields(where: str, data: dict[str, Any], readers: Mapping[str, _Reader]) -> ProtocolError:
    unknown = sorted(_shown(name) for name in data.keys() - readers.keys())
    missing = sorted(readers.keys() - data.keys())
    parts = [f"unknown: {', '.join(unknown[:8])}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
    return ProtocolError(f"{where}: fields {'; '.join(parts)}; install the same SpanTrain on both sides")


def _wrong(where: str, wanted: str, data: object) -> ProtocolError:
    return ProtocolError(f"{where}: must be {wanted}, got {_shown(data)}")


def _shown(data: object) -> str:
    if isinstance(data, dict | list | bytes):
        return {dict: "an object", list: "a list", bytes: "bytes"}[type(data)]
    text = repr(data) if not isinstance(data, int) or abs(data) < 2**70 else "a number of over 70 bits"
    return text if len(text) <= 60 else f"{text[:57]}..."
