"""The parameters that a cluster trains, wherever they are: here, on an accelerator, in each or divided among processes.

Di-PS, 3.1: the workers with the first data- and tensor-parallel rank gather what is to be sent. Kept: that, by the
parameter, so that never more than one is whole in memory beside the copies. Decided here: the first process of a
cluster has the copies; they are on the processor, in memory that does not move where they come from an accelerator.
What several processes have under one name and shape are copies only if they are equal: that is looked at when it
begins, and with each copy, since parts that are not copies may begin with the same numbers.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from spantrain.core.outer.layers import PARAMETER_TYPES, ParameterSpec, plain_name
from spantrain.core.records import Record
from spantrain.devices.registry import settle
from spantrain.errors import UsageError
from spantrain.formats.tensor_bytes import dtype_name
from spantrain.outer.client.ranks import Ranks

_LOG = logging.getLogger(__name__)
_BLOCK = 1024
"""Of eight bytes, that are summed up before their place counts."""
_ROUNDING = 1e-3
"""Of a parameter's norm: what copies that were trained on unlike devices may be apart."""


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
        """Make each parameter `new` plus what it is beyond `since` if finite; the process that leads tells these."""


class _ParameterPlacement(Record):
    """A parameter, and which processes have it."""

    spec: ParameterSpec
    divided: bool
    """Whether each of them has a part of it."""
    holders: tuple[int, ...]
    firsts: tuple[int, ...]
    """Those of them that divide it among others of a mesh."""
    pieces: tuple[str, ...]
    """By holder: which part it has; those of equal parts have copies."""

    @property
    def has_copies(self) -> bool:
        """Whether two processes have the same of it."""
        return len(set(self.pieces)) < len(self.holders)


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
            UsageError: there are none, two of one name, one twice, or one that cannot be averaged; or processes have
                other numbers under one name and shape.
        """
        given = parameters.items() if isinstance(parameters, Mapping) else parameters
        named = [(plain_name(name), tensor) for name, tensor in given]
        _check(named)
        self._live = {name: tensor.detach() for name, tensor in named}
        self._ranks = ranks or Ranks()
        self.leads = self._ranks.rank == 0
        """Whether copies come to this process."""
        self._places = self._agreed()
        self._told_of_drift: set[str] = set()
        """Where copies differ, once it was told; the same set in all parts (`part`)."""
        self._check_copies(trained=False)

    def _agreed(self) -> dict[str, _ParameterPlacement]:
        """Return where each parameter is, in the order in which all processes go through them."""
        own = [(name, spec_of(name, one).dtype, tuple(one.shape), *_piece(one)) for name, one in self._live.items()]
        places: dict[str, _ParameterPlacement] = {}
        for rank, text in enumerate(self._ranks.gather(json.dumps(own))):
            for name, dtype, shape, piece, first in json.loads(text):
                spec = ParameterSpec(name=name, shape=tuple(shape), dtype=dtype)
                nowhere = _ParameterPlacement(spec=spec, divided=bool(piece), holders=(), firsts=(), pieces=())
                before = places.get(name, nowhere)
                if (before.spec, before.divided) != (spec, bool(piece)):
                    raise UsageError(f"{name}: process {rank} has {spec}, process {before.holders[0]} {before.spec}")
                firsts, pieces = (*before.firsts, *[rank] * first), (*before.pieces, piece)
                places[name] = replace(before, holders=(*before.holders, rank), firsts=firsts, pieces=pieces)
        return places

    def _check_copies(self, *, trained: bool) -> None:
        """Look whether copies are equal, in all processes at once.

        Copies that were trained on unlike devices may differ by what rounding makes of it, which is told once; parts
        of a model that began alike differ by more.

        Raises:
            UsageError: two are not.
        """
        own = {name: _digest(one) for name, one in self._live.items() if self._places[name].has_copies}
        unlike = self._unlike(self._told({name: [int(digest)] for name, digest in own.items()}), 0.0)
        apart = unlike
        if unlike and trained:
            sizes = {name: _size(self._live[name]) for name in dict.fromkeys(n for n, _, _ in unlike) if name in own}
            apart = self._unlike(self._told(sizes), _ROUNDING)
        for name, rank, other in apart[:1]:
            raise UsageError(
                f"{name}: process {rank} has other numbers than process {other}, under one name and shape "
                f"({list(self._places[name].spec.shape)}). If these are parts of the model, give each a name of its "
                "own, or divide it by fully_shard or as a DTensor; if they are copies, make them equal and average "
                "their gradients, as DistributedDataParallel does"
            )
        for name, rank, other in () if self._told_of_drift else unlike[:1]:
            self._told_of_drift.add(name)
            _LOG.warning(
                "%s: process %d has not the bits of process %d, as rounding on unlike devices brings about; those of "
                "process %d are sent, and with each new version all have the same again", name, rank, other, other,
            )  # fmt: skip

    def _told(self, own: Mapping[str, Sequence[float]]) -> list[dict[str, list[float]]]:
        """Return what each process says of its parameters."""
        return [json.loads(text) for text in self._ranks.gather(json.dumps(own))]

    def _unlike(self, told: Sequence[Mapping[str, Sequence[float]]], part: float) -> list[tuple[str, int, int]]:
        """Return what differs by more than a part of the last figure, with the processes."""
        found = []
        for name, place in self._places.items():
            first: dict[str, int] = {}
            for rank, piece in zip(place.holders, place.pieces, strict=True):
                other = first.setdefault(piece, rank)
                one, two = told[rank].get(name, ()), told[other].get(name, ())
                if any(abs(a - b) > part * abs(two[-1]) for a, b in zip(one, two, strict=True)):
                    found.append((name, rank, other))
        return found

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
        fixed = any(one.device.type != "cpu" for one in self._live.values())
        return {name: empty_copy(place.spec, fixed=fixed) for name, place in self._places.items()}

    @torch.no_grad()
    def copy(self, into: Mapping[str, Tensor]) -> None:
        """Copy all; `into` is used by the first process only.

        Raises:
            UsageError: processes have other numbers under one name and shape.
        """
        self._check_copies(trained=True)
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
        settle(self._live.values())

    @torch.no_grad()
    def move(self, since: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Make each parameter `new` plus what it is beyond `since`; the first process tells what these are.

        Raises:
            UsageError: processes have other numbers under one name and shape: one's would become the other's.
        """
        self._check_copies(trained=True)
        for name, place in self._places.items():
            everywhere = len(place.holders) == self._ranks.size and not place.divided
            targets = place.firsts if place.divided else place.holders[:1] if everywhere else place.holders
            one = self._live.get(name)
            base, goal = (self._carried(place.spec, tensors.get(name), targets) for tensors in (since, new))
            if isinstance(one, DTensor):
                one.to_local().sub_(_part(one, base)).nan_to_num_(0.0, 0.0, 0.0).add_(_part(one, goal))
            elif one is not None:
                if base is not None and goal is not None:
                    one.sub_(base.to(one.device, non_blocking=True)).nan_to_num_(0.0, 0.0, 0.0)
                    one.add_(goal.to(one.device, non_blocking=True))
                if everywhere:
                    self._ranks.share(one)
        settle(self._live.values())

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


