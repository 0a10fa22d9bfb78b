"""Gradients of weights that are computed later: what splits a backward pass into I and W.

A linear layer or convolution has two products to compute when it goes back: the gradient of what came in, which others
wait for, and that of its weights, which nobody waits for before the step ends. Where a stage does the halves by
themselves, such layers compute the first in I and leave the second, with the two tensors that it needs, to W; all else
that a layer has to do is small, and done in I (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 3).

Not here: when each half is done (`models.execution`).
To add a layer: a `Product`, and its line in `_deferring_class`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from spantrain.models.low_weights import add_gradient

Final = Callable[[Iterable[nn.Parameter]], None]
"""Is told parameters to whose gradients a pass adds nothing more, while it runs; of the last pass they are final."""


class Product(ABC):
    """What a layer makes of its input and its weights, linear in both."""

    needs_input = True
    """Whether the gradient of the input is made of the input, too: of its shape."""

    def suits(self, tensor: Tensor, weight: Tensor) -> bool:  # noqa: ARG002
        """Whether it knows such an input."""
        return True

    @abstractmethod
    def forward(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output."""

    @abstractmethod
    def input_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input, of that of the output."""

    @abstractmethod
    def weight_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight, of that of the output."""

    @abstractmethod
    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias, of that of the output."""


@dataclass(frozen=True)
class Linear(Product):
    """A linear layer; its weight is `(outputs, inputs)`, or transposed, as that of transformers' `Conv1D`."""

    transposed: bool = False
    needs_input = False

    def forward(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `(..., outputs)`; no view, so that what follows may write into it."""
        made = functional.linear(_rows(tensor), self._turned(weight), bias)
        return made if tensor.dim() == 2 else torch.ops.aten._unsafe_view(made, [*tensor.shape[:-1], made.shape[-1]])

    def input_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        """Return `(..., inputs)`."""
        return gradient @ self._turned(weight)

    def weight_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        """Return it as the weight is."""
        left, right = (tensor, gradient) if self.transposed else (gradient, tensor)
        return _rows(left).t() @ _rows(right)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return `(outputs,)`."""
        return _rows(gradient).sum(0)

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.t() if self.transposed else weight


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Convolution(Product):
    """A convolution over one dimension or several."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    is_plain: bool = True
    """Whether zeros are around what comes in."""

    @classmethod
    def of(cls, layer: Any, groups: int | None = None) -> "Convolution":
        """Return what a layer does, or one of a part of its groups."""
        lengths = zip(layer.dilation, layer.kernel_size, strict=True)
        around = tuple(each * (size - 1) if layer.padding == "same" else 0 for each, size in lengths)
        named = isinstance(layer.padding, str) and not any(both % 2 for both in around)
        return cls(
            stride=layer.stride,
            padding=tuple(both // 2 for both in around) if named else layer.padding,
            dilation=layer.dilation,
            groups=groups or layer.groups,
            is_plain=layer.padding_mode == "zeros",
        )

    def suits(self, tensor: Tensor, weight: Tensor) -> bool:
        """Whether the input is of several samples, and its edges are of so many zeros."""
        return self.is_plain and not isinstance(self.padding, str) and tensor.dim() == weight.dim()

    def forward(self, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `(samples, outputs, ...)`."""
        convolve: Callable[..., Tensor] = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
        return convolve(tensor, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return `(samples, inputs, ...)`."""
        return self._back(gradient, tensor, weight, 0)

    def weight_gradient(self, gradient: Tensor, tensor: Tensor, weight: Tensor) -> Tensor:
        """Return `(outputs, inputs / groups, ...)`."""
        return self._back(gradient, tensor, weight, 1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return `(outputs,)`."""
        return gradient.sum([0, *range(2, gradient.dim())])

    def _back(self, gradient: Tensor, tensor: Tensor, weight: Tensor, wanted: int) -> Tensor:
        zeros, mask = (0,) * len(self.stride), [number == wanted for number in range(3)]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, tensor, weight, None, self.stride, self.padding, self.dilation, False, zeros, self.groups, mask
        )
        return found[wanted]


LINEAR, TRANSPOSED_LINEAR = Linear(), Linear(transposed=True)


@dataclass(frozen=True, slots=True)
class _LayerWork:
    """What one layer has left to do."""

    product: Product
    weight: nn.Parameter
    bias: nn.Parameter | None
    """None also if it is not trained."""
    tensor: Tensor
    gradient: Tensor

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def compute(self) -> None:
        weight = self.weight.detach().to(self.tensor.dtype)
        add_gradient(self.weight, self.product.weight_gradient(self.gradient, self.tensor, weight))
        if self.bias is not None:
            add_gradient(self.bias, self.product.bias_gradient(self.gradient))


@dataclass(kw_only=True)
class DeferredGradients:
    """What the layers that one span has passed leave to W, the last layers first."""

    later: bool = False
    """Whether layers that go back leave anything; else they do all of it at once."""
    left: list[_LayerWork] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept for it."""
        return tuple(tensor for one in self.left for tensor in (one.tensor, one.gradient))

    def compute(self, parameters: Iterable[nn.Parameter], final: Final | None = None) -> None:
        """Add all of it to `.grad`; `final` is told, as it goes, which of the parameters get nothing more."""
        left, self.left = self.left, []
        last_use = {id(parameter): number for number, one in enumerate(left) for parameter in one.parameters}
        if final is not None:
            final(parameter for parameter in parameters if id(parameter) not in last_use)
        left.reverse()
        for number in range(len(left)):
            one = left.pop()
            one.compute()
            if final is not None:
                final([parameter for parameter in one.parameters if last_use[id(parameter)] == number])


@dataclass(kw_only=True)
class Deferral:
    """What the layers of a stage ask when they run: where to leave what they do later."""

    to: DeferredGradients | None = None
    """None: nowhere; they go back as torch has them."""

    @contextmanager
    def into(self, deferred: DeferredGradients | None) -> Iterator[None]:
        """Have layers that run inside leave it there."""
        self.to = deferred
        try:
            yield
        finally:
            self.to = None


class _Halved(torch.autograd.Function):
    """A product that goes back by halves where it is told so; what autocast would cast is cast here."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, product: Product, to: Any) -> Tensor:
        """Return the layer's output."""
        kind, ctx.dtype = tensor.device.type, tensor.dtype
        ctx.product, ctx.to, ctx.weight, ctx.bias = product, to, weight, bias
        if torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            tensor, weight, bias = tensor.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        # Not the weight that was cast: each span in flight would hold a copy of its own of one that is frozen.
        ctx.save_for_backward(*[tensor] * (ctx.weight.requires_grad or product.needs_input))
        return product.forward(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the input, and those of weight and bias unless they are left."""
        (tensor,) = ctx.saved_tensors or (gradient,)
        product, weight = ctx.product, ctx.weight
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        bias = ctx.bias if wants_bias else None
        cast = weight.detach().to(tensor.dtype)
        of_input = product.input_gradient(gradient, tensor, cast).to(ctx.dtype) if wants_input else None
        if not wants_weight:
            return of_input, None, None if bias is None else product.bias_gradient(gradient).to(bias.dtype), None, None
        if ctx.to.later:
            # Without the graph that made it, which would stay with it.
            ctx.to.left.append(_LayerWork(product, weight, bias, tensor.detach(), gradient))
            return of_input, None, None, None, None
        of_weight = product.weight_gradient(gradient, tensor, cast).to(weight.dtype)
        return of_input, of_weight, None if bias is None else product.bias_gradient(gradient).to(bias.dtype), None, None


class DeferringLayer:
    """What a layer that may leave something has besides."""

    deferral: Deferral | None = None

    def defers(self, product: Product, tensor: Tensor, weight: Tensor) -> bool:
        """Whether it goes back as it does here, all of its input being here.

        With a weight that is trained it does where there is something to leave things in; with a frozen one, where
        that is cast.
        """
        is_plain = type(tensor) in (Tensor, FakeTensor) and isinstance(weight, nn.Parameter)
        if self.deferral is None or not (is_plain and torch.is_grad_enabled() and product.suits(tensor, weight)):
            return False
        if weight.requires_grad:
            return self.deferral.to is not None
        kind = tensor.device.type
        cast = torch.is_autocast_enabled(kind) and weight.dtype is not torch.get_autocast_dtype(kind)
        return cast and tensor.requires_grad and tensor.dtype is not torch.float64

    def multiplied(self, product: Product, tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output."""
        if not self.defers(product, tensor, weight):
            return product.forward(tensor, weight, bias)
        assert self.deferral is not None
        made: Tensor = _Halved.apply(tensor, weight, bias, product, self.deferral.to)  # type: ignore[no-untyped-call]
        return made


def defer_in(modules: Iterable[nn.Module], but: Callable[[nn.Module], bool] = lambda _: False) -> Deferral:
    """Have the layers inside of modules leave what they can where the result says, in place of another one.

    Those inside of modules of which `but` is true stay as they are.
    """
    deferral = Deferral()
    for module in modules:
        for layer in _inside(module, but):
            own: Any = type(layer)
            layer.__class__ = _deferring_class(own) or own
            if isinstance(layer, DeferringLayer):
                layer.deferral = deferral
    return deferral


def _inside(module: nn.Module, but: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    if not but(module):
        yield module
        for child in module.children():
            yield from _inside(child, but)


@cache
def _deferring_class(kind: Any) -> type[nn.Module] | None:
    """Return what layers of a class become; None: what they are. A subclass may be called otherwise."""
    if kind is nn.Linear:
        return _deferring(kind, lambda _: LINEAR)
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _deferring(kind, Convolution.of)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _deferring(kind, lambda _: TRANSPOSED_LINEAR)
    return None


def _deferring(kind: type[nn.Module], product_of: Callable[[Any], Product]) -> type[nn.Module]:
    def forward(self: Any, tensor: Tensor) -> Tensor:
        product = product_of(self)
        if not self.defers(product, tensor, self.weight):
            return kind.forward(self, tensor)  # type: ignore[no-any-return]
        return self.multiplied(product, tensor, self.weight, self.bias)  # type: ignore[no-any-return]

    return type(kind.__name__, (DeferringLayer, kind), {"forward": forward, "__doc__": kind.__doc__})
