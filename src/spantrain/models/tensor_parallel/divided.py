"""Tensors of which each member of a group has a part along one dimension, and which behave as the whole would.

Outputs of a divided output layer are such tensors: their cross-entropy is taken without ever putting them together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.group import TensorGroup, gather_same
from spantrain.models.units import IGNORED_LABEL


class DividedTensor(Tensor):
    """What can be done on the own part is done there; for anything else the whole is gathered: the result is the same.

    Whatever is done, all members do it, since gathering needs all of them.
    """

    own: Tensor
    sizes: tuple[int, ...]
    """Lengths of the members' parts, by rank."""
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
        made.own, made.sizes, made._dim, made._group = own, tuple(sizes), dim, group
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

    def gathered(self) -> Tensor:
        """Return the whole, for work that every member does alike."""
        return gather_same(self.own, self._group, self.sizes, self._dim)

    def with_own(self, own: Tensor) -> Self:
        """Return another tensor that is divided in the same way."""
        return type(self)(own, sizes=self.sizes, dim=self._dim, group=self._group)


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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, classes: Span, ignored_label: int, group: TensorGroup
    ) -> Tensor:
        counted = labels != ignored_label
        own = counted & (labels >= classes.lo) & (labels < classes.hi)
        column = torch.where(own, labels - classes.lo, 0)
        wide = logits.float()
        largest = wide.amax(dim=1)
        exponents = torch.exp(wide - largest[:, None])
        wanted = torch.where(own, wide.gather(1, column[:, None])[:, 0], 0.0)
        # One exchange of three numbers for each label: largest, sum of exponents below it, the label's logit.
        said = torch.stack([largest, exponents.sum(dim=1), wanted])[None]
        heard = group.all_gather(said, [1] * group.size, 0)
        top = heard[:, 0].amax(dim=0)
        total = (heard[:, 1] * torch.exp(heard[:, 0] - top)).sum(dim=0)
        losses = torch.log(total) + top - heard[:, 2].sum(dim=0)
        ctx.save_for_backward(exponents.mul_((torch.exp(largest - top) / total)[:, None]), column, own, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, own, counted = ctx.saved_tensors
        weight = torch.where(counted, gradients[0], 0.0)
        gradient = probabilities * weight[:, None]
        gradient.scatter_add_(1, column[:, None], torch.where(own, -weight, 0.0)[:, None])
        return gradient.to(ctx.dtype), None, None, None, None


class DividedLogits(DividedTensor):
    """Outputs of a layer whose classes, the last dimension, are divided among a group.

    What keeps the classes apart (a cast, a cut or a join of other dimensions, a product with a number) is done on the
    own classes, and so is the cross-entropy.
    """

    @classmethod
    def _on_own(cls, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if func is functional.cross_entropy:
            return _own_cross_entropy(*args, **named)
        logits, rest = args[0] if args else None, args[1:]
        others = (*rest, *named.values())
        if not isinstance(logits, DividedLogits) or any(isinstance(other, Tensor) for other in others):
            return None
        name = getattr(func, "__name__", "")
        if name in _CASTS or (name in _PRODUCTS and not named):
            return logits.with_own(func(logits.own, *rest, **named))
        if name == "__getitem__" and _keeps_last(rest[0], logits.dim()):
            return logits.with_own(logits.own[rest[0]])
        if name in ("view", "reshape") and not named:
            sizes = tuple(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else rest
            if sizes and sizes[-1] == logits.shape[-1]:
                return logits.with_own(logits.own.reshape(*sizes[:-1], logits.own.shape[-1]))
        if name == "flatten" and not named and len(rest) == 2 and rest[1] % logits.dim() < logits.dim() - 1:
            return logits.with_own(logits.own.flatten(*rest))
        return None

    def losses(self, labels: Tensor, ignored_label: int) -> Tensor:
        """Return each label's cross-entropy, float32, 0 for ignored ones; every member gets the same.

        The logits are `(labels, classes)`. The sums over a divided vocabulary are Megatron-LM's (Shoeybi et al., 2019,
        section 3), in one exchange in the place of three, and for shares of any size.
        """
        start = sum(self.sizes[: self._group.rank])
        classes = Span(start, start + self.sizes[self._group.rank])
        found: Tensor = _CrossEntropy.apply(self.own, labels, classes, ignored_label, self._group)  # type: ignore[no-untyped-call]
        return found


_CASTS = frozenset({"bfloat16", "contiguous", "double", "float", "half", "to"})
_PRODUCTS = frozenset({"__mul__", "__rmul__", "__truediv__", "div", "mul", "neg", "__neg__"})


def _keeps_last(index: Any, ndim: int) -> bool:
    """Whether an index of numbers, slices and an ellipsis leaves the last dimension alone."""
    places = index if isinstance(index, tuple) else (index,)
    if not all(place is Ellipsis or isinstance(place, int | slice) for place in places):
        return False
    return places[-1] is Ellipsis or places[-1] == slice(None) or (Ellipsis not in places and len(places) < ndim)


def _own_cross_entropy(
    input: Any,  # noqa: A002 - the name is torch's
    target: Tensor,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = IGNORED_LABEL,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return `functional.cross_entropy` of divided logits; None where it asks for more than is done in parts."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not (plain and isinstance(input, DividedLogits) and input.ndim == 2 and target.shape == input.shape[:1]):
        return None
    losses = input.losses(target, ignore_index)
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()
