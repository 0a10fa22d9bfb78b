"""Modules that are divided by themselves: vocabularies, the layer before the loss, torch's attention, experts.

Embeddings are divided by rows, the layer before the loss by classes. `torch.nn.MultiheadAttention` hands all of its
weights to one function that knows the number of heads of the model, so another module takes its place, which does the
same with own heads; the network behind, of torch's transformer layers, is a region.

Of experts whose weights lie in one tensor every one's inner width is divided, routing is not: all members route alike
and run all experts on their own inner columns, as transformers' plans have it for `moe_tp_experts`. How a batch is cut
does not change what an expert does to a token, so gradients stay exact.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.divided import DividedLogits
from spantrain.models.tensor_parallel.division import Change, ColumnLayer, Divider, ModuleRule, part_of
from spantrain.models.tensor_parallel.group import InputCopy, TensorGroup, gather_same, sum_parts
from spantrain.models.tensor_parallel.rules import Column, Region, below, child, plain_region
from spantrain.models.units import UnitModule
from spantrain.models.weight_gradients import LINEAR

POSITION_BIAS = "relative_attention_bias"
"""An embedding of distances between tokens: few rows, which units share that make the same bias of them."""
_VOCABULARIES = frozenset({"embed_tokens", "shared", "tok_embeddings", "token_embedding", "word_embeddings", "wte"})
_OUTPUTS = frozenset({"classifier", "decoder", "embed_out", "head", "lm_head", "output_projection", "score"})
_FUSED, _DOWN = "gate_up_proj", "down_proj"
_LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_post_expert_norm": False}
"""How the library stores the experts that are known here."""
_ELEMENTWISE = (functional.relu, functional.gelu, torch.relu, functional.silu)

Heard = tuple[Tensor, Tensor | None]


class OutputLayer(ColumnLayer):
    """The own classes of the layer whose outputs the loss is taken of."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], read: InputCopy, all_classes: Sequence[Span], group: TensorGroup
    ) -> None:
        """`all_classes` are those of each member."""
        super().__init__(parameters, LINEAR, read)
        self._sizes = [span.size for span in all_classes]
        self._group = group

    def forward(self, tensor: Tensor) -> DividedLogits:
        """Return what behaves as all outputs would."""
        return DividedLogits(super().forward(tensor), sizes=self._sizes, dim=-1, group=self._group)


class DividedEmbedding(nn.Module):
    """The own rows of an embedding; rows of others count as zeros in the group's sum."""

    def __init__(self, weight: nn.Parameter, *, rows: Span, group: TensorGroup, padding_row: int | None) -> None:
        super().__init__()
        self.weight = weight
        self._rows = rows
        self._group = group
        own_padding = padding_row is not None and rows.lo <= padding_row < rows.hi
        self._padding = padding_row - rows.lo if padding_row is not None and own_padding else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of all tokens, the same on all members."""
        foreign = (tokens < self._rows.lo) | (tokens >= self._rows.hi)
        own = functional.embedding((tokens - self._rows.lo).masked_fill(foreign, 0), self.weight, self._padding)
        return sum_parts(own.masked_fill(foreign[..., None], 0.0), self._group)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"rows {self._rows} of the vocabulary"


def vocabulary_rule(unit: UnitModule, path: str, name: str, module: nn.Module) -> ModuleRule | None:
    """Return how an embedding of a vocabulary is divided; None of any other module."""
    if not isinstance(module, nn.Embedding) or not _is_vocabulary(unit, path, name, module):
        return None
    embedding = module

    def changes(by: Divider, rows: Sequence[Span]) -> tuple[Change, ...]:
        own = rows[by.group.rank]

        def build(new: Mapping[str, nn.Parameter]) -> nn.Module:
            return DividedEmbedding(new["weight"], rows=own, group=by.group, padding_row=embedding.padding_idx)

        parts = {"weight": part_of(embedding.weight, 0, own, embedding.num_embeddings)}
        return (Change(path=path, module=embedding, parts=parts, build=build),)

    return ModuleRule(paths=(path,), pieces=embedding.num_embeddings, changes=changes)


def output_rule(unit: UnitModule, path: str, name: str, module: nn.Module) -> ModuleRule | None:
    """Return how the layer before the loss is divided; None of any other module.

    It is told by its name in the unsplit model; `classifier.1` is one too.
    """
    words = {word for word in name.split(".")[-2:] if not word.isdecimal()}
    if type(module) is not nn.Linear or not (words & _OUTPUTS or f"{path}.weight" in unit.shared.values()):
        return None
    classes = module.out_features

    def changes(by: Divider, spans: Sequence[Span]) -> tuple[Change, ...]:
        own = spans[by.group.rank]
        parts = {name: part_of(whole, 0, own, classes) for name, whole in module.named_parameters(recurse=False)}
        return (
            Change(path=path, module=module, parts=parts, build=lambda new: OutputLayer(new, by.copy, spans, by.group)),
        )

    return ModuleRule(paths=(path,), pieces=classes, changes=changes)


def _is_vocabulary(unit: UnitModule, path: str, name: str, module: nn.Embedding) -> bool:
    if type(module) is not nn.Embedding or module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return False
    last = name.rpartition(".")[2]
    named = last in _VOCABULARIES or (f"{path}.weight" in unit.shared.values() and last != POSITION_BIAS)
    # A module around an embedding may take its weight into its own hands, as for a product with all rows.
    *parents, own = path.split(".")
    around = [child(unit, ".".join(parents[:length])) for length in range(1, len(parents) + 1)]
    return named and not any(f"{own}.weight" in _source(module) for module in around if module is not None)


def _source(module: nn.Module) -> str:
    """Return the code of a module's methods but the one that makes it; nothing if there is none to read."""
    found = []
    for name, method in vars(type(module)).items():
        if inspect.isfunction(method) and name != "__init__":
            try:
                found.append(inspect.getsource(method))
            except OSError:
                continue
    return "".join(found)


