"""Bounds of numbers, said once, at the fields of a dataclass: `grace_s: Annotated[float, Bounds(low=0)]`.

The dataclass refuses what is out of them with `check_bounds`; whoever reads it from a file follows them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """From where to where a number goes.

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
        return above and (value < self.under if self.under is not None else value <= self.high)

    def __str__(self) -> str:
        if self.over is not None and self.under is not None:
            return f"between {self.over} and {self.under}"
        if self.low is not None and self.high < math.inf:
            return f"from {self.low} to {self.high}"
        begin = f"more than {self.over}" if self.over is not None else f"at least {self.low}"
        end = "" if self.under is None else f" and less than {self.under}"
        return begin + end


def bounds_of(kind: Any) -> Mapping[str, Bounds]:
    """Return the bounds of a dataclass's fields, by name; fields without any are left out."""
    hints: Mapping[str, Any] = get_type_hints(kind, include_extras=True)
    said = {one.name: get_args(hints[one.name]) for one in fields(kind) if get_origin(hints[one.name]) is Annotated}
    return {name: one for name, (_, *more) in said.items() for one in more if isinstance(one, Bounds)}


def check_bounds(one: object) -> None:
    """Refuse a dataclass with a number out of its field's bounds; None is within any.

    Raises:
        ValueError: one is; all such fields are in the message.
    """
    values = {name: (getattr(one, name), bounds) for name, bounds in bounds_of(type(one)).items()}
    wrong = [
        f"{name} must be {bounds}, got {value}"
        for name, (value, bounds) in values.items()
        if value is not None and not bounds.holds(value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
