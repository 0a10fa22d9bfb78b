"""Weights of 16 bits that are computed with, beside the float32 ones that are updated, saved and sent.

A parameter that is trained stands in its module as a copy in bfloat16, made anew before each step; what a backward pass
gives it is added to the gradient of the float32 one at once, in float32. One that is frozen is bfloat16 alone, for
good. Autocast still chooses the type of each operation: normalizations and losses are float32. What goes from layer to
layer, and so crosses cuts, is bfloat16.

Torch's normalizations keep their few weights in float32: what they work on may be of either type.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from spantrain.formats.precision import LOW_WEIGHTS
from spantrain.models.units import Module

_OF_FLOAT32 = "of_float32"
_NORMALIZATIONS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def full_weight(parameter: nn.Parameter) -> nn.Parameter:
    """Return the float32 parameter that one in a module stands for, or the parameter itself."""
    found: nn.Parameter = getattr(parameter, _OF_FLOAT32, parameter)
    return found


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to the gradient of what a parameter stands for."""
    full = full_weight(parameter)
    gradient = gradient.to(full.dtype)
    if full.grad is None:
        full.grad = gradient
    else:
        full.grad += gradient


def with_low_weights(module: Module, dtype: str, device: torch.device | None = None) -> Module:
    """Return a module on a device, with copies in the place of all float32 parameters that are trained.

    That if the dtype says so. Shared ones stay shared; where there are copies already, they stay.
    """
    made: dict[int, nn.Parameter] = {}
    frozen_rounded(module, dtype)
    if device is not None:
        module.to(device)  # what is frozen takes no more room there
    for layer, name, own in _rounded(module, dtype):
        if own.requires_grad:
            if id(own) not in made:
                made[id(own)] = _copy_of(own)
            setattr(layer, name, made[id(own)])  # recurrent layers have lists of theirs besides
    return module


def frozen_rounded(module: Module, dtype: str) -> Module:
    """Return a module of which parameters that are not trained are rounded for good, if the dtype says so."""
    for _, _, own in _rounded(module, dtype):
        if not own.requires_grad:
            own.data = own.data.to(torch.bfloat16)
    return module


def _rounded(module: Module, dtype: str) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the float32 parameters that a dtype has rounded, with their layers and names there."""
    for layer in module.modules() if dtype == LOW_WEIGHTS else ():
        for name, own in () if isinstance(layer, _NORMALIZATIONS) else list(layer._parameters.items()):
            if own is not None and own.dtype is torch.float32:
                yield layer, name, own


class LowWeights:
    """The copies of some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Of those that stand for others."""
        self.copies = tuple({id(own): own for own in parameters if full_weight(own) is not own}.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the float32 weights anew."""
        if self.copies:
            torch._foreach_copy_([own.detach() for own in self.copies], [full_weight(own) for own in self.copies])


def _copy_of(full: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(full.detach().to(torch.bfloat16))
    setattr(copy, _OF_FLOAT32, full)
    copy.register_post_accumulate_grad_hook(_hand_over)  # type: ignore[no-untyped-call]
    return copy


def _hand_over(copy: nn.Parameter) -> None:
    gradient, copy.grad = copy.grad, None
    if gradient is not None:  # what a layer leaves to W comes later, and by itself
        add_gradient(copy, gradient)
