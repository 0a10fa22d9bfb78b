"""The most memory that a run takes on its device, as the device's allocator counts it."""

import torch

from spantrain.models.device import CudaDevice, Device

__all__ = ["forget_peak", "peak_bytes"]


def forget_peak(device: Device) -> None:
    """Begin to look for the peak anew."""
    if isinstance(device, CudaDevice):
        torch.cuda.reset_peak_memory_stats(device.torch_device)


def peak_bytes(device: Device) -> int | None:
    """Return the most bytes of tensors since then; None on a device that does not count them."""
    return torch.cuda.max_memory_allocated(device.torch_device) if isinstance(device, CudaDevice) else None
