"""A copy of tensors in host memory, taken between two steps, so that training goes on while it is written."""

from collections.abc import Mapping

import torch


class SnapshotBuffers:
    """Host memory for one snapshot, used again by the next: as much as the tensors themselves.

    Of a CUDA device the buffers are page-locked and copies are queued on its stream: what trains next waits for them
    there, the processor does not.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors; what is returned may be read after `wait`, and until the next `take`."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        return dict(self._buffers)

    def wait(self) -> None:
        """Wait until all copies are there."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        before = self._buffers.get(name)
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            return before
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
