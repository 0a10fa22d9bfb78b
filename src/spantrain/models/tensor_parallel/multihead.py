"""torch's own attention module and transformer layers: whole heads, and the network behind.

`torch.nn.MultiheadAttention` hands all of its weights to one function that knows the number of heads of the model, so
another module takes its place, which does the same with own heads.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.division import Change, Divider, ModuleRule, part_of
from spantrain.models.tensor_parallel.group import InputCopy, TensorGroup, gather_same, sum_parts
from spantrain.models.tensor_parallel.rules import Column, Region, below, plain_region

Heard = tuple[Tensor, Tensor | None]

_ELEMENTWISE = (functional.relu, functional.gelu, torch.relu, functional.silu)


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
