"""Made-up ways to divide tensors among devices: along any dimension, in unequal shares, in several ranges, or not."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import torch

from spantrain.core.shares import TensorPart
from spantrain.core.span import Span


def divided(shape: Sequence[int], members: int, random: Random) -> list[TensorPart]:
    """One part for each member: all of them whole, or ranges of one dimension, every index with one member."""
    whole = TensorPart(full_shape=tuple(shape))
    dims = [dim for dim, size in enumerate(shape) if size >= members]
    if members == 1 or not dims or random.random() < 0.25:
        return [whole] * members
    dim = random.choice(dims)
    size = shape[dim]
    cuts = sorted(random.sample(range(1, size), random.randint(members - 1, min(size - 1, 2 * members))))
    spans = [Span(lo, hi) for lo, hi in pairwise([0, *cuts, size])]
    random.shuffle(spans)
    shares: list[list[Span]] = [[span] for span in spans[:members]]
    for span in spans[members:]:
        random.choice(shares).append(span)
    return [TensorPart(full_shape=tuple(shape), dim=dim, ranges=tuple(ranges)) for ranges in shares]


def taken(full: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """The plain way to take a part: one range after another."""
    if part.is_whole:
        return full.clone()
    return torch.cat([full.narrow(part.dim, span.lo, span.size) for span in part.ranges], dim=part.dim)


def put(full: torch.Tensor, part: TensorPart, local: torch.Tensor) -> None:
    """The plain way to put a part back."""
    if part.is_whole:
        full.copy_(local)
        return
    start = 0
    for span in part.ranges:
        full.narrow(part.dim, span.lo, span.size).copy_(local.narrow(part.dim, start, span.size))
        start += span.size


def dealt(shapes: Mapping[str, Sequence[int]], members: int, random: Random) -> list[dict[str, TensorPart]]:
    """Every tensor divided among the members, each in a way of its own."""
    found: list[dict[str, TensorPart]] = [{} for _ in range(members)]
    for name, shape in shapes.items():
        for member, part in zip(found, divided(shape, members, random), strict=True):
            member[name] = part
    return found