def spec_of(name: str, tensor: Tensor) -> ParameterSpec:
    """Describe a parameter; of one that is divided among processes, the whole.

    Raises:
        ValueError: it is empty, or of a type that cannot be averaged.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in PARAMETER_TYPES:
        raise ValueError(f"parameter {name}: dtype must be one of {', '.join(PARAMETER_TYPES)}, got {dtype}")
    return ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def empty_copy(spec: ParameterSpec, *, fixed: bool) -> Tensor:
    """Return memory for a whole parameter, on the processor; `fixed`: that does not move, for an accelerator."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=fixed)


def _piece(tensor: Tensor) -> tuple[str, bool]:
    """Return which part of a parameter this process has, empty for the whole; and whether it divides it."""
    if not isinstance(tensor, DTensor):
        return "", False
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "a process has parts of its own meshes only"
    kinds = zip(tensor.placements, at, strict=True)
    return "; ".join(f"{kind} {'' if kind.is_replicate() else index}" for kind, index in kinds), not any(at)


def _digest(tensor: Tensor) -> Tensor:
    """Return a number that depends on each bit, and on the order of blocks: a sum, in less time than a copy takes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    words = raw[: len(raw) // 8 * 8].view(torch.int64)
    blocks = words[: len(words) // _BLOCK * _BLOCK].view(-1, _BLOCK).sum(1)
    numbers = torch.cat([blocks, words[len(blocks) * _BLOCK :], raw[len(words) * 8 :].long()])
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()


def _size(tensor: Tensor) -> list[float]:
    """Return the sum and the norm."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).double()
    return [float(local.sum()), float(torch.linalg.vector_norm(local))]


def _part(like: DTensor, whole: Tensor | None) -> Tensor:
    """Return this process's part of what the first process of a mesh has."""
    if whole is None:
        whole = torch.empty(like.shape, dtype=like.dtype)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()


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
