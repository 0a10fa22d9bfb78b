"""Outputs of a divided output layer, and their cross-entropy, without ever putting them together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.divided import DividedTensor
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.units import IGNORED_LABEL


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


def divided_cross_entropy(
    logits: Tensor, labels: Tensor, classes: Span, group: TensorGroup, *, ignored_label: int = IGNORED_LABEL
) -> Tensor:
    """Return each label's cross-entropy, float32, 0 for ignored ones; every member gets the same.

    The sums over a divided vocabulary are Megatron-LM's (Shoeybi et al., 2019, section 3), in one exchange in the place
    of three, and for shares of any size.

    Args:
        logits: `(labels, own classes)`.
        labels: `(labels,)`, of all classes.
        classes: the own ones.
        group: members have the other classes.
        ignored_label: a label that counts nothing.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, classes, ignored_label, group)  # type: ignore[no-untyped-call]
    return losses


class DividedLogits(DividedTensor):
    """Outputs of a layer whose classes, the last dimension, are divided among a group.

    What keeps the classes apart (a cast, a cut or a join of other dimensions, a product with a number) is done on the
    own classes, and so is the cross-entropy.
    """

    @classmethod
    def of(cls, own: Tensor, all_classes: Sequence[Span], group: TensorGroup) -> "DividedLogits":
        """Wrap the own classes; `all_classes` are those of each member."""
        return cls(own, sizes=[span.size for span in all_classes], dim=-1, group=group)

    @classmethod
    def _on_own(cls, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if func is functional.cross_entropy:
            return _own_cross_entropy(*args, **named)
        return _on_own_classes(getattr(func, "__name__", ""), func, args, named)

    def losses(self, labels: Tensor, ignored_label: int) -> Tensor:
        """Return each label's cross-entropy; the logits are `(labels, classes)`."""
        start = sum(self._sizes[: self._group.rank])
        classes = Span(start, start + self._sizes[self._group.rank])
        return divided_cross_entropy(self.own, labels, classes, self._group, ignored_label=ignored_label)


_CASTS = frozenset({"bfloat16", "contiguous", "double", "float", "half", "to"})
_PRODUCTS = frozenset({"__mul__", "__rmul__", "__truediv__", "div", "mul", "neg", "__neg__"})


def _on_own_classes(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> DividedLogits | None:
    """Return the result of what leaves the classes where they are; None of anything else."""
    logits, rest = args[0] if args else None, args[1:]
    if not isinstance(logits, DividedLogits) or any(isinstance(other, Tensor) for other in (*rest, *named.values())):
        return None
    classes = logits.shape[-1]
    if name in _CASTS or (name in _PRODUCTS and not named):
        return logits.with_own(func(logits.own, *rest, **named))
    if name == "__getitem__" and _keeps_last(rest[0], logits.dim()):
        return logits.with_own(logits.own[rest[0]])
    if name in ("view", "reshape") and not named:
        sizes = tuple(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else rest
        if sizes and sizes[-1] == classes:
            return logits.with_own(logits.own.reshape(*sizes[:-1], logits.own.shape[-1]))
    if name == "flatten" and not named and len(rest) == 2 and rest[1] % logits.dim() < logits.dim() - 1:
        return logits.with_own(logits.own.flatten(*rest))
    return None


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
