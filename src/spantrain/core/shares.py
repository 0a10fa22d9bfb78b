"""Parts: what a member of a tensor-parallel group has of a unit or a tensor, and what replicas divide of state."""

import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from spantrain.core.records import Bounds, Record
from spantrain.core.span import Span, apportion


class TensorPart(Record):
    """Some indices of one dimension of a tensor, in the order in which they lie in the part.

    A fused projection (queries, keys and values beside each other) has several ranges: its heads of each of the three.

    >>> TensorPart(full_shape=(12, 4), dim=0, ranges=(Span(0, 2), Span(4, 6), Span(8, 10))).shape
    (6, 4)
    """

    full_shape: tuple[int, ...]
    """Shape of the unsplit model's tensor."""
    dim: int = 0
    """Along which it is divided."""
    ranges: tuple[Span, ...] = ()
    """Indices along `dim`, apart from each other; empty: the whole tensor, as every member of the group holds it."""

    def __post_init__(self) -> None:
        if not self.ranges:
            return
        if not 0 <= self.dim < len(self.full_shape):
            raise ValueError(f"dim {self.dim} of a tensor of shape {self.full_shape}")
        ordered = sorted(self.ranges)
        if ordered[-1].hi > self.full_shape[self.dim]:
            raise ValueError(f"{ordered[-1]} reaches beyond dimension {self.dim} of {self.full_shape}")
        if any(before.hi > after.lo for before, after in itertools.pairwise(ordered)):
            raise ValueError(f"ranges overlap: {ordered}")

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return not self.ranges

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.is_whole:
            return self.full_shape
        length = sum(span.size for span in self.ranges)
        return (*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :])


def divide_pieces(count: int, shares: Sequence[float]) -> tuple[Span, ...]:
    """Divide `count` whole pieces (heads, columns) by shares, as `spans.apportion` does, but at least one for each.

    Raises:
        ValueError: there are fewer pieces than members.

    >>> divide_pieces(12, (2.0, 1.0))
    (Span(lo=0, hi=8), Span(lo=8, hi=12))
    >>> [span.size for span in divide_pieces(4, (100.0, 1.0, 1.0))]
    [2, 1, 1]
    """
    if count < len(shares):
        raise ValueError(f"{count} pieces cannot be divided among {len(shares)} devices: each needs at least one")
    sizes = list(apportion(count, shares))
    for index, size in enumerate(sizes):
        if size == 0:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[index] = 1
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(Span(end - size, end) for end, size in zip(ends, sizes, strict=True))


class MemberShare(Record):
    """The place of one device in its group: the shares of all, of which pieces are made, and which is its own.

    >>> MemberShare(shares=(2.0, 1.0)).of(4)
    0.75
    """

    shares: tuple[float, ...] = (1.0,)
    """In any unit, as in `core.plan.Replica.tp_shares`."""
    rank: int = 0
    slices_sequence: bool = False
    """Whether its group holds slices of the sequence where it can (`core.plan.Stage.sequence_parallel`)."""

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) <= 0 or not 0 <= self.rank < len(self.shares):
            raise ValueError(f"a member's share needs positive shares and a rank among them, got {self}")

    @property
    def part(self) -> float:
        """The own share as a part of one, as if everything could be divided at any point."""
        return self.shares[self.rank] / sum(self.shares)

    def of(self, pieces: int) -> float:
        """Return the part of so many whole pieces; all of them where there are fewer than members."""
        if len(self.shares) == 1 or pieces < len(self.shares):
            return 1.0
        return _parts(pieces, self.shares)[self.rank]


@lru_cache(maxsize=4096)
def _parts(pieces: int, shares: tuple[float, ...]) -> tuple[float, ...]:
    # Planners ask for the same few thousands of times.
    return tuple(span.size / pieces for span in divide_pieces(pieces, shares))


_SOME = 1e-9
"""The weight of what has no matrices, where nothing else is divided."""

ALONE = MemberShare()
"""A device that shares its work with none."""


