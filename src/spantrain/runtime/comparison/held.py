"""Bytes that samples in flight hold, found by watching one forward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spantrain.models.execution.held import StorageLog, storage_bytes


def forward_bytes(module: nn.Module, forward: Callable[[], tuple[Tensor, ...]]) -> int:
    """Run a forward pass and return what it leaves for the backward pass, outputs included; it is thrown away."""
    log = StorageLog([*module.parameters(), *module.buffers()])
    with torch.enable_grad(), log.watching():
        outputs = forward()
    log.add(*outputs)
    return log.look()


def state_bytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Return the bytes of tensors that stay: parameters, a gradient for each, the optimizer's state."""
    own = list(parameters)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    return storage_bytes([*own, *state]) + sum(parameter.nbytes for parameter in own if parameter.requires_grad)
