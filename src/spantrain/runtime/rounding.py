"""The wire format of a cut: float32 tensors rounded on their way to the neighbouring stage, where a plan asks for it.

Rounding to bfloat16 halves the bytes of activations and gradients and keeps the range of float32; 8 bits of mantissa
are left, a relative error of 2^-8 at most for each number. Sums of gradients over replicas and of shared parameters
never pass a cut's format.
"""

import torch

from spantrain.core.plan import WireFormat

__all__ = ["for_wire", "from_wire"]

Tensors = tuple[torch.Tensor, ...]


def for_wire(tensors: Tensors, wire_format: WireFormat) -> Tensors:
    """Return tensors as they are sent: under bfloat16, float32 ones rounded to it, all others as they are."""
    if wire_format is WireFormat.NATIVE:
        return tensors
    return tuple(tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor for tensor in tensors)


def from_wire(tensors: Tensors, wire_format: WireFormat) -> Tensors:
    """Return tensors as a stage works on them: under bfloat16, those that came as bfloat16 in float32 again.

    A tensor that autocast had made bfloat16 comes back in float32, with the same values.
    """
    if wire_format is WireFormat.NATIVE:
        return tensors
    return tuple(tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in tensors)
