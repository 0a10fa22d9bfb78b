"""Who gives whom which blocks of tensors: a pure plan, for any way to divide them before and after.

A tensor's part (`core.shares.TensorPart`) is a set of boxes: indices from a to b along each dimension. What is wanted
is cut against what is held, box by box, until every wanted element has one source. Parts may be divided along other
dimensions, by other shares or not at all on the two sides. Nothing here knows files or networks. Devices of one place
that lack the same share the work: each takes a part of it from afar, and gives that to the others.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from spantrain.core.checkpoint import StoredFile, StoredTensor
from spantrain.core.cluster import Cluster
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span

Box = tuple[Span, ...]
"""Indices along each dimension of the whole tensor; () of a scalar."""
_IN_SITE = 1
"""Nearness up to which devices are in one place."""


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A box of a tensor, the smallest thing that is asked for."""

    tensor: str
    box: Box

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(span.size for span in self.box)


def boxes_of(part: TensorPart) -> tuple[Box, ...]:
    """Return a part as boxes of the whole tensor, in the order in which they lie in the part; none if it is empty."""
    if 0 in part.full_shape:
        return ()
    whole = tuple(Span(0, size) for size in part.full_shape)
    if part.is_whole:
        return (whole,)
    return tuple((*whole[: part.dim], span, *whole[part.dim + 1 :]) for span in part.ranges)


def place_of(box: Box, part: TensorPart) -> tuple[slice, ...]:
    """Return where a box lies in the tensor of a part; it must be inside one of the part's ranges."""
    found = [slice(span.lo, span.hi) for span in box]
    if part.is_whole:
        return tuple(found)
    start = 0
    for span in part.ranges:
        if span.contains(box[part.dim]):
            shift = start - span.lo
            found[part.dim] = slice(box[part.dim].lo + shift, box[part.dim].hi + shift)
            return tuple(found)
        start += span.size
    raise AssertionError(f"{box} is not inside one range of {part}")


def plan_fetch(
    wanted: Mapping[str, TensorPart], held: Sequence[tuple[str, Mapping[str, TensorPart]]]
) -> tuple[dict[str, tuple[TensorBlock, ...]], tuple[TensorBlock, ...]]:
    """Choose a source for every element that is wanted.

    Args:
        wanted: parts by tensor.
        held: (source, parts by tensor); of sources that hold the same, the first one gives.

    Returns:
        The blocks by source, each within one range of the part there and of the part wanted; and what nobody holds.
    """
    chosen: dict[str, list[TensorBlock]] = {}
    missing: list[TensorBlock] = []
    for tensor, part in wanted.items():
        left = list(boxes_of(part))
        for source, parts in held:
            if left and tensor in parts:
                found, left = _divide(left, boxes_of(parts[tensor]))
                if found:
                    chosen.setdefault(source, []).extend(TensorBlock(tensor, box) for box in found)
        missing.extend(TensorBlock(tensor, box) for box in left)
    return {source: tuple(blocks) for source, blocks in chosen.items()}, tuple(missing)


