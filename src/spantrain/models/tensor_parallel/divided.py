"""Tensors of which each member of a group has a part along one dimension, and which behave as the whole would."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from spantrain.models.tensor_parallel.functions import gather_same
from spantrain.models.tensor_parallel.group import TensorGroup


class DividedTensor(Tensor):
    """What can be done on the own part is done there; for anything else the whole is gathered: the result is the same.

    Whatever is done, all members do it, since gathering needs all of them.
    """

    own: Tensor
    _sizes: tuple[int, ...]
    _dim: int
    _group: TensorGroup

    @staticmethod
    def __new__(cls, own: Tensor, *, sizes: Sequence[int], dim: int, group: TensorGroup) -> Self:
        """Wrap the own part; `sizes` are the members' lengths along `dim`, by rank."""
        shape = list(own.shape)
        shape[dim] = sum(sizes)
        made: Self = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=own.dtype, device=own.device, requires_grad=own.requires_grad
        )
        made.own, made._sizes, made._dim, made._group = own, tuple(sizes), dim, group
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do on the own part what can be; anything else on the gathered whole."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _FACTS:
                return func(*args, **named)
            done = cls._on_own(func, args, named)
            if done is not None:
                return done
            plain_args, plain_named = gathered(args), gathered(named)
        return func(*plain_args, **plain_named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse: kernels are called on own parts or on the whole only."""
        raise TypeError(f"{func}: a {cls.__name__} has come to a kernel")

    @classmethod
    def _on_own(cls, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:  # noqa: ARG003
        """Return the result of what can be done on the own part; None of anything else."""
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the members' parts, by rank."""
        return self._sizes

    def gathered(self) -> Tensor:
        """Return the whole, for work that every member does alike."""
        return gather_same(self.own, self._group, self._sizes, self._dim)

    def with_own(self, own: Tensor) -> Self:
        """Return another tensor that is divided in the same way."""
        return type(self)(own, sizes=self._sizes, dim=self._dim, group=self._group)


_FACTS = frozenset({"__get__", "dim", "is_floating_point", "nelement", "numel", "size"})
"""What is asked of shape, type and place; the wrapper itself knows."""


def gathered(value: Any, kind: type[DividedTensor] = DividedTensor) -> Any:
    """Return arguments or results with all divided tensors of a kind in them gathered."""
    if isinstance(value, kind):
        return value.gathered()
    if isinstance(value, dict):
        return {key: gathered(entry, kind) for key, entry in value.items()}
    return type(value)(gathered(entry, kind) for entry in value) if type(value) in (list, tuple) else value


def own_part(tensor: Tensor) -> Tensor:
    """Return the own part of a divided tensor, and any other as it is."""
    return tensor.own if isinstance(tensor, DividedTensor) else tensor


def with_own_part(like: Tensor, own: Tensor) -> Tensor:
    """Return a tensor divided as another is, with this own part; of one that is not divided, the part itself."""
    return like.with_own(own) if isinstance(like, DividedTensor) else own
