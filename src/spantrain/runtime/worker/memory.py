"""The most memory that a run takes on its device: as the allocator counts it, or else of tensors really held."""

from torch import Tensor
from torch.optim import Optimizer

from spantrain.devices.base import ComputeDevice
from spantrain.models.execution.held import storage_bytes
from spantrain.models.execution.stage import StageExecutor


def peak_bytes(
    device: ComputeDevice, executor: StageExecutor, optimizer: Optimizer, *, second: StageExecutor | None = None
) -> int:
    """Return the most bytes of tensors since then.

    Where the device counts them, all that was allocated. On the processor, which does not: parameters and buffers, a
    gradient for each parameter, the optimizer's state, and the most that spans in flight and their messages held
    (`models.execution.held`); what an operation needs while it runs is not in it. Of two executors each counts what the
    other holds, too.
    """
    counted = device.peak_bytes()
    if counted is not None:
        return counted
    executors = [executor] if second is None else [executor, second]
    parameters = [parameter for one in executors for parameter in one.named_parameters().values()]
    gradients_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    buffers = [buffer for one in executors for buffer in one.meter.buffers]
    held_bytes = max(one.meter.peak_bytes for one in executors)
    return storage_bytes([*parameters, *buffers, *state]) + gradients_bytes + held_bytes
