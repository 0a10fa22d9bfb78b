"""Sums of gradients: among the replicas of a stage, and of parameters that stages share.

Losses are divided by the global batch before the backward pass, so every sum is a plain sum.

Inside a tensor-parallel group each member has the gradient of its part, and all have the same one of what they hold
whole (of a few parameters that work on divided values, such as norms of heads, parts that are summed first). Where the
replicas' groups are alike, the k-th members hold the same parts and sum among themselves, all rings at once. Where they
are not, leaders put the parts of their group together, sum whole gradients among themselves, and hand the parts back.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from spantrain.cost.collectives import RUNTIME_BUCKET_BYTES
from spantrain.models.tensor.slices import take
from spantrain.runtime.groups import MemberGroup, StageGroups
from spantrain.runtime.part_sums import GroupParts

__all__ = ["StageSum", "gradient_square"]

Parameters = Mapping[str, nn.Parameter]


class StageSum:
    """The gradient sums of one device's stage."""

    def __init__(
        self, groups: StageGroups, parts: GroupParts, *, levels: bool = False, partial: Sequence[str] = ()
    ) -> None:
        """Sum over these groups.

        Args:
            groups: of this device.
            parts: what the members of its replica hold.
            levels: members round unlike, so gradients of what all hold whole are made the leader's.
            partial: names of parameters that all hold whole, each with a part of the sum only.
        """
        self._groups = groups
        self._parts = parts
        self._levels = levels and groups.replica.size > 1
        self._partial = tuple(partial)

    @property
    def sums(self) -> bool:
        """Whether this device exchanges anything at the end of a step."""
        return self._groups.world.size > self._groups.replica.size

    def run(self, parameters: Parameters) -> None:
        """Sum every gradient over the replicas, in buckets; a missing gradient counts as zero."""
        gradients = {name: _gradient(parameter) for name, parameter in parameters.items()}
        if self._partial:
            _reduce([gradients[name] for name in self._partial], self._groups.replica)
        if not self._groups.parts_meet:
            self._run_by_leaders(gradients)
        elif self._groups.ring.size > 1:
            for bucket in _buckets(gradients.items(), {name: g.numel() for name, g in gradients.items()}):
                _reduce([gradients[name] for name in bucket], self._groups.ring)
        if self._levels:
            self._parts.level([gradient for name, gradient in gradients.items() if self._parts.whole_here(name)])

    def _run_by_leaders(self, gradients: Mapping[str, Tensor]) -> None:
        # Replicas of other degrees have their parameters in another order, and other sizes of parts.
        full_sizes = {name: torch.Size(part.full_shape).numel() for name, part in self._parts.own.items()}
        for bucket in _buckets(sorted(gradients.items()), full_sizes):
            own = {name: gradients[name] for name in bucket}
            whole = self._parts.gather(own)
            if whole:
                _reduce(list(whole.values()), self._groups.ring)
            self._parts.scatter(whole, own)

    def whole(self, name: str, parameters: Parameters) -> Tensor | None:
        """Return a parameter's whole gradient on the leader of the first replica; None on all others."""
        if not self._groups.in_first_replica:
            return None
        return self._parts.gather({name: _gradient(parameters[name])}).get(name)

    def replace(self, name: str, whole: Tensor | None, parameters: Parameters) -> None:
        """Give all devices of the stage their parts of a whole gradient that the first replica's leader has."""
        gradient, part = _gradient(parameters[name]), self._parts.own[name]
        full = gradient.new_empty(part.full_shape) if whole is None else whole.contiguous()
        self._groups.world.broadcast(full)
        gradient.copy_(take(full, part))

    def square(self, parameters: Parameters, *, leave_out: frozenset[str]) -> float | None:
        """Return this device's part of the stage's squared gradient norm; None where others have all of it."""
        if not self._groups.in_first_replica:
            return None
        if self._groups.replica.rank:
            leave_out |= {name for name in parameters if self._parts.whole_here(name)}
        return gradient_square(parameters, leave_out=leave_out)


def _reduce(gradients: Sequence[Tensor], group: MemberGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    group.all_reduce(flat)
    for gradient, piece in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Iterable[tuple[str, Tensor]], elements: Mapping[str, int]) -> list[list[str]]:
    """Group gradients of one dtype until a bucket is full, by so many elements of each; each is in exactly one."""
    buckets: list[list[str]] = []
    room, dtype = 0, None
    for name, gradient in gradients:
        size = elements[name] * gradient.element_size()
        if not buckets or size > room or dtype != gradient.dtype:
            buckets.append([])
            room, dtype = RUNTIME_BUCKET_BYTES, gradient.dtype
        buckets[-1].append(name)
        room -= size
    return buckets


def gradient_square(parameters: Parameters, *, leave_out: frozenset[str]) -> float:
    """Return the sum of squares of all gradients, but for parameters that another device counts."""
    total = 0.0
    for name, parameter in parameters.items():
        if name not in leave_out and parameter.grad is not None:
            total += float(parameter.grad.detach().double().square().sum())
    return total
