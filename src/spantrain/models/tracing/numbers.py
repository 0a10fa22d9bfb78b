"""Numbers, where a forward needs some while it is written down on fake tensors, which have none.

A closed module that cannot run without (experts that gather the tokens routed to them, say) runs on made-up ones: only
the shapes of what it returns are asked. What code outside of closed modules reads of tensors made of samples alone (a
check of labels, how many words stand for a picture) is computed of the example batch; as the answer may be another for
other samples, the unit that ends the model compares (`agreed`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.nn.utils.stateless import _reparametrize_module

from spantrain.errors import ConfigError
from spantrain.models.tracing.tape import Constant, Facts, TapeStep, UnitDevice, Value, mapped, parts, zipped

# Names of torch's functions that tell numbers of a tensor to Python.
_READS = frozenset(
    {"__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero",
     "item", "numpy", "tolist"}
)  # fmt: skip
SHORT_CUTS = ("/transformers/",)
"""Libraries whose code looks at numbers of samples for what changes no result: whether a mask masks anything."""
# What these return has a shape that depends on numbers.
_SHAPES_FROM_NUMBERS = frozenset({"argwhere", "masked_select", "nonzero", "unique", "unique_consecutive"})
# What these return depends on the shape and type of their argument only.
_OF_SHAPES = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
)
# What these return has the numbers of the first argument only.
_OF_FIRST = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})
_FINITE: Mapping[str, bool] = MappingProxyType({"isfinite": True, "isinf": False, "isnan": False})
"""What these say of numbers that can be trained with."""
_BELOW, _ABOVE = frozenset({"__lt__", "lt"}), frozenset({"__ge__", "ge"})


class Asks(Enum):
    """What code wants to know of the numbers of tensors."""

    NUMBERS = "numbers, for Python"
    SHAPE = "a tensor whose shape depends on them"


def asked(name: str, args: tuple[Any, ...], *, inside: bool) -> Asks | None:
    """Return what a function of torch asks of numbers; `inside` closed modules but decisions are free."""
    if name == "__bool__" or (name in _READS and not inside):
        return Asks.NUMBERS
    masks = name == "__getitem__" and any(
        isinstance(part, Tensor) and part.dtype == torch.bool for part in parts(args[1:])
    )
    by_numbers = masks or name in _SHAPES_FROM_NUMBERS or (name == "where" and len(args) == 1)
    return Asks.SHAPE if by_numbers and not inside else None


def counting(name: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return those of the tensors that a function of torch is given whose numbers count for what it makes."""
    return () if name in _OF_SHAPES else tensors[:1] if name in _OF_FIRST else tensors