def shares_of(shares: Sequence[float], *, slices_sequence: bool = False) -> tuple[MemberShare, ...]:
    """Return the share of each member of a group.

    >>> [share.part for share in shares_of((3, 1))]
    [0.75, 0.25]
    """
    return tuple(
        MemberShare(shares=tuple(shares), rank=rank, slices_sequence=slices_sequence) for rank in range(len(shares))
    )


def even_share(degree: int) -> MemberShare:
    """Return the share of the first of so many alike members: where pieces do not come out even, it has one more.

    >>> even_share(3).of(4)
    0.5
    """
    return MemberShare(shares=(1.0,) * degree)


class MemberBytes(Record, where="a member"):
    """What a member holds of a unit for one sample: a part that all hold whole, and its part of the rest.

    Both together may be more than a device alone holds: what is gathered and summed counts, too.
    """

    whole_bytes: Annotated[int, Bounds(low=0)]
    divided_bytes: Annotated[int, Bounds(low=0)]

    def of(self, part: float) -> int:
        """Return the bytes of a member with such a part of what is divided."""
        return self.whole_bytes + math.ceil(part * self.divided_bytes)


class TensorPieces(Record):
    """Layers of one unit that are divided together, by whole pieces."""

    pieces: int
    """Heads (with keys and values that several use), columns, channels, rows of a vocabulary."""
    parameter_bytes: int
    """Bytes of the parameters that are divided; a shared one counts in the group that has it."""
    work_share: float
    """Their part of the unit's matrices, as of its computation (`runtime.step.stage_member.unit_shares`)."""
    shared: tuple[str, ...] = ()
    """Groups of shared parameters among them, e.g. `wte`."""
    frozen_bytes: int = 0
    """Of the divided parameters' bytes, those that are not trained."""

    def __post_init__(self) -> None:
        if self.pieces < 1 or not 0 <= self.frozen_bytes <= self.parameter_bytes or not 0 <= self.work_share <= 1:
            raise ValueError(
                f"tensor pieces need at least one piece, no negative bytes and a work_share from 0 to 1, got {self}"
            )


def divided_share(divided: Sequence[TensorPieces], share: MemberShare) -> float:
    """Return the part that a member has of what is divided, by the work of each.

    >>> heads, columns = (TensorPieces(pieces=n, parameter_bytes=0, work_share=w) for n, w in ((4, 0.25), (512, 0.75)))
    >>> divided_share((heads, columns), MemberShare(shares=(3.0, 1.0)))
    0.75
    """
    weights = [group.work_share + _SOME for group in divided]
    return sum(weight * share.of(group.pieces) for weight, group in zip(weights, divided, strict=True)) / sum(weights)


class StateSharding(StrEnum):
    """What a stage's replicas divide among themselves in the place of each holding it whole, or hold elsewhere."""

    NONE = "none"
    ZERO1 = "zero1"
    """Optimizer state: each updates its rows of parameters, then all take all (Rajbhandari et al., ZeRO, SC 2020)."""
    ZERO2 = "zero2"
    """Gradients, too: each micro-batch's are summed to their holders (ZeRO stage 2)."""
    ZERO3 = "zero3"
    """Parameters too: they are gathered again for every forward and backward (ZeRO stage 3, PyTorch FSDP)."""

    OFFLOAD = "offload"
    """Nothing divided: the one device of a stage has its parameters, gradients and optimizer state in its host's
    memory, and a unit's parameters with itself only while it works (ZeRO-Offload, USENIX ATC 2021; ZeRO-Infinity)."""

    @property
    def divides_gradients(self) -> bool:
        """Whether no replica has whole gradients at any time."""
        return self in (StateSharding.ZERO2, StateSharding.ZERO3)

    @property
    def divided(self) -> str:
        """What replicas divide, in words; empty: nothing."""
        words = {"zero1": "optimizer state", "zero2": "gradients and optimizer state"}
        return {**words, "zero3": "parameters, gradients and optimizer state"}.get(self.value, "")
