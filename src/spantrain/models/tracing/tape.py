"""What a forward did outside the blocks: steps on values, for any number of samples.

A value is a tensor that a step made. What a step was called with is kept as it was, except for tensors (`Value`,
`NamedWeight`, `Constant`), modules (`NamedModule`), integers that grow with the number of samples (`Samples`) and
devices (`UnitDevice`).

A tensor that a closed module makes of parameters and constants alone, such as a bias of learned positions, is the same
for all samples. To send it over a cut with each sample costs more than to make it again (`Deriving`) from its
parameters, whose gradients are then summed over the units that have them.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from spantrain.core.records import Record
from spantrain.models.randomness.places import CallPoint

SMALL, LARGE = 2, 3
"""Numbers of samples that forwards are written down for; of one sample much is decided otherwise."""


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
class NamedWeight:
    """A parameter or buffer, by its name in the model."""

    name: str


@dataclass(frozen=True)
class NamedModule:
    """A module that another one, or a function, is given."""

    path: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that was made before the forward and is neither a parameter nor a buffer."""

    tensor: Tensor


@dataclass(frozen=True)
class UnitDevice:
    """The device that a unit is on."""


@dataclass(frozen=True)
class Samples:
    """An integer that grows with the number of samples: `each * samples + fixed`."""

    each: int
    fixed: int

    @classmethod
    def seen(cls, small: int, large: int) -> "int | Samples":
        """Return what an integer is for any number of samples, of what it was for `SMALL` and `LARGE`.

        Integers that differ between the two are taken to grow in proportion.
        """
        each = (large - small) // (LARGE - SMALL)
        return small if small == large else cls(each, small - SMALL * each)

    def of(self, samples: int) -> int:
        """Return it for so many samples."""
        return self.each * samples + self.fixed


@dataclass(frozen=True)
class RealSamples:
    """The same of a float that is a whole number, such as a count of tokens to divide by."""

    number: Samples


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

    def bytes_of(self, samples: int) -> int:
        """Return its size for so many samples."""
        count = 1
        for size in self.shape:
            count *= size.of(samples) if isinstance(size, Samples) else size
        return count * self.dtype.itemsize

    def joined(self, large: "Facts") -> "Facts":
        """Return what is known for any number of samples, if this is for `SMALL`."""
        shape = tuple(Samples.seen(a, b) for a, b in zip(self.shape, large.shape, strict=True))  # type: ignore[arg-type]
        grows = any(isinstance(size, Samples) for size in shape)
        return Facts(
            shape=shape,
            dtype=self.dtype,
            from_data=self.from_data or large.from_data,
            from_weights=self.from_weights or large.from_weights,
            known=None if grows else _same(self.known, large.known),
        )


