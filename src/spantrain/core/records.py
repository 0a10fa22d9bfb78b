"""Named values that do not change (`Record`), and bounds of numbers among them, said once, at the fields.

A number is `grace_s: Annotated[float, Bounds(low=0)]`. The dataclass refuses what is out of them with `check_bounds`;
whoever reads it from a file follows them. One that people make by hand looks for values of another type first
(`type_problems`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, dataclass_transform, get_args, get_origin, get_type_hints

LARGEST_NUMBER = 2**53
"""Whole numbers up to it are exact as floating-point numbers too."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Record:
    """Named values that do not change: every subclass is made a frozen dataclass; none can be decorated again."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        dataclass(frozen=True, kw_only=True)(cls)


class Bounds(Record):
    """From where to where a number goes; in any case it is finite.

    >>> [str(one) for one in (Bounds(low=0), Bounds(over=0), Bounds(low=0, high=1), Bounds(low=0, under=1))]
    ['at least 0', 'more than 0', 'from 0 to 1', 'at least 0 and less than 1']
    """

    low: float | None = None
    over: float | None = None
    """The number is more than this; else `low` is the least."""
    high: float = math.inf
    under: float | None = None
    """The number is less than this; else `high` is the largest."""

    def holds(self, value: float) -> bool:
        """Whether a number is within them."""
        above = value > self.over if self.over is not None else self.low is None or value >= self.low
        return above and value < math.inf and (value < self.under if self.under is not None else value <= self.high)

    def __str__(self) -> str:
        if self.over is not None and self.under is not None:
            return f"between {self.over} and {self.under}"
        if self.low is not None and self.high < math.inf:
            return f"from {self.low} to {self.high}"
        begin = f"more than {self.over}" if self.over is not None else f"at least {self.low}"
        end = "" if self.under is None else f" and less than {self.under}"
        return begin + end


Positive = Annotated[float, Bounds(over=0)]
NotNegative = Annotated[float, Bounds(low=0)]


def bounds_of(kind: Any) -> Mapping[str, Bounds]:
    """Return the bounds of a dataclass's fields, by name; fields without any are left out."""
    hints: Mapping[str, Any] = get_type_hints(kind, include_extras=True)
    said = {one.name: get_args(hints[one.name]) for one in fields(kind) if get_origin(hints[one.name]) is Annotated}
    return {name: one for name, (_, *more) in said.items() for one in more if isinstance(one, Bounds)}


_known_bounds: Callable[[Any], Mapping[str, Bounds]] = cache(bounds_of)


def bound_problems(one: Any) -> list[str]:
    """Say which numbers of a dataclass are out of their field's bounds; None is within any."""
    return [
        f"{name} must be {'finite and ' if value == math.inf else ''}{bounds}, got {value}"
        for name, bounds in _known_bounds(type(one)).items()
        if (value := getattr(one, name)) is not None and not bounds.holds(value)
    ]


def check_bounds(one: object, where: str = "") -> None:
    """Refuse a dataclass with a number out of its field's bounds; `where`, if anything, begins the message.

    Raises:
        ValueError: one is; all such fields are in the message.
    """
    wrong = bound_problems(one)
    if wrong:
        raise ValueError((f"{where}: " if where else "") + "; ".join(wrong))


class WithinBounds(Record):
    """One whose numbers are within their fields' bounds."""

    def __post_init__(self) -> None:
        check_bounds(self)


def type_problems(one: Any) -> list[str]:
    """Say which fields of a dataclass that are for numbers hold none; None is one where it is allowed."""
    hints: Mapping[str, Any] = get_type_hints(type(one))
    found = []
    for name in (own.name for own in fields(one)):
        value, may_be_none = getattr(one, name), NoneType in get_args(hints[name])
        kinds = {*get_args(hints[name])} - {NoneType} if may_be_none else {hints[name]}
        if value is None and may_be_none:
            continue
        if kinds == {int} and (type(value) is not int or abs(value) > LARGEST_NUMBER):
            most = f" of at most {LARGEST_NUMBER}" if type(value) is int else ""
            found.append(f"{name} must be a whole number{most}, got {value!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kinds == {float} and not is_number:
            found.append(f"{name} must be a finite number, got {value!r}")
    return found
