"""The parameters that a cluster trains, wherever they are: here, on an accelerator, in each or divided among processes.

Di-PS, 3.1: the workers with the first data- and tensor-parallel rank gather what is to be sent. Kept: that, by the
parameter, so that never more than one is whole in memory beside the copies. Decided here: the first process of a
cluster has the copies; they are on the processor, in memory that does not move where they come from an accelerator.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from spantrain.core.outer_layers import ParameterSpec
from spantrain.errors import UsageError
from spantrain.outer.client_ranks import Alone, Ranks
from spantrain.outer.grouping import plain_name, spec_of

__all__ = ["LiveParameters", "ModelParameters", "empty_copy"]


class LiveParameters(Protocol):
    """Parameters that are trained; where several processes share them, all of these call the same at once."""

    @property
    def leads(self) -> bool:
        """Whether copies come to this process."""

    def memory(self) -> dict[str, Tensor]:
        """Return memory for a copy of all."""

    def copy(self, into: Mapping[str, Tensor]) -> None:
        """Copy all; `into` is used by the process that leads only."""

    def move(self, since: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Make each parameter `new` plus what it is beyond `since`; the process that leads tells what these are."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A parameter, and which processes have it."""

    spec: ParameterSpec
    divided: bool
    """Whether each of them has a part of it."""
    holders: tuple[int, ...]


class ModelParameters:
    """Copies of parameters out and changes in; where processes share a model, all of them call the same at once.

    A parameter that torch's fully_shard has divided is gathered, and divided again. One that several processes have is
    the same in all of them, and stays so bit for bit. Processes may have different parameters, as a pipeline's stages.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], ranks: Ranks | None = None
    ) -> None:
        """Take parameters, as of `named_parameters()`.

        Raises:
            UsageError: there are none, two of one name, one twice, or one that cannot be averaged.
        """
        given = parameters.items() if isinstance(parameters, Mapping) else parameters
        named = [(plain_name(name), tensor) for name, tensor in given]
        _check(named)
        self._live = {name: tensor.detach() for name, tensor in named}
        self._ranks = ranks or Alone()
        self._places = self._agreed()

    def _agreed(self) -> dict[str, _Place]:
        """Return where each parameter is, in the order in which all processes go through them."""
        own = [
            (name, spec_of(name, one).dtype, tuple(one.shape), isinstance(one, DTensor))
            for name, one in self._live.items()
        ]
        places: dict[str, _Place] = {}
        for rank, text in enumerate(self._ranks.gather(json.dumps(own))):
            for name, dtype, shape, divided in json.loads(text):
                spec = ParameterSpec(name=name, shape=tuple(shape), dtype=dtype)
                before = places.get(name)
                if before and (before.spec, before.divided) != (spec, divided):
                    raise UsageError(f"{name}: process {rank} has {spec}, process {before.holders[0]} {before.spec}")
                holders = (*before.holders, rank) if before else (rank,)
                places[name] = _Place(spec=spec, divided=divided, holders=holders)
        return places

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which all processes go through them."""
        return tuple(self._places)

    @property
    def leads(self) -> bool:
        """Whether copies come to this process."""
        return self._ranks.rank == 0

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe them, whole, those of other processes, too."""
        return tuple(place.spec for place in self._places.values())

    def part(self, names: Collection[str]) -> "ModelParameters":
        """Return some of them, which all processes go through in the same order."""
        part = copy(self)
        part._live = {name: one for name, one in self._live.items() if name in names}
        part._places = {name: one for name, one in self._places.items() if name in names}
        return part

    def memory(self) -> dict[str, Tensor]:
        """Return memory for a copy of all."""
        fixed = any(one.device.type == "cuda" for one in self._live.values())
        return {name: empty_copy(place.spec, fixed=fixed) for name, place in self._places.items()}

    @torch.no_grad()
    def copy(self, into: Mapping[str, Tensor]) -> None:
        """Copy all; `into` is used by the first process only."""
        for name, place in self._places.items():
            one, source = self._live.get(name), place.holders[0]
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            if source == self._ranks.rank and whole is not None:
                if self.leads:
                    into[name].copy_(whole, non_blocking=True)
                else:
                    self._ranks.carry(whole.cpu().contiguous(), source, 0)
            elif self.leads:
                self._ranks.carry(into[name], source, 0)
        self._settle()

    @torch.no_grad()
    def move(self, since: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Make each parameter `new` plus what it is beyond `since`; the first process tells what these are."""
        for name, place in self._places.items():
            everywhere = len(place.holders) == self._ranks.size and not place.divided
            targets = place.holders if not (place.divided or everywhere) else place.holders[:1]
            one = self._live.get(name)
            base, goal = (self._carried(place.spec, tensors.get(name), targets) for tensors in (since, new))
            if isinstance(one, DTensor):
                one.to_local().sub_(_part(one, base)).add_(_part(one, goal))
            elif one is not None:
                if base is not None and goal is not None:
                    one.sub_(_at(base, one)).add_(_at(goal, one))
                if everywhere:
                    self._ranks.share(one)
        self._settle()

    def _carried(self, spec: ParameterSpec, tensor: Tensor | None, targets: tuple[int, ...]) -> Tensor | None:
        """Return what the first process has, in the processes that are to get it; None in others."""
        mine = tensor if self.leads and self._ranks.rank in targets else None
        for target in targets:
            if target != 0 and self.leads and tensor is not None:
                self._ranks.carry(tensor, 0, target)
            elif target != 0 and target == self._ranks.rank:
                mine = empty_copy(spec, fixed=False)
                self._ranks.carry(mine, 0, target)
        return mine

    def _settle(self) -> None:
        if any(one.device.type == "cuda" for one in self._live.values()):
            torch.cuda.synchronize()


def empty_copy(spec: ParameterSpec, *, fixed: bool) -> Tensor:
    """Return memory for a whole parameter, on the processor; `fixed`: that does not move, for an accelerator."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=fixed)


def _part(like: DTensor, whole: Tensor | None) -> Tensor:
    """Return this process's part of what the first process of a mesh has."""
    if whole is None:
        whole = torch.empty(like.shape, dtype=like.dtype)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()


def _at(tensor: Tensor, where: Tensor) -> Tensor:
    return tensor.to(where.device, non_blocking=True)


def _check(named: list[tuple[str, Tensor]]) -> None:
    if not named:
        raise UsageError("an outer optimizer needs parameters, got none; give model.named_parameters()")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    first: dict[int, str] = {}
    tied = [(name, other) for name, one in named if (other := first.setdefault(id(one), name)) != name]
    problems = [f"{name} is there twice" for name in twice]
    problems += [
        f"{name} is the same as {other}; give it once, as model.named_parameters() does" for name, other in tied
    ]
    for name, one in named:
        try:
            spec_of(name, one)
        except ValueError as reason:
            problems.append(str(reason))
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UsageError(f"parameters: {'; '.join(problems[:4])}{more}")
