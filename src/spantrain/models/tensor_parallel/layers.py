"""Modules of which a member of a tensor-parallel group holds a part: linear layers, convolutions, embeddings.

Column-wise: its outputs are divided, its input is whole; row-wise: its inputs are divided, the outputs are sums over
the group (Shoeybi et al., Megatron-LM, 2019, section 3). Parts may be of any size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.functions import InputCopy, gather_parts, sum_parts
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.tensor_parallel.logits import DividedLogits


@dataclass(frozen=True, kw_only=True)
class Linear:
    """How a linear layer is applied."""

    transposed: bool
    """Its weight is `(inputs, outputs)`, as of transformers' Conv1D."""

    def __call__(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply it."""
        return functional.linear(tensor, weight.t() if self.transposed else weight, bias)

    def add_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        """Add the bias to what was made without."""
        return output + bias.to(output.dtype)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """How a convolution over images is applied, zeros around them."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __call__(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply it."""
        return functional.conv2d(tensor, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def add_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        """Add the bias, one number for each channel."""
        return output + bias.to(output.dtype)[:, None, None]


Apply = Linear | Convolution


@dataclass(frozen=True, kw_only=True)
class InputGather:
    """An input of which each member has some channels, put together."""

    group: TensorGroup
    sizes: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return all channels."""
        return gather_parts(tensor, self.group, self.sizes, 1)


@dataclass(frozen=True, kw_only=True)
class InputSlice:
    """The own channels of an input that all members have."""

    copy: InputCopy
    channels: Span

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the own channels."""
        return self.copy(tensor).narrow(1, self.channels.lo, self.channels.size)


class ColumnLayer(nn.Module):
    """The own outputs of a linear layer or convolution."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, apply: Apply, read: Callable[[Tensor], Tensor]
    ) -> None:
        """`read` makes what the weights are applied to of what comes in."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._apply_layer = apply
        self._read = read

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the own outputs."""
        return self._apply_layer(self._read(tensor), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"weight {tuple(self.weight.shape)}, a part of its outputs"


class RowLayer(nn.Module):
    """A linear layer or convolution of the own inputs; its bias is added once, to the group's sum."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, apply: Apply, add: Callable[[Tensor], Tensor]
    ) -> None:
        """`add` makes the group's sum of the member's part, or a slice of the sum."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._apply_layer = apply
        self._add = add

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the whole output, the same on all members; or the own slice of it."""
        total = self._add(self._apply_layer(tensor, self.weight, None))
        return total if self.bias is None else self._apply_layer.add_bias(total, self.bias)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"weight {tuple(self.weight.shape)}, a part of its inputs"


class OutputLayer(nn.Module):
    """The own classes of the layer whose outputs the loss is taken of."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        read: InputCopy,
        all_classes: Sequence[Span],
        group: TensorGroup,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._read = read
        self._all_classes = tuple(all_classes)
        self._group = group

    def forward(self, tensor: Tensor) -> DividedLogits:
        """Return what behaves as all outputs would."""
        own = functional.linear(self._read(tensor), self.weight, self.bias)
        return DividedLogits.of(own, self._all_classes, self._group)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"weight {tuple(self.weight.shape)}, a part of its classes"


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