def _can_train(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def made_up(shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return some numbers: small ones around zero, token 0, a mask that hides nothing."""
    if _can_train(dtype):
        return torch.linspace(-0.1, 0.1, torch.Size(shape).numel()).to(dtype).reshape(tuple(shape))
    return torch.full(tuple(shape), dtype == torch.bool, dtype=dtype)


def run_on_made_up(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, stands_for: Callable[[Tensor, Tensor], None]
) -> Any:
    """Run a module's forward with made-up numbers in the place of fake tensors; return fake tensors.

    Args:
        module: whose parameters are replaced meanwhile.
        forward: of the module.
        args: positional ones.
        kwargs: the others.
        stands_for: is told each tensor that stands for another one: first of what goes in, then of what comes out.

    Raises:
        RuntimeError: it writes into what it is given.
    """
    given = [part for part in parts((args, kwargs)) if isinstance(part, FakeTensor)]
    mode = next(tensor.fake_mode for tensor in (*given, *module.parameters()) if isinstance(tensor, FakeTensor))
    instead = {id(fake): made_up(fake.shape, fake.dtype) for fake in (*given, *module.parameters()) if is_fake(fake)}
    before = {id(instead[id(fake)]): fake for fake in given}
    for fake in (*given, *module.parameters()):
        if is_fake(fake):
            stands_for(instead[id(fake)], fake)
    own = ((name, instead.get(id(parameter))) for name, parameter in module.named_parameters())
    made: dict[str, Tensor] = {
        name: nn.Parameter(new) for name, new in own if new is not None and _can_train(new.dtype)
    }
    with _reparametrize_module(module, made, tie_weights=True):
        args, kwargs = mapped((tuple(args), kwargs), lambda part: instead.get(id(part), part))
        result = forward(*args, **kwargs)
    if any(instead[id(fake)]._version for fake in given):
        raise RuntimeError(f"{type(module).__name__} writes into what it is given")

    def fake_again(part: Any) -> Any:
        if not isinstance(part, Tensor) or is_fake(part):
            return part
        fake = before.get(id(part))
        if fake is None:
            fake = mode.from_tensor(part.detach())
            stands_for(fake, part)
        return fake

    return mapped(result, fake_again)


def numbers_of(
    value: Value, steps: Sequence[TapeStep], facts: Mapping[int, Facts], rows: Mapping[int, Tensor], buffers: Any
) -> Tensor:
    """Return the numbers of a value that steps made of samples alone.

    Args:
        value: that is asked for.
        steps: all so far.
        facts: of all values, by index.
        rows: the samples, by the index of their value; they are not changed.
        buffers: makes numbers of a parameter's or buffer's sign.
    """
    found = {index: tensor.clone() for index, tensor in rows.items()}

    def fill(sign: Any) -> Any:
        match sign:
            case Value():
                known = found.get(sign.index)
                return known if known is not None else made_up(facts[sign.index].shape, facts[sign.index].dtype)
            case Constant():
                return sign.tensor
            case UnitDevice():
                return torch.device("cpu")
        return buffers(sign)

    for step in _needed(value, steps, facts):
        assert step.function is not None
        result = step.function(*mapped(step.args, fill), **mapped(dict(step.kwargs), fill))
        found |= {sign.index: tensor for sign, tensor in zipped(step.result, result) if isinstance(sign, Value)}
        for before, after in step.changes:
            found.setdefault(after.index, fill(before))
    return found[value.index]


def _needed(value: Value, steps: Sequence[TapeStep], facts: Mapping[int, Facts]) -> list[TapeStep]:
    wanted, needed = {value.index}, list[TapeStep]()
    for step in reversed(steps):
        if any(made.index in wanted for made in step.makes):
            needed.append(step)
            wanted |= {used.index for used in step.uses if not facts[used.index].from_weights}
    return needed[::-1]


def agreed(read: Callable[..., Any], args: tuple[Any, ...], *, outcome: Any, where: str) -> None:
    """Refuse samples of which code would read something else than it did when the model was followed.

    Raises:
        ConfigError: it would, so that it might do something else with them.
    """
    found = read(*args)
    if found != outcome:
        raise ConfigError(
            f"the model's code reads {outcome} of the samples that it was followed with, and {found} of others, by "
            f"`{getattr(read, '__name__', read)}` at {where}: what it does would depend on how a batch is cut; give "
            "samples of which it reads the same, or write it without looking at numbers (torch.where, masks)"
        )


class ShapesOfNumbers:
    """Tensors whose shapes depend on numbers of samples; nothing is to be compared where code does not look at them."""

    def __init__(self) -> None:
        self._steps: dict[int, frozenset[int]] = {}
        """By identity of a tensor: numbers of the steps that compare what its shape depends on."""
        self._compared: set[int] = set()
        self._looked_at: set[int] = set()

    def begin(self, tensors: Sequence[Tensor], step: int) -> None:
        """Note tensors, and the number of the step that compares their sizes."""
        self._compared.add(step)
        self._steps.update((id(tensor), frozenset([step])) for tensor in tensors)

    def note(self, given: Sequence[Tensor], made: Sequence[Tensor], *, looks: bool) -> None:
        """Note what a call made of tensors; one that made none, or that `looks`, is told their shapes."""
        steps = frozenset[int]().union(*(self._steps.get(id(tensor), ()) for tensor in given))
        if steps and (looks or not made):
            self._looked_at |= steps
        self._steps.update((id(tensor), steps) for tensor in made if steps and tensor.dim())

    def needed(self, steps: Sequence[TapeStep]) -> tuple[TapeStep, ...]:
        """Return all steps but those that compare what nobody looked at."""
        unread = self._compared - self._looked_at
        return tuple(step for number, step in enumerate(steps) if number not in unread)


def sizes(tensors: Any) -> list[int]:
    """Return all sizes of tensors, one after the other."""
    return [size for part in parts(tensors) if isinstance(part, Tensor) for size in part.shape]


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