def attention_rule(unit: nn.Module, path: str, name: str, module: nn.Module) -> ModuleRule | None:  # noqa: ARG001
    """Return how torch's attention is divided; None of any other module.

    Its queries, keys and values must be of one width, without an extra key.
    """
    if type(module) is not nn.MultiheadAttention or not isinstance(module.in_proj_weight, Tensor):
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None

    def changes(by: Divider, heads: tuple[Span, ...]) -> tuple[Change, ...]:
        own = heads[by.group.rank]
        parts = {
            key: part_of(whole, 0, own, module.num_heads, 3) for key, whole in module.named_parameters(recurse=False)
        }

        def build(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
            divided = DividedHeads(module, heads, by.copy, by.group)
            divided.in_proj_weight = parameters["in_proj_weight"]
            divided.in_proj_bias = parameters.get("in_proj_bias")
            return divided

        # The layer behind comes first: the new module takes it over.
        behind = by.row(f"{path}.out_proj", module.num_heads, own)
        return behind, Change(path=path, module=module, parts=parts, build=build)

    return ModuleRule(paths=(path, f"{path}.out_proj"), pieces=module.num_heads, changes=changes)


def torch_layer_regions(unit: nn.Module) -> Iterator[Region]:
    """Yield the feed-forward networks of torch's transformer layers."""
    for anchor, module in unit.named_modules():
        if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            known = module.activation in _ELEMENTWISE or isinstance(module.activation, nn.ReLU | nn.GELU | nn.SiLU)
            columns, rows = [Column(path=below(anchor, "linear1"))], [below(anchor, "linear2")]
            region = plain_region(unit, anchor, columns, rows) if known else None
            if region is not None:
                yield region


def leave_fast_paths(unit: nn.Module) -> None:
    """Keep torch's encoder layers from their inference kernel, which takes weights past the modules."""
    for module in unit.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


class DividedHeads(nn.Module):
    """The own heads of `torch.nn.MultiheadAttention`; arguments and results are the same."""

    def __init__(
        self, whole: nn.MultiheadAttention, heads: tuple[Span, ...], copy: InputCopy, group: TensorGroup
    ) -> None:
        """Take the layers of the module it takes the place of; `heads` are those of each member."""
        super().__init__()
        self.in_proj_weight: nn.Parameter
        self.in_proj_bias: nn.Parameter | None
        self.out_proj: nn.Module = whole.out_proj
        self.embed_dim = whole.embed_dim
        self.num_heads = whole.num_heads
        self.head_dim = whole.head_dim
        self.batch_first = whole.batch_first
        self.dropout = whole.dropout
        self._qkv_same_embed_dim = False  # what torch's layers ask before they take their inference kernel
        self._heads = heads
        self._copy = copy
        self._group = group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # noqa: ARG002 - a hint beside the mask
    ) -> Heard:
        """Return the output, the same on all members, and the weights of all heads if they are wanted.

        What is given is what `torch.nn.MultiheadAttention.forward` takes, by the same places and names.
        """
        batched = query.dim() == 3
        rows = [self._rows(self._copy(tensor), batched) for tensor in (query, key, value)]
        mask = self._mask(attn_mask, key_padding_mask, rows[0])
        own_query, own_key, own_value = self._projected(rows)
        if need_weights:
            scores = own_query @ own_key.transpose(-1, -2) / math.sqrt(self.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            # Heads are drawn for beside samples, as torch does.
            weights = functional.dropout(weights.flatten(0, 1), self.dropout, self.training).view_as(weights)
            mixed = weights @ own_value
        else:
            chance = self.dropout if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(own_query, own_key, own_value, mask, chance)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if batched and not self.batch_first:
            output = output.transpose(0, 1)
        found = self._all_weights(weights, average_attn_weights) if need_weights else None
        if batched:
            return output, found
        return output[0], None if found is None else found[0]

    def _rows(self, tensor: Tensor, batched: bool) -> Tensor:
        """Bring the samples to the front."""
        if not batched:
            return tensor[None]
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _projected(self, rows: list[Tensor]) -> list[Tensor]:
        """Return queries, keys and values as `(samples, own heads, tokens, length of a head)`."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        made = [functional.linear(row, weight, bias) for row, weight, bias in zip(rows, weights, biases, strict=True)]
        return [tensor.view(*tensor.shape[:2], -1, self.head_dim).transpose(1, 2) for tensor in made]

    def _mask(self, attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Return both masks as one that is added to own scores; None if there is none."""
        total: Tensor | None = None
        if attention is not None:
            total = _added(attention, like)
            if total.dim() == 3:
                own = self._heads[self._group.rank]
                total = total.reshape(-1, self.num_heads, *total.shape[1:])[:, own.lo : own.hi]
        if padding is not None:
            hidden = _added(padding if padding.dim() == 2 else padding[None], like)[:, None, None, :]
            total = hidden if total is None else total + hidden
        return total

    def _all_weights(self, own: Tensor, averaged: bool) -> Tensor:
        if averaged:
            return sum_parts(own.sum(dim=1) / self.num_heads, self._group)
        return gather_same(own, self._group, [span.size for span in self._heads], 1)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add; of a boolean one, true is what is hidden."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -math.inf)


def expert_rule(unit: nn.Module, path: str, name: str, module: nn.Module) -> ModuleRule | None:  # noqa: ARG001
    """Return how the experts in a module are divided; None if it holds none, or holds them in another way."""
    fused, down = module._parameters.get(_FUSED), module._parameters.get(_DOWN)
    if fused is None or down is None or fused.dim() != 3 or down.dim() != 3 or len(module._parameters) != 2:
        return None
    if any(getattr(module, key, None) is not value for key, value in _LAYOUT.items()):
        return None
    width = down.shape[2]
    if fused.shape[1] != 2 * width or fused.shape[2] != down.shape[1]:
        return None

    def changes(by: Divider, columns: Sequence[Span]) -> tuple[Change, ...]:
        own = columns[by.group.rank]
        parts = {_FUSED: part_of(fused, 1, own, width, blocks=2), _DOWN: part_of(down, 2, own, width)}
        return (Change(path=path, module=module, parts=parts, build=lambda new: _divided(module, new, by)),)

    return ModuleRule(paths=(path,), pieces=width, changes=changes)


def _divided(module: nn.Module, parameters: Mapping[str, nn.Parameter], by: Divider) -> nn.Module:
    """Give the module its parts; its inputs and routing weights then are copies, its output a sum over the group."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)

    def copied(value: Any) -> Any:
        return by.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(read, with_kwargs=True)
    module.register_forward_hook(lambda _module, _inputs, output: sum_parts(output, by.group))
    return module
