"""Looks at numbers that say the same whatever the numbers are, so that nothing depends on them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

_FINITE: Mapping[str, bool] = MappingProxyType({"isfinite": True, "isinf": False, "isnan": False})
"""What these say of numbers that can be trained with."""
_BELOW, _ABOVE = frozenset({"__lt__", "lt"}), frozenset({"__ge__", "ge"})


class ForegoneOutcomes:
    """Checks that numbers are finite; random numbers compared with one beyond all that they may be.

    Layers that are dropped with probability 0 are looked up so.
    """

    def __init__(self) -> None:
        self._even: set[int] = set()
        """Random numbers from 0 to below 1 that all samples have in common, by identity."""
        self._certain: dict[int, bool] = {}
        """What is true, or false, as long as numbers are finite."""

    def note(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor], *, in_common: bool) -> None:
        """Note what a function of torch made; `in_common`: of one random number for all samples."""
        if name in _FINITE:
            self._certain.update((id(tensor), _FINITE[name]) for tensor in made)
        elif name in ("all", "any") and id(given[0]) in self._certain:
            self._certain.update((id(tensor), self._certain[id(given[0])]) for tensor in made)
        elif in_common and name == "rand":
            self._even.update(id(tensor) for tensor in made)

    def outcome(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Return what a function of torch says; None: it depends."""
        if name == "__bool__" and id(args[0]) in self._certain:
            return self._certain[id(args[0])]
        if name not in _BELOW | _ABOVE or id(args[0]) not in self._even or not isinstance(args[1], (int, float)):
            return None
        return None if 0 < args[1] < 1 else (args[1] >= 1) == (name in _BELOW)
