"""Turns modules into divided ones: which parts of their parameters a member holds, and what takes their place.

Column-wise layers have their outputs divided, their input is whole; row-wise ones have their inputs divided, their
outputs are sums over the group (Shoeybi et al., Megatron-LM, 2019, section 3). Parts may be of any size.

Attention with learned relative positions (T5) has a bias of all heads, which goes from layer to layer. It stays whole
between layers, so that it may cross a cut to a stage that is divided in another way. Each layer takes its own heads of
it; the gradients are summed over the group where it does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.core.records import Record
from spantrain.core.shares import TensorPart, divide_pieces
from spantrain.core.span import Span
from spantrain.models.statistics import keep_channels
from spantrain.models.tensor_parallel.group import InputCopy, TensorGroup, gather_parts, sum_parts
from spantrain.models.tensor_parallel.rules import Column, Region, counts
from spantrain.models.tensor_parallel.sequence import SequenceSlices
from spantrain.models.units import UnitModule
from spantrain.models.weight_gradients import LINEAR, TRANSPOSED_LINEAR, Convolution, DeferringLayer, Product

Parameters = Mapping[str, nn.Parameter]


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


_BIAS = "position_bias"


class ColumnLayer(DeferringLayer, nn.Module):
    """The own outputs of a linear layer or convolution."""

    def __init__(self, parameters: Parameters, product: Product, read: Callable[[Tensor], Tensor]) -> None:
        """`read` makes what the weights are applied to of what comes in."""
        super().__init__()
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self._product = product
        self._read = read

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the own outputs."""
        return self.multiplied(self._product, self._read(tensor), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"weight {tuple(self.weight.shape)}, a part of its outputs"


class RowLayer(DeferringLayer, nn.Module):
    """A linear layer or convolution of the own inputs; its bias is added once, to the group's sum."""

    def __init__(
        self, parameters: Parameters, product: Product, add: Callable[[Tensor], Tensor], *, of_images: bool
    ) -> None:
        """`add` makes the group's sum of the member's part, or a slice of the sum."""
        super().__init__()
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self._product = product
        self._add = add
        self._bias_index = (..., None, None) if of_images else ...

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the whole output, the same on all members; or the own slice of it."""
        total = self._add(self.multiplied(self._product, tensor, self.weight, None))
        return total if self.bias is None else total + self.bias.to(total.dtype)[self._bias_index]

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"weight {tuple(self.weight.shape)}, a part of its inputs"


def _product(module: nn.Module, groups: int = 1) -> Product:
    """Return what a layer does: a convolution in so many groups, or a linear layer (transformers' Conv1D too)."""
    if isinstance(module, nn.Conv2d):
        return Convolution.of(module, groups)
    return TRANSPOSED_LINEAR if _is_transposed(module) else LINEAR


def _is_transposed(module: nn.Module) -> bool:
    """Whether a layer's weight is `(inputs, outputs)`, as of transformers' Conv1D."""
    return not isinstance(module, nn.Linear | nn.Conv2d)


@dataclass(kw_only=True)
class OwnHeadsOfBias:
    """Stands between one attention module and the layers around it."""

    own: Span
    heads: int
    """Heads of all members."""
    copy: InputCopy = field(repr=False)
    _whole: Tensor | None = field(default=None, repr=False)

    def attach(self, attention: nn.Module) -> None:
        """Watch what goes in and what comes out of a module."""
        attention.register_forward_pre_hook(self._enter, with_kwargs=True)
        attention.register_forward_hook(self._leave)

    def _enter(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the module its heads of the bias; the first layer's is made here, of all heads."""
        whole = kwargs.get(_BIAS)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if whole is None and attention.has_relative_attention_bias:
            tokens = hidden.shape[1]
            make: Any = attention.compute_bias
            whole = make(tokens, tokens, device=hidden.device)
        self._whole = whole
        if whole is None:
            return args, kwargs
        return args, {**kwargs, _BIAS: self.copy(whole).narrow(1, self.own.lo, self.own.size)}

    def _leave(self, _: nn.Module, __: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hand the whole bias on; where there is none, the module's zeros for all heads."""
        whole, self._whole = self._whole, None
        if whole is None:
            whole = result[1][:, :1].expand(-1, self.heads, -1, -1)
        return (result[0], whole, *result[2:])


class Change(Record):
    """One module that becomes a part of itself."""

    path: str
    """In its unit."""
    module: nn.Module
    parts: Mapping[str, TensorPart]
    """Parts of its own parameters, by name."""
    build: Callable[[Parameters], nn.Module]
    """Returns what takes its place, from its parameters' own parts; the module itself, if that was altered."""


class DivisionTask(Record):
    """Modules of one unit that are divided together or not at all."""

    title: str
    """For notices: the path in the unit."""
    changes: tuple[Change, ...]
    region: Region | None = None
    own: Span | None = None
    """The own pieces of the region."""


class ModuleRule(Record):
    """How one module is divided by itself: what `find` asks of each kind of structure."""

    paths: tuple[str, ...]
    """Path of the module, and of those in it that are divided with it."""
    pieces: int
    changes: Callable[["Divider", tuple[Span, ...]], tuple[Change, ...]]
    """Returns what is done, given the pieces of each member."""
    output_sums: int = 1
    """As of a `Region`; an output layer's few numbers count as one."""

    @property
    def anchor(self) -> str:
        """Path of the module."""
        return self.paths[0]


class Divider:
    """One member's way to divide the modules of one unit."""

    def __init__(self, unit: UnitModule, shares: tuple[float, ...], group: TensorGroup) -> None:
        self.unit, self.shares, self.group, self.copy = unit, shares, group, InputCopy(group)
        self.slices = SequenceSlices(group, shares, self.copy)
        self.sliced: set[Region] = set()
        """Regions between modules that hold slices of the sequence; known when modules are built."""

    def task(self, rule: Region | ModuleRule) -> DivisionTask | None:
        """Return what is to be done for a region, or for one module; None if its pieces are too few for the group."""
        if rule.pieces < self.group.size:
            return None
        spans = divide_pieces(rule.pieces, self.shares)
        if isinstance(rule, ModuleRule):
            return DivisionTask(title=rule.anchor, changes=rule.changes(self, spans))
        region, own = rule, spans[self.group.rank]
        changes = [self._column(column, region, spans) for column in region.columns]
        changes += [self.row(path, region.pieces, own, region) for path in region.rows]
        changes += [self._channels(path, region.pieces, own, sliced=False) for path in region.channels]
        changes += [self._channels(path, region.pieces, own, sliced=True) for path in region.sliced]
        return DivisionTask(title=region.anchor, changes=tuple(changes), region=region, own=own)

    def set_heads(self, task: DivisionTask) -> None:
        """Tell attention how many heads it has, and which."""
        if task.region is None or task.own is None or task.region.counts_at is None:
            return
        module = self.unit.get_submodule(task.region.counts_at)
        for name, value in counts(module, task.region.pieces, task.own.size).items():
            setattr(module, name, value)
        if task.region.heads_of_bias:
            OwnHeadsOfBias(own=task.own, heads=task.region.pieces, copy=self.copy).attach(module)

    def row(self, path: str, pieces: int, own: Span, region: Region | None = None) -> Change:
        """Return what becomes of a row-wise layer."""
        module = self.unit.get_submodule(path)
        dim = 0 if _is_transposed(module) else 1
        parts = {
            name: whole_of(tensor) if name == "bias" else part_of(tensor, dim, own, pieces)
            for name, tensor in module.named_parameters(recurse=False)
        }

        def build(parameters: Parameters) -> nn.Module:
            add: Callable[[Tensor], Tensor] = partial(sum_parts, group=self.group)
            if region in self.sliced:
                add = self.slices.own_tokens if region.counts_at is None else self.slices.own_of_heads
            return RowLayer(parameters, _product(module), add, of_images=isinstance(module, nn.Conv2d))

        return Change(path=path, module=module, parts=parts, build=build)

    def _column(self, column: Column, region: Region, spans: Sequence[Span]) -> Change:
        module, own = self.unit.get_submodule(column.path), spans[self.group.rank]
        parts = {
            name: part_of(tensor, tensor.dim() - 1 if _is_transposed(module) else 0, own, region.pieces, column.blocks)
            for name, tensor in module.named_parameters(recurse=False)
        }

        def build(parameters: Parameters) -> nn.Module:
            read: Callable[[Tensor], Tensor] = self.copy
            if region in self.sliced:
                read = self.slices.for_columns if region.counts_at is None else self.slices.for_heads
            if column.gathers:
                read = partial(gather_parts, group=self.group, sizes=[span.size for span in spans], dim=1)
            return ColumnLayer(parameters, _product(module), read)

        return Change(path=column.path, module=module, parts=parts, build=build)

    def _channels(self, path: str, pieces: int, own: Span, *, sliced: bool) -> Change:
        module = self.unit.get_submodule(path)

        def read(tensor: Tensor) -> Tensor:
            return self.copy(tensor).narrow(1, own.lo, own.size) if sliced else tensor

        def build(parameters: Parameters) -> nn.Module:
            if isinstance(module, nn.BatchNorm2d):  # which is left its own channels
                for name, parameter in parameters.items():
                    setattr(module, name, parameter)
                for name, buffer in list(module.named_buffers(recurse=False)):
                    if buffer.dim() == 1:
                        part = part_of(buffer, 0, own, pieces)
                        setattr(module, name, take(buffer, part))
                        keep_channels(module, part, own.size)
                return module
            assert isinstance(module, nn.Conv2d), path
            assert module.groups == module.in_channels == module.out_channels == pieces, f"{path} is not depthwise"
            return ColumnLayer(parameters, _product(module, groups=own.size), read)

        parts = {name: part_of(tensor, 0, own, pieces) for name, tensor in module.named_parameters(recurse=False)}
        return Change(path=path, module=module, parts=parts, build=build)
