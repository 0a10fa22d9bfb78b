"""Builds a model with some of its parameters empty, and the others with the numbers that all together would have."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from spantrain.errors import ConfigError
from spantrain.models.data.hashing import derive_seed

_NO_PARAMETER = -1
_MAX_PARTS = 400_000
"""Of one model: five times as many as those of hundreds of experts in dozens of layers."""


class Registered:
    """Parameters, numbered in the order in which a model's modules were given them."""

    def __init__(self, replaced: Callable[[int, nn.Parameter], nn.Parameter]) -> None:
        """Have each new parameter replaced by what `replaced(number, parameter)` returns."""
        self._replaced = replaced
        self._parameters: list[nn.Parameter] = []
        self._number: dict[int, int] = {}
        self._number_by_address: dict[tuple[int, int], int] = {}

    def number_of(self, parameter: nn.Parameter) -> int | None:
        """Return a parameter's number; None: no module was given it."""
        return self._number.get(id(parameter))

    def number_at(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter whose memory a tensor is; None: it is no parameter's."""
        address = _address(tensor)
        number = self._number_by_address.get(address)
        if number is None or _address(self._parameters[number]) != address:
            # A parameter may have been given other memory since.
            self._number_by_address = {_address(entry): number for number, entry in enumerate(self._parameters)}
            number = self._number_by_address.get(address)
        return number

    def enter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what stands for a parameter; one that is known already (tied, say) stands for itself."""
        if self.number_of(parameter) is not None:
            return parameter
        number = len(self._parameters)
        parameter = self._replaced(number, parameter)
        self._parameters.append(parameter)
        self._number[id(parameter)] = number
        return parameter


@contextlib.contextmanager
def registering(replaced: Callable[[int, nn.Parameter], nn.Parameter]) -> Iterator[Registered]:
    """Number and replace every parameter as soon as a module is given it, before anything is drawn for it."""
    register = nn.Module.register_parameter
    registered = Registered(replaced)

    def register_replaced(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = registered.enter(param)

    nn.Module.register_parameter = register_replaced  # type: ignore[method-assign]
    try:
        yield registered
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Refuse to build a model of more modules than any that is known; `what` begins the message.

    Raises:
        ConfigError: it has more.
    """
    made = itertools.count(1)

    def count(_owner: nn.Module, _name: str, _part: nn.Module | nn.Parameter | None) -> None:
        if next(made) > _MAX_PARTS:
            raise ConfigError(f"{what}: has more than {_MAX_PARTS} modules and parameters; its configuration is wrong")

    hooks = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every draw of random numbers a seed of its own: the run's, the parameter's number, and how often it was.

    So what a parameter begins with does not depend on which others are empty. Draws that are for no parameter are
    counted together; they are the same everywhere, since the same code runs.
    """

    def __init__(self, seed: int, registered: Registered) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._registered = registered
        self._counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; seed the processor's generator before one that draws."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._begin(args[0] if args and isinstance(args[0], Tensor) else None)
        return func(*args, **(kwargs or {}))

    def _begin(self, target: Tensor | None) -> None:
        number = None if target is None else self._registered.number_at(target)
        number = _NO_PARAMETER if number is None else number
        seed = derive_seed(self._seed, "draw", number, self._counts[number])
        self._counts[number] += 1
        torch.default_generator.manual_seed(seed)


def empty_like(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with its shape and type, and no numbers."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
