"""Tensors that members of a tensor-parallel group hold parts of, put together and taken apart again.

Gradients mostly; parameters themselves where a run is a cluster of an outer optimizer (`runtime.worker.outer_part`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.errors import ConfigError
from spantrain.models.tensor_parallel.division import put, take
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.own_rows import fill
from spantrain.runtime.words import packed_words, read_words

Parts = Mapping[str, TensorPart]


class _OwnParts(Record):
    """What a member holds, as the others are told of it."""

    parts: Parts


@dataclass(frozen=True)
class GroupParts:
    """What each member of one replica holds of the stage's parameters, by their names in the unsplit model."""

    group: MemberGroup
    by_member: Sequence[Parts]
    """In the order of ranks."""

    @property
    def own(self) -> Parts:
        """Of this member."""
        return self.by_member[self.group.rank]

    def whole_here(self, name: str) -> bool:
        """Whether every member holds all of a parameter."""
        return self.own[name].is_whole

    def gather(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole gradients at the leader, put together from all members' parts; nothing elsewhere.

        Parameters that every member holds whole have the same gradient on all of them: the leader's is taken.
        """
        divided = [name for name in gradients if not self.whole_here(name)]
        if self.group.rank:
            if divided:
                self.group.send(torch.cat([gradients[name].reshape(-1) for name in divided]), 0)
            return {}
        whole = {
            name: gradient if self.whole_here(name) else gradient.new_zeros(self.own[name].full_shape)
            for name, gradient in gradients.items()
        }
        for member, parts in enumerate(self.by_member):
            held = gradients if member == 0 else self._received(parts, {name: whole[name] for name in divided}, member)
            for name in divided:
                put(whole[name], parts[name], held[name])
        return whole

    def scatter(self, whole: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Give every member its parts of the leader's whole gradients (`whole` is empty elsewhere), in place."""
        if self.group.rank == 0:
            for member, parts in enumerate(self.by_member[1:], start=1):
                flat = torch.cat([take(full, parts[name]).reshape(-1) for name, full in whole.items()])
                self.group.send(flat, member)
            found: Mapping[str, Tensor] = {name: take(full, self.own[name]) for name, full in whole.items()}
        else:
            found = self._received(self.own, gradients, 0)
        for name, gradient in gradients.items():
            gradient.copy_(found[name])

    def level(self, gradients: Sequence[Tensor]) -> None:
        """Give every member the leader's gradients of parameters that all hold whole: unlike devices round unlike."""
        if gradients and self.group.size > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.group.broadcast(flat)
            fill(gradients, flat)

    def _received(self, parts: Parts, like: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Receive one member's tensors of these names, which have its parts' shapes."""
        if not like:
            return {}
        shapes = {name: torch.Size(parts[name].shape) for name in like}
        flat = next(iter(like.values())).new_empty(sum(shape.numel() for shape in shapes.values()))
        self.group.receive(flat, source)
        pieces = flat.split_with_sizes([shape.numel() for shape in shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def hand_out(whole: Tensor | None, into: Tensor, part: TensorPart, devices: MemberGroup) -> None:
    """Give each device its part, in place, of a whole tensor that the first one has; `whole` is None elsewhere."""
    full = into if part.is_whole and into.is_contiguous() else into.new_empty(part.full_shape)
    if whole is not None and whole is not full:
        full.copy_(whole)
    devices.broadcast(full)
    if full is not into:
        into.copy_(take(full, part))


def share_parts(group: MemberGroup, own: Parts, torch_device: torch.device) -> GroupParts:
    """Tell all members of a replica what each of them holds.

    Raises:
        ConfigError: together they do not hold every parameter once.
    """
    found = [own]
    if group.size > 1:
        words, members = packed_words(_OwnParts(parts=own)), range(group.size)
        heard = [_of_member(member, words, group, torch_device) for member in members]
        found = [read_words(_OwnParts, heard[one], f"member {one}", "says what it holds").parts for one in members]
    _check(found)
    return GroupParts(group, found)


def _of_member(member: int, own: Tensor, group: MemberGroup, torch_device: torch.device) -> Tensor:
    """Return the bytes of one member, on the processor as the own ones are."""
    size = torch.tensor([own.numel()], dtype=torch.int64, device=torch_device)
    group.broadcast(size, member)
    data = own.to(torch_device) if group.rank == member else own.new_empty(int(size), device=torch_device)
    group.broadcast(data, member)
    return data.cpu()


def _check(by_member: Sequence[Parts]) -> None:
    names = by_member[0].keys()
    if any(parts.keys() != names for parts in by_member):
        raise ConfigError("the devices of a replica hold different parameters; give all of them the same model")
    for name in names:
        parts = [one[name] for one in by_member]
        held = sum(span.size for part in parts for span in part.ranges)
        whole = [part.is_whole for part in parts]
        if all(whole):
            continue
        first = parts[0]
        if any(whole) or {(p.full_shape, p.dim) for p in parts} != {(first.full_shape, first.dim)}:
            raise ConfigError(f"{name}: the devices of a replica divide it in different ways: {parts}")
        if held != first.full_shape[first.dim]:
            raise ConfigError(
                f"{name}: the devices of a replica hold {held} of {first.full_shape[first.dim]} along dimension "
                f"{first.dim}; every one must be held once"
            )
