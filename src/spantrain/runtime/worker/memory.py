"""The most memory that a run takes on its device: as the allocator counts it, or else of tensors really held."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from spantrain.devices.device import CudaDevice, Device
from spantrain.models.execution.held import storage_bytes
from spantrain.models.execution.stage import StageExecutor


def forget_peak(device: Device) -> None:
    """Begin to look for the peak anew."""
    if isinstance(device, CudaDevice):
        torch.cuda.reset_peak_memory_stats(device.torch_device)


def peak_bytes(
    device: Device, executor: StageExecutor, optimizer: Optimizer, *, second: StageExecutor | None = None
) -> int:
    """Return the most bytes of tensors since then.

    On CUDA all that was allocated. On the processor, which does not count: parameters and buffers, a gradient for each
    parameter, the optimizer's state, and the most that spans in flight and their messages held
    (`models.execution.held`); what an operation needs while it runs is not in it. Of two executors each counts what the
    other holds, too.
    """
    if isinstance(device, CudaDevice):
        return torch.cuda.max_memory_allocated(device.torch_device)
    executors = [executor] if second is None else [executor, second]
    parameters = [parameter for one in executors for parameter in one.named_parameters().values()]
    gradients_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    buffers = [buffer for one in executors for buffer in one.meter.buffers]
    held_bytes = max(one.meter.peak_bytes for one in executors)
    return storage_bytes([*parameters, *buffers, *state]) + gradients_bytes + held_bytes
