"""Named values that do not change (`Record`), and bounds of numbers among them, said once, at the fields.

A number is `grace_s: Annotated[float, Bounds(low=0)]`. The dataclass refuses what is out of them; whoever reads it from
a file follows them. One that people make by hand looks for values of another type first (`type_problems`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, dataclass_transform, get_args, get_origin, get_type_hints

LARGEST_NUMBER = 2**53
"""Whole numbers up to it are exact as floating-point numbers too."""


def _bounds_in(hint: Any) -> "Bounds | None":
    found = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one for one in found if isinstance(one, Bounds)), None)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Record:
    """Named values that do not change: every subclass is made a frozen dataclass; none can be decorated again.

    One whose fields have bounds checks them, unless it has a `__post_init__` of its own, which does.

    >>> class Rate(Record, where="the rate of {0.name}"):
    ...     name: str
    ...     per_s: Annotated[float, Bounds(over=0)]
    >>> Rate(name="a", per_s=0.0)
    Traceback (most recent call last):
    ValueError: the rate of a: per_s must be more than 0, got 0.0
    """

    _where = ""
    """What begins the message about a number that is out of bounds, with the record as `{0}`; empty: nothing does."""

    def __init_subclass__(cls, *, where: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls._where = where or cls._where
        if not hasattr(cls, "__post_init__") and any(map(_bounds_in, cls.__annotations__.values())):
            cls.__post_init__ = check_bounds  # type: ignore[attr-defined]
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
        end = "" if self.high == math.inf else f" and at most {self.high}"
        return begin + (end if self.under is None else f" and less than {self.under}")


Positive = Annotated[float, Bounds(over=0)]
NotNegative = Annotated[float, Bounds(low=0)]


def bounds_of(kind: Any) -> Mapping[str, Bounds]:
    """Return the bounds of a dataclass's fields, by name; fields without any are left out."""
    hints: Mapping[str, Any] = get_type_hints(kind, include_extras=True)
    return {own.name: bounds for own in fields(kind) if (bounds := _bounds_in(hints[own.name])) is not None}


_known_bounds: Callable[[Any], Mapping[str, Bounds]] = cache(bounds_of)


def bound_problems(one: Any) -> list[str]:
    """Say which numbers of a dataclass are out of their field's bounds; None is within any."""
    return [
        f"{name} must be {'finite and ' if value == math.inf else ''}{bounds}, got {value}"
        for name, bounds in _known_bounds(type(one)).items()
        if (value := getattr(one, name)) is not None and not bounds.holds(value)
    ]


def check_bounds(one: object) -> None:
    """Refuse a dataclass with a number out of its field's bounds.

    Raises:
        ValueError: one is; all such fields are in the message.
    """
    wrong = bound_problems(one)
    if wrong:
        where = getattr(one, "_where", "").format(one)
        raise ValueError((f"{where}: " if where else "") + "; ".join(wrong))


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
