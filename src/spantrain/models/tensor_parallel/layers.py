"""Linear layers and convolutions of which a member of a tensor-parallel group holds a part.

Column-wise: its outputs are divided, its input is whole; row-wise: its inputs are divided, the outputs are sums over
the group (Shoeybi et al., Megatron-LM, 2019, section 3). Parts may be of any size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


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


def application(module: nn.Module, groups: int = 1) -> Apply:
    """Return how a layer is applied: a convolution in so many groups, or a linear layer (transformers' Conv1D too)."""
    if isinstance(module, nn.Conv2d):
        padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
        return Convolution(stride=tuple(module.stride), padding=padding, dilation=tuple(module.dilation), groups=groups)
    return Linear(transposed=not isinstance(module, nn.Linear))
