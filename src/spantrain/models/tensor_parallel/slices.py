"""Parts of tensors: taken out of the whole, put back into it."""

from dataclasses import replace

import torch
from torch import Tensor

from spantrain.core.shares import TensorPart
from spantrain.core.span import Span


def whole_of(tensor: Tensor) -> TensorPart:
    """Return the part that is all of a tensor."""
    return TensorPart(full_shape=tuple(tensor.shape))


def part_of(tensor: Tensor, dim: int, pieces: Span, of: int, blocks: int = 1) -> TensorPart:
    """Return the part of a tensor that some of its `of` pieces along `dim` are.

    Args:
        tensor: the whole.
        dim: along which it is divided.
        pieces: which of them.
        of: how many there are; they are equally long.
        blocks: how many tensors lie fused behind each other along `dim`, each of them of `of` pieces.
    """
    length, rest = divmod(tensor.shape[dim], blocks * of)
    assert rest == 0, f"{tensor.shape[dim]} do not divide into {blocks} times {of} pieces"
    starts = [block * of for block in range(blocks)]
    ranges = [Span((start + pieces.lo) * length, (start + pieces.hi) * length) for start in starts]
    return replace(whole_of(tensor), dim=dim, ranges=tuple(ranges))


def take(full: Tensor, part: TensorPart) -> Tensor:
    """Return a copy of the part of a whole tensor, without gradient.

    Raises:
        ValueError: the tensor has another shape than the part is of.
    """
    _check(full, part.full_shape, "whole tensor")
    if part.is_whole:
        return full.detach().clone()
    pieces = [full.detach().narrow(part.dim, span.lo, span.size) for span in part.ranges]
    return torch.cat(pieces, dim=part.dim)


def put(full: Tensor, part: TensorPart, local: Tensor) -> None:
    """Copy a part into its place in the whole tensor.

    Raises:
        ValueError: a tensor has another shape than the part says.
    """
    _check(full, part.full_shape, "whole tensor")
    _check(local, part.shape, "part")
    with torch.no_grad():
        if part.is_whole:
            full.copy_(local)
            return
        pieces = torch.split(local, [span.size for span in part.ranges], dim=part.dim)
        for span, piece in zip(part.ranges, pieces, strict=True):
            full.narrow(part.dim, span.lo, span.size).copy_(piece)


def _check(tensor: Tensor, wanted: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{what}: shape {tuple(tensor.shape)}, wanted {wanted}")