def _divide(wanted: Sequence[Box], held: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    """Return what of the wanted boxes is held, and the rest."""
    found: list[Box] = []
    left = list(wanted)
    for have in held:
        rest: list[Box] = []
        for box in left:
            spans = [one.intersect(other) for one, other in zip(box, have, strict=True)]
            both = tuple(span for span in spans if span is not None)
            if len(both) < len(spans):
                rest.append(box)
            else:
                found.append(both)
                rest.extend(_remainders(box, both))
        left = rest
    return found, left


def _remainders(box: Box, inner: Box) -> Iterator[Box]:
    """Cut what is left of a box around an inner one into boxes, dimension by dimension."""
    for dim, (outer, span) in enumerate(zip(box, inner, strict=True)):
        for lo, hi in ((outer.lo, span.lo), (span.hi, outer.hi)):
            if lo < hi:
                yield (*inner[:dim], Span(lo, hi), *box[dim + 1 :])


def chunks_of(
    blocks: Iterable[TensorBlock], element_bytes: Mapping[str, int], max_bytes: int
) -> Iterator[tuple[TensorBlock, ...]]:
    """Group blocks into messages of at most `max_bytes`, cutting those that are larger; both sides do it alike.

    Args:
        blocks: in the order in which they were asked for.
        element_bytes: of one element, by tensor.
        max_bytes: of a message; at least one element.
    """
    group: list[TensorBlock] = []
    room = max_bytes
    for block in blocks:
        for piece in _pieces(block, max(1, max_bytes // element_bytes[block.tensor])):
            size = piece.elements * element_bytes[block.tensor]
            if group and size > room:
                yield tuple(group)
                group, room = [], max_bytes
            group.append(piece)
            room -= size
    if group:
        yield tuple(group)


def _pieces(block: TensorBlock, max_elements: int) -> Iterator[TensorBlock]:
    """Cut a block into ones of at most so many elements, along its first dimensions."""
    if block.elements <= max_elements:
        yield block
        return
    choices: list[tuple[Span, ...]] = []
    below = block.elements
    for span in block.box:
        below //= span.size
        size = max(1, min(span.size, max_elements // below)) if below <= max_elements else 1
        choices.append(tuple(Span(lo, min(lo + size, span.hi)) for lo in range(span.lo, span.hi, size)))
    for box in product(*choices):
        yield TensorBlock(block.tensor, box)


def missing_text(missing: Sequence[TensorBlock]) -> str:
    """Say in a few words which blocks nobody holds."""
    names = sorted({block.tensor for block in missing})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class HeldTensors(Record):
    """What one device holds, as others are told of it."""

    device: str
    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, float] = field(default_factory=dict)
    """As a checkpoint keeps them; of who holds nothing, none."""


Described = StoredFile | HeldTensors
"""What is known of tensors without reading them: which device has them, and each by its stored name."""


class ExchangeGroup(Record):
    """The devices that exchange, as one of them sees them."""

    own: str
    peers: tuple[str, ...]
    """All others."""
    nearness: Callable[[str], int]
    """How near a peer is: it is asked before those with greater numbers that have the same."""

    def by_nearness(self) -> list[str]:
        """Return the peers, nearest first; of those as near each device begins with another one."""
        everybody = sorted((self.own, *self.peers))
        own = everybody.index(self.own)

        def rank(peer: str) -> tuple[int, int]:
            return self.nearness(peer), (everybody.index(peer) - own) % len(everybody)

        return sorted(self.peers, key=rank)


def group_of(cluster: Cluster, own: str, devices: tuple[str, ...]) -> ExchangeGroup:
    """Return the devices of a run as one of them sees them: those of its host are nearest, then those of its site."""
    here = cluster.device_by_name[own]

    def nearness(peer: str) -> int:
        there = cluster.device_by_name[peer]
        return 0 if there.host == here.host else 1 if there.site == here.site else 2

    return ExchangeGroup(own=own, peers=tuple(name for name in devices if name != own), nearness=nearness)


def takers_of(
    group: ExchangeGroup, alike: Sequence[str], wanted: Collection[str], files: Mapping[str, Described]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return several devices, and who of them takes a tensor from afar, by name, of those that nobody near holds.

    All of the several come to the same answer; nobody and nothing, where there is nothing to be divided.

    Args:
        group: all devices of an exchange, as one of the several sees them.
        alike: devices that are to hold the same, all of it.
        wanted: names of what they are to hold.
        files: what each device holds.
    """
    near = [name for name in (group.own, *group.peers) if name == group.own or group.nearness(name) <= _IN_SITE]
    several = sorted(set(alike) & set(near))
    if group.own not in several or len(several) < 2:
        return (), {}
    held = {tensor for name in near if name in files for tensor in files[name].tensors}
    lacking = [(number, name) for number, name in enumerate(sorted(wanted)) if name not in held]
    return tuple(several), {name: several[number % len(several)] for number, name in lacking}
