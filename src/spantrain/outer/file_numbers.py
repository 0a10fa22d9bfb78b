"""A table of numbers of an outer.yaml -> the dataclass that has them, by the types and bounds of its fields."""

from collections.abc import Collection
from dataclasses import fields
from enum import Enum
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from spantrain.config.files.yaml_fields import Field
from spantrain.core.bounds import Bounds, bounds_of
from spantrain.core.quantities import parse_seconds
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule, rules

T = TypeVar("T")
_SWITCH = {"on": True, "off": False}
_BAD = object()
"""In the place of a value that cannot be read; its problem is noted."""


def read_numbers(at: Field | None, kind: type[T], *, beside: Collection[str] = ()) -> T:
    """Read a table; what it leaves out is as the dataclass has it, and what is wrong becomes problems.

    A field in seconds is written without its `_s`, and with a unit; one that may be None, as `none`. `beside`: further
    keys, which somebody else reads. Fields that are dataclasses have tables of their own.
    """
    hints = {_key(one.name): (one.name, get_type_hints(kind)[one.name]) for one in fields(kind)}  # type: ignore[arg-type]
    known = [key for key, (_, hint) in hints.items() if not hasattr(hint, "__dataclass_fields__")]
    row = at.table(required=(), optional=(*beside, *known)) if at is not None and not _is_empty(at) else {}
    values = {}
    for key in row.keys() & set(known):
        name, hint = hints[key]
        value = _read(row[key], hint, in_seconds=name != key, bounds=bounds_of(kind).get(name, Bounds()))
        if value is not _BAD:
            values[name] = value
    return kind(**values)


def read_rule(at: Field | None) -> OuterRule:
    """Read the rule of the outer step: its `name`, if it is not the default, and its numbers."""
    row = at.entries() if at is not None and at.is_table else {}
    kinds = rules()
    name = _text(row["name"]) if "name" in row else Nesterov.name
    if name not in kinds:
        row["name"].problem(f"{name!r} must be one of {', '.join(sorted(kinds))}")
    return read_numbers(at, kinds.get(name or "", Nesterov), beside=("name",))


def read_switch(at: Field) -> bool:
    """Return whether it says `on`; what is neither on nor off becomes a problem."""
    text = _text(at)
    if text not in _SWITCH:
        at.problem("must be on or off" if text is None else f"{text!r} must be on or off")
    return _SWITCH.get(text or "", True)


def _key(name: str) -> str:
    return name.removesuffix("_s")


def _read(at: Field, hint: Any, *, in_seconds: bool, bounds: Bounds) -> Any:
    may_be_none = NoneType in get_args(hint)
    if may_be_none and _text(at) == "none":
        return None
    kind = next((one for one in get_args(hint) if one is not NoneType), hint)
    if kind is bool:
        return read_switch(at)
    if issubclass(kind, Enum):
        return _read_choice(at, kind)
    if kind is int:
        count = at.count(most=int(bounds.high))
        return count if bounds.holds(count) else _refuse(at, count, f"at least {bounds.low}")
    if in_seconds:
        return at.quantity(parse_seconds, zero_allowed=bounds.holds(0))
    value = at.number()
    if value is None or bounds.holds(value):
        return _BAD if value is None else value
    return _refuse(at, value, f"{bounds}, or none" if may_be_none else str(bounds))


def _refuse(at: Field, value: float, wanted: str) -> object:
    at.problem(f"{value:g} must be {wanted}")
    return _BAD


def _read_choice(at: Field, kind: type[Enum]) -> Any:
    text = _text(at)
    if text in [one.value for one in kind]:
        return kind(text)
    at.problem(f"{'' if text is None else f'{text!r} '}must be one of {', '.join(one.value for one in kind)}")
    return _BAD


def _is_empty(at: Field) -> bool:
    return at.is_list_or_empty and not at.is_list


def _text(at: Field) -> str | None:
    return None if at.is_table or at.is_list else at.text()
