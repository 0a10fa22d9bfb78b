"""The most memory that a run takes on its device: as the allocator counts it, or else of tensors really held."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from spantrain.models.device import CudaDevice, Device
from spantrain.models.held import storage_bytes
from spantrain.models.stage import StageExecutor

__all__ = ["forget_peak", "peak_bytes"]


def forget_peak(device: Device) -> None:
    """Begin to look for the peak anew."""
    if isinstance(device, CudaDevice):
        torch.cuda.reset_peak_memory_stats(device.torch_device)


def peak_bytes(device: Device, executor: StageExecutor, optimizer: Optimizer) -> int:
    """Return the most bytes of tensors since then.

    On CUDA all that was allocated. On the processor, which does not count: parameters and buffers, a gradient for each
    parameter, the optimizer's state, and the most that spans in flight and their messages held (`models.held`); what an
    operation needs while it runs is not in it.
    """
    if isinstance(device, CudaDevice):
        return torch.cuda.max_memory_allocated(device.torch_device)
    parameters = list(executor.named_parameters().values())
    gradients_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    held = executor.meter
    return storage_bytes([*parameters, *held.buffers, *state]) + gradients_bytes + held.peak_bytes
