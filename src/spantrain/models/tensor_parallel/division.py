"""Turns modules into divided ones: which parts of their parameters a member holds, and what takes their place.

Attention with learned relative positions (T5), whose bias of all heads goes from layer to layer.

The bias stays whole between layers, so that it may cross a cut to a stage that is divided in another way. Each layer
takes its own heads of it; the gradients are summed over the group where it does. A stage that makes the bias itself,
of a parameter and of no input, sums in W therefore, in the order of its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from spantrain.core.shares import TensorPart, divide_pieces
from spantrain.core.span import Span
from spantrain.models.tensor_parallel.experts import divide_experts, expert_parts, expert_width
from spantrain.models.tensor_parallel.functions import InputCopy, sum_parts
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.tensor_parallel.layers import (
    Apply,
    ColumnLayer,
    Convolution,
    DividedEmbedding,
    InputGather,
    InputSlice,
    Linear,
    OutputLayer,
    RowLayer,
)
from spantrain.models.tensor_parallel.multihead import DividedHeads
from spantrain.models.tensor_parallel.rules import Column, Region, child
from spantrain.models.tensor_parallel.sequence import SequenceSlices
from spantrain.models.tensor_parallel.slices import part_of, take, whole_of
from spantrain.models.units import UnitModule

_BIAS = "position_bias"


@dataclass(kw_only=True)
class OwnHeadsOfBias:
    """Stands between one attention module and the layers around it."""

    own: Span
    heads: int
    """Of all members."""
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


Parameters = Mapping[str, nn.Parameter]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One module that becomes a part of itself."""

    path: str
    """In its unit."""
    module: nn.Module
    parts: Mapping[str, TensorPart]
    """Of its own parameters, by name."""
    build: Callable[[Parameters], nn.Module]
    """Returns what takes its place, from its parameters' own parts; the module itself, if that was altered."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Modules of one unit that are divided together or not at all."""

    title: str
    """For notices: the path in the unit."""
    changes: tuple[Change, ...]
    region: Region | None = None
    own: Span | None = None
    """The own pieces of the region."""
    bias: OwnHeadsOfBias | None = None
    """Of attention that takes its own heads of a bias."""