def _same(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return a tensor whose numbers were seen and do not depend on the number of samples."""
    if one is None or other is None or type(one) is not Tensor or type(other) is not Tensor:
        return None
    return one.detach() if torch.equal(one, other) else None


@dataclass(frozen=True)
class Tap:
    """A tensor that a module inside of a step returns, and that somebody takes from there by a hook."""

    path: str
    """Of the module."""
    call: int
    """The how-manieth call of it in the step."""
    part: int
    """The how-manieth tensor of what it returns."""


class TapeStep(Record):
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
    point: CallPoint | None = None
    """How far the module that does it had come, of one that draws random numbers."""
    taps: tuple[tuple[Tap, Value], ...] = ()
    """What is used besides, of what modules inside of it return."""
    decides: str = ""
    """FILE:LINE of the model's code where it decides by numbers of its data; empty: it does not, as far as is seen."""

    @property
    def compares(self) -> bool:
        """Whether it makes nothing, and only compares what was read of samples (`models.tracing.numbers.agreed`)."""
        return not self.makes

    @property
    def makes(self) -> tuple[Value, ...]:
        """Values that there are after it."""
        returned = (part for part in parts(self.result) if isinstance(part, Value))
        tapped = (value for _, value in self.taps)
        return (*dict.fromkeys(returned), *(after for _, after in self.changes), *tapped)

    @property
    def uses(self) -> tuple[Value, ...]:
        """Values that it needs."""
        given = (part for part in parts((self.args, dict(self.kwargs))) if isinstance(part, Value))
        return tuple(dict.fromkeys((*given, *(before for before, _ in self.changes))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Derivation:
    """How a value that a closed module made of parameters and constants alone is made again without the module."""

    steps: tuple[TapeStep, ...]
    """Functions of weights, constants and what they make themselves (values with negative numbers)."""
    weight_bytes: int
    """Bytes of the weights that it needs."""


class Tape(Record):
    """A whole forward."""

    steps: tuple[TapeStep, ...]
    inputs: Mapping[int, Value]
    """What of the samples the model was given, by number; see `models.units.Rows`."""
    result: Any
    facts: Mapping[int, Facts]
    """By the value's index."""
    derivations: Mapping[int, Derivation] = field(default_factory=dict)
    """By the value's index."""


def mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure of calls' arguments with every part changed."""
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return structure._make(mapped(part, change) for part in structure)  # type: ignore[attr-defined]
    if isinstance(structure, (list, tuple)):
        made = [mapped(part, change) for part in structure]
        return made if isinstance(structure, list) else tuple(made)
    if isinstance(structure, dict):
        entries = {key: mapped(value, change) for key, value in structure.items()}
        # Outputs of the transformers library are dictionaries and dataclasses at once; fields left out are None.
        return type(structure)(**entries) if dataclasses.is_dataclass(structure) else entries
    if isinstance(structure, slice):
        return slice(*(mapped(part, change) for part in (structure.start, structure.stop, structure.step)))
    return change(structure)


def parts(structure: Any) -> Iterator[Any]:
    """Yield everything in a structure that is no container."""
    found: list[Any] = []
    mapped(structure, found.append)
    yield from found


def tensors_in(structure: Any) -> list[Tensor]:
    """Return the tensors in a structure."""
    return [part for part in parts(structure) if isinstance(part, Tensor)]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into."""
    return 0 if tensor.is_inference() else tensor._version


def weight_of(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name in a model."""
    path, _, attribute = name.rpartition(".")
    found = getattr(model.get_submodule(path), attribute)
    assert isinstance(found, Tensor)
    return found


def zipped(structure: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of two structures side by side, as far as both have the same shape."""
    return zip(parts(structure), parts(other), strict=True)


_PACKAGE = str(Path(__file__).parents[2])
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), _PACKAGE, "transformers/utils", "transformers/modeling_layers")


def line_of_model() -> str:
    """Return FILE:LINE of the innermost code that is neither torch's nor this package's; empty: there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not any(folder in file for folder in _NOT_THE_MODEL):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _CannotDerive(Exception):
    """An argument that a step cannot be given again."""


class Deriving:
    """The functions of weights and constants that closed modules call while a forward is written down."""

    def __init__(self, weights: Mapping[int, str], sizes: Mapping[str, int]) -> None:
        """Know the weights: their names by identity, their bytes by name."""
        self._weights = weights
        self._sizes = sizes
        self._values: dict[int, Value] = {}
        self._made: dict[Value, tuple[TapeStep, Tensor, int]] = {}
        """By what step, and with the version that it had then, which all that share its memory have in common."""

    def note(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        constants: Callable[[Tensor], bool],
    ) -> None:
        """Write a call down, of which no argument depends on data; `constants` says whether a tensor is one."""

        def write(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return UnitDevice() if isinstance(part, torch.device) else part
            if id(part) in self._values:
                return self._values[id(part)]
            if id(part) in self._weights:
                return NamedWeight(self._weights[id(part)])
            if constants(part) and not is_fake(part):
                # What it is now: it may be written into later.
                return Constant(part.detach().clone())
            raise _CannotDerive

        try:
            written = mapped(tuple(args), write), mapped(kwargs, write)
        except _CannotDerive:
            return
        if not isinstance(result, Tensor) or result.is_inference():
            return
        value = self._values[id(result)] = Value(-1 - len(self._made))
        step = TapeStep(
            module=None,
            function=func,
            args=written[0],
            kwargs=written[1],
            result=value,
            grad_enabled=torch.is_grad_enabled(),
        )
        self._made[value] = step, result, result._version

    def of(self, tensor: Tensor, value: Value) -> Derivation | None:
        """Return how a tensor is made again under the name of a value; None where that is not known.

        Nor is it if something on the way was written into later.
        """
        own = self._values.get(id(tensor))
        if own is None:
            return None
        wanted, waiting = {own}, [own]
        while waiting:
            new = set(self._made[waiting.pop()][0].uses) - wanted
            wanted |= new
            waiting += new
        made = [self._made[used] for used in sorted(wanted, key=lambda one: -one.index)]  # as they were called
        if any(before._version != version for _, before, version in made):
            return None
        steps = [step for step, _, _ in made]
        signs = [sign for step in steps for sign in parts((step.args, dict(step.kwargs)))]
        names = {sign.name for sign in signs if isinstance(sign, NamedWeight)}
        renamed = replace(steps[-1], result=value)
        return Derivation(steps=(*steps[:-1], renamed), weight_bytes=sum(self._sizes[name] for name in names))
