"""Notes how closed modules make tensors of parameters and constants alone, such as a bias of learned positions.

Such a tensor is the same for all samples: to send it over a cut with each sample costs more than to make it again from
its parameters, whose gradients are then summed over the units that have them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from spantrain.models.tracing.tape import Constant, Derivation, Place, Step, Value, Weight, mapped, parts


class _CannotDerive(Exception):
    """An argument that a step cannot be given again."""


class Deriving:
    """The functions of weights and constants that closed modules call while a forward is written down."""

    def __init__(self, weights: Mapping[int, str], sizes: Mapping[str, int]) -> None:
        """Know the weights: their names by identity, their bytes by name."""
        self._weights = weights
        self._sizes = sizes
        self._values: dict[int, Value] = {}
        self._maker: dict[Value, Step] = {}
        self._made: dict[Value, tuple[Tensor, int]] = {}
        """With the version that it had then, which all that share its memory have in common."""

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
                return Place() if isinstance(part, torch.device) else part
            if id(part) in self._values:
                return self._values[id(part)]
            if id(part) in self._weights:
                return Weight(self._weights[id(part)])
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
        value = self._values[id(result)] = Value(-1 - len(self._maker))
        self._made[value] = result, result._version
        self._maker[value] = Step(
            module=None,
            function=func,
            args=written[0],
            kwargs=written[1],
            result=value,
            grad_enabled=torch.is_grad_enabled(),
        )

    def of(self, tensor: Tensor, value: Value) -> Derivation | None:
        """Return how a tensor is made again under the name of a value; None where that is not known.

        Nor is it if something on the way was written into later.
        """
        own = self._values.get(id(tensor))
        if own is None:
            return None
        steps = list(self._closure(own))
        made = [self._made[used] for step in steps for used in step.makes]
        if any(before._version != version for before, version in made):
            return None
        renamed = replace(steps[-1], result=value)
        names = {
            sign.name for step in steps for sign in parts((step.args, dict(step.kwargs))) if isinstance(sign, Weight)
        }
        return Derivation(steps=(*steps[:-1], renamed), weight_bytes=sum(self._sizes[name] for name in names))

    def _closure(self, value: Value) -> Iterator[Step]:
        """Yield the steps that make a value, in the order in which they were called."""
        wanted, waiting = {value}, [value]
        while waiting:
            for used in self._maker[waiting.pop()].uses:
                if used not in wanted:
                    wanted.add(used)
                    waiting.append(used)
        yield from (self._maker[used] for used in sorted(wanted, key=lambda one: -one.index))