@dataclass(frozen=True, kw_only=True)
class Divider:
    """One member's way to divide the modules of one unit."""

    unit: UnitModule
    shares: tuple[float, ...]
    group: TensorGroup
    copy: InputCopy = field(repr=False)
    slices: SequenceSlices = field(repr=False)
    sliced: set[Region] = field(default_factory=set, repr=False)
    """Regions whose surroundings hold slices of the sequence; known when modules are built."""

    def spans(self, pieces: int) -> tuple[Span, ...] | None:
        """Return the pieces of each member; None if there are too few for all."""
        return divide_pieces(pieces, self.shares) if pieces >= self.group.size else None

    def region(self, region: Region) -> Task | None:
        """Return what is to be done for a region; None if its pieces are too few for the group."""
        spans = self.spans(region.pieces)
        if spans is None:
            return None
        own = spans[self.group.rank]
        changes = [self._column(column, region, spans) for column in region.columns]
        changes += [self._row(path, region.pieces, own, region) for path in region.rows]
        changes += [self._channels(path, region.pieces, own, sliced=False) for path in region.channels]
        changes += [self._channels(path, region.pieces, own, sliced=True) for path in region.sliced]
        bias = OwnHeadsOfBias(own=own, heads=region.pieces, copy=self.copy) if region.heads_of_bias else None
        return Task(title=region.anchor, changes=tuple(changes), region=region, own=own, bias=bias)

    def embedding(self, path: str) -> Task | None:
        """Return what is to be done for a vocabulary's embedding; None if it has fewer rows than members."""
        module = _typed(self._module(path), nn.Embedding)
        spans = self.spans(module.num_embeddings)
        if spans is None:
            return None
        own, padding = spans[self.group.rank], module.padding_idx

        def build(parameters: Parameters) -> nn.Module:
            return DividedEmbedding(parameters["weight"], rows=own, group=self.group, padding_row=padding)

        parts = {"weight": part_of(module.weight, 0, own, module.num_embeddings)}
        return Task(title=path, changes=(Change(path=path, module=module, parts=parts, build=build),))

    def output(self, path: str) -> Task | None:
        """Return what is to be done for the layer before the loss; None if it has fewer classes than members."""
        module = _typed(self._module(path), nn.Linear)
        spans = self.spans(module.out_features)
        if spans is None:
            return None
        own = spans[self.group.rank]

        def build(parameters: Parameters) -> nn.Module:
            weight, bias = parameters["weight"], parameters.get("bias")
            return OutputLayer(weight, bias, read=self.copy, all_classes=spans, group=self.group)

        parts = {name: part_of(own_, 0, own, module.out_features) for name, own_ in _own_parameters(module)}
        return Task(title=path, changes=(Change(path=path, module=module, parts=parts, build=build),))

    def attention(self, path: str) -> Task | None:
        """Return what is to be done for torch's attention module; None if it has fewer heads than members."""
        module = _typed(self._module(path), nn.MultiheadAttention)
        spans = self.spans(module.num_heads)
        if spans is None:
            return None
        own = spans[self.group.rank]
        parts = {name: part_of(whole, 0, own, module.num_heads, 3) for name, whole in _own_parameters(module)}

        def build(parameters: Parameters) -> nn.Module:
            heads = DividedHeads(module, spans, self.copy, self.group)
            heads.in_proj_weight = parameters["in_proj_weight"]
            heads.in_proj_bias = parameters.get("in_proj_bias")
            return heads

        # The layer behind comes first: the new module takes it over.
        behind = self._row(f"{path}.out_proj", module.num_heads, own)
        return Task(title=path, changes=(behind, Change(path=path, module=module, parts=parts, build=build)))

    def experts(self, path: str) -> Task | None:
        """Return what is to be done for a mixture's experts; None if they are narrower than the group is large."""
        module = self._module(path)
        width = expert_width(module)
        assert width is not None, path
        spans = self.spans(width)
        if spans is None:
            return None
        parts = expert_parts(module, spans[self.group.rank], width)

        def build(parameters: Parameters) -> nn.Module:
            return divide_experts(module, parameters, self.copy, self.group)

        return Task(title=path, changes=(Change(path=path, module=module, parts=parts, build=build),))

    def _column(self, column: Column, region: Region, spans: Sequence[Span]) -> Change:
        module, own = self._module(column.path), spans[self.group.rank]
        apply, parts = _apply(module), {}
        for name, tensor in _own_parameters(module):
            dim = tensor.dim() - 1 if _is_transposed(apply) else 0
            parts[name] = part_of(tensor, dim, own, region.pieces, column.blocks)

        def build(parameters: Parameters) -> nn.Module:
            read = self._reader(region)
            if column.gathers:
                read = InputGather(group=self.group, sizes=tuple(span.size for span in spans))
            return ColumnLayer(parameters["weight"], parameters.get("bias"), apply, read)

        return Change(path=column.path, module=module, parts=parts, build=build)

    def _reader(self, region: Region) -> Callable[[Tensor], Tensor]:
        """Return what makes the input of a region's column-wise layers."""
        if region not in self.sliced:
            return self.copy
        return self.slices.for_columns if region.counts_at is None else self.slices.for_heads

    def _adder(self, region: Region | None) -> Callable[[Tensor], Tensor]:
        """Return what makes the output of a region's row-wise layers."""
        if region is None or region not in self.sliced:
            return partial(sum_parts, group=self.group)
        return self.slices.own_tokens if region.counts_at is None else self.slices.own_of_heads

    def _row(self, path: str, pieces: int, own: Span, region: Region | None = None) -> Change:
        module = self._module(path)
        apply, parts = _apply(module), {}
        for name, tensor in _own_parameters(module):
            dim = 0 if _is_transposed(apply) else 1
            parts[name] = whole_of(tensor) if name == "bias" else part_of(tensor, dim, own, pieces)

        def build(parameters: Parameters) -> nn.Module:
            return RowLayer(parameters["weight"], parameters.get("bias"), apply, self._adder(region))

        return Change(path=path, module=module, parts=parts, build=build)

    def _channels(self, path: str, pieces: int, own: Span, *, sliced: bool) -> Change:
        module = self._module(path)
        parts = {name: part_of(tensor, 0, own, pieces) for name, tensor in _own_parameters(module)}
        if isinstance(module, nn.Conv2d):
            assert module.groups == module.in_channels == module.out_channels == pieces, f"{path} is not depthwise"
            length = own.size
            apply = _apply(module, groups=length)
            read = InputSlice(copy=self.copy, channels=own) if sliced else None
            return Change(path=path, module=module, parts=parts, build=lambda new: _depthwise(new, apply, read))
        norm = _typed(module, nn.BatchNorm2d)
        return Change(path=path, module=module, parts=parts, build=lambda new: _normalization(norm, new, own, pieces))

    def _module(self, path: str) -> nn.Module:
        module = child(self.unit, path)
        assert module is not None, f"no module {path}"
        return module


class _Depthwise(nn.Module):
    """The own channels of a depthwise convolution, on own channels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, apply: Apply) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._apply_layer = apply

    def forward(self, tensor: Tensor) -> Tensor:
        """Convolve each channel by itself."""
        return self._apply_layer(tensor, self.weight, self.bias)


def _depthwise(parameters: Parameters, apply: Apply, read: InputSlice | None) -> nn.Module:
    weight, bias = parameters["weight"], parameters.get("bias")
    return _Depthwise(weight, bias, apply) if read is None else ColumnLayer(weight, bias, apply, read)


def _normalization(module: nn.BatchNorm2d, parameters: Parameters, own: Span, pieces: int) -> nn.Module:
    """Leave a batch normalization its own channels; its statistics are frozen."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim() == 1:
            setattr(module, name, take(buffer, part_of(buffer, 0, own, pieces)))
    module.num_features = own.size
    return module


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _apply(module: nn.Module, groups: int = 1) -> Apply:
    if isinstance(module, nn.Conv2d):
        padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
        return Convolution(stride=tuple(module.stride), padding=padding, dilation=tuple(module.dilation), groups=groups)
    return Linear(transposed=not isinstance(module, nn.Linear))


def _is_transposed(apply: Apply) -> bool:
    return isinstance(apply, Linear) and apply.transposed


def _typed(module: nn.Module, kind: type[M]) -> M:
    assert isinstance(module, kind), f"{type(module).__name__} is no {kind.__name__}"
    return module
