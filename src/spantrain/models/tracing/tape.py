"""What a forward did outside the blocks: steps on values, for any number of samples.

A value is a tensor that a step made. What a step was called with is kept as it was, except for tensors (`Value`,
`Weight`, `Constant`), integers that grow with the number of samples (`Samples`) and devices (`Place`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class TraceProblem(Exception):
    """A forward that cannot be written down; says why and where in the model's code."""

    def __init__(self, why: str, *, where: str, module: str) -> None:
        super().__init__(f"{why} ({where})")
        self.why = why
        self.where = where
        """FILE:LINE of the model's code."""
        self.module = module
        """Path of the module whose forward it is in; empty: the model's own."""


@dataclass(frozen=True)
class Value:
    """A tensor that a step made, or an input of the model."""

    index: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, by its name in the model."""

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that was made before the forward and is neither a parameter nor a buffer."""

    tensor: Tensor


@dataclass(frozen=True)
class Place:
    """The device that a unit is on."""


@dataclass(frozen=True)
class Samples:
    """An integer that grows with the number of samples: `each * samples + fixed`."""

    each: int
    fixed: int

    def of(self, samples: int) -> int:
        """Return it for so many samples."""
        return self.each * samples + self.fixed


@dataclass(frozen=True)
class StandIn:
    """A tensor of which only the shape and type are asked."""

    shape: tuple[int | Samples, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """What is known of a value."""

    shape: tuple[int | Samples, ...]
    dtype: torch.dtype
    from_data: bool
    """Depends on the model's inputs; otherwise on shapes, constants and weights only."""
    from_weights: bool
    """Depends on parameters."""
    known: Tensor | None = None
    """Its numbers, where they depend on neither and on no number of samples."""

    @property
    def is_constant(self) -> bool:
        """Whether its numbers depend on shapes and constants only."""
        return not self.from_data and not self.from_weights

    def bytes_of(self, samples: int) -> int:
        """Return its size for so many samples."""
        count = 1
        for size in self.shape:
            count *= size.of(samples) if isinstance(size, Samples) else size
        return count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call: of a module of the model, or of a function of torch."""

    module: str | None
    """Path of the module; None: a function."""
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    """What it returned, with values in the place of tensors."""
    changes: tuple[tuple[Value, Value], ...] = ()
    """(before, after) of tensors that it wrote into, and of those that share their memory."""
    grad_enabled: bool = True
    inside: str = ""
    """Path of the innermost opened module whose forward it is in."""
    where: str = ""
    """FILE:LINE of the model's code."""

    @property
    def makes(self) -> tuple[Value, ...]:
        """Values that there are after it."""
        returned = (part for part in parts(self.result) if isinstance(part, Value))
        return (*dict.fromkeys(returned), *(after for _, after in self.changes))

    @property
    def uses(self) -> tuple[Value, ...]:
        """Values that it needs."""
        given = (part for part in parts((self.args, dict(self.kwargs))) if isinstance(part, Value))
        return tuple(dict.fromkeys((*given, *(before for before, _ in self.changes))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Derivation:
    """How a value that a closed module made of parameters and constants alone is made again without the module."""

    steps: tuple[Step, ...]
    """Functions of weights, constants and what they make themselves (values with negative numbers)."""
    weight_bytes: int
    """Of the weights that it needs."""


@dataclass(frozen=True, kw_only=True)
class Tape:
    """A whole forward."""

    steps: tuple[Step, ...]
    inputs: tuple[Value, ...]
    """Of the model, in order."""
    result: Any
    facts: Mapping[int, Facts]
    """By the value's index."""
    derivations: Mapping[int, Derivation] = field(default_factory=dict)
    """By the value's index."""


def mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure of calls' arguments with every part changed."""
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(mapped(part, change) for part in structure))
    if isinstance(structure, (list, tuple)):
        made = [mapped(part, change) for part in structure]
        return made if isinstance(structure, list) else tuple(made)
    if isinstance(structure, dict):
        return _mapped_dict(structure, change)
    if isinstance(structure, slice):
        return slice(*(mapped(part, change) for part in (structure.start, structure.stop, structure.step)))
    return change(structure)


def _mapped_dict(structure: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    made = {key: mapped(value, change) for key, value in structure.items()}
    # Outputs of the transformers library are dictionaries and dataclasses at once; fields left out are None.
    return type(structure)(**made) if dataclasses.is_dataclass(structure) else made


def parts(structure: Any) -> Iterator[Any]:
    """Yield everything in a structure that is no container."""
    found: list[Any] = []
    mapped(structure, found.append)
    yield from found


def zipped(structure: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of two structures side by side, as far as both have the same shape."""
    return zip(parts(structure), parts(other), strict=True)
