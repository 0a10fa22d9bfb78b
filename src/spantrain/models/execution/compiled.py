"""Layers of units as `torch.compile` makes them: operations that lie between products become few kernels.

What is compiled is a layer that a unit calls as a whole, such as a transformer's block, for all layers of a kind once.
Its products are no longer ours to halve: a backward pass does all of such a layer in I and leaves nothing to W.

Not compiled: models that draw at random while they train (which samples they draw for is not the compiler's to know),
layers whose normalizations take statistics of batches, those that are divided among devices, and those that a model's
own forward calls (`models.tracing.stubs`). They run as they are written.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from spantrain.models.units import UnitModule, keeps_statistics

_LOGGER = logging.getLogger(__name__)

CODE = "inductor"
"""What makes code of a layer."""
ONLY_CUT = "aot_eager_decomp_partition"
"""What says as much of what is kept between a forward and a backward pass, and makes no code."""


def compile_layers(units: Iterable[UnitModule]) -> None:
    """Have the layers of units compiled when they are called first, where `UnitModule.compiled_by` says so."""
    refused: set[type[nn.Module]] = set()
    for unit in units:
        for layer in unit.layers if unit.compiled_by and unit.group is None else ():
            composed = next(layer.children(), None) is not None and not any(map(keeps_statistics, layer.modules()))
            if composed and layer._compiled_call_impl is None:
                layer._compiled_call_impl = _Compiled(layer, unit.compiled_by, refused)


def is_compiled(layer: nn.Module) -> bool:
    """Whether what a layer does was, or will be, compiled."""
    return isinstance(layer._compiled_call_impl, _Compiled)


class _Compiled:
    """A layer's call, compiled; as it is written from the first time on that this does not work for one of its kind."""

    def __init__(self, layer: nn.Module, by: str, refused: set[type[nn.Module]]) -> None:
        self._kind, self._refused = type(layer), refused
        self._as_written: Callable[..., Any] = layer._call_impl
        self._call: Callable[..., Any] = torch.compile(self._as_written, backend=by)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind in self._refused:
            return self._as_written(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._call(*args, **kwargs)
        except TorchDynamoException as error:
            why = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
            _LOGGER.warning("%s is not compiled, and runs as it is written: %s", self._kind.__name__, why)
            self._refused.add(self._kind)
            return self._as_written(*args, **kwargs)
