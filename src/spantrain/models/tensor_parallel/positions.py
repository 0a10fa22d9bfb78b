"""Attention with learned relative positions (T5), whose bias of all heads goes from layer to layer.

The bias stays whole between layers, so that it may cross a cut to a stage that is divided in another way. Each layer
takes its own heads of it; the gradients are summed over the group where it does. A stage that makes the bias itself,
of a parameter and of no input, sums in W therefore, in the order of its layers.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.functions import InputCopy

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
