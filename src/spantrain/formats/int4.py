"""An eighth of the bytes of float32: 15 even steps over each block of 64 numbers, two numbers in a byte.

The scale is the block's largest magnitude over 7; off by at most 1/13.9 of that magnitude.
"""

from typing import TYPE_CHECKING

from spantrain.formats.codec import BlockCodec

if TYPE_CHECKING:
    from torch import Tensor

_ZERO = 8
"""Codes are sent with this added."""


class Int4(BlockCodec):
    """Codes are -7 to 7; a byte has a number of the block's first half and one of its second half."""

    block_numbers = 64

    def code_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers, without scales."""
        return -(-numbers // 2)

    def scales(self, largest: "Tensor") -> "Tensor":
        """Return the size of a step of each block."""
        return largest / 7.0

    def codes(self, scaled: "Tensor") -> "Tensor":
        """Return the nearest codes, two in a byte."""
        import torch

        shifted = scaled.round_().add_(_ZERO).to(torch.int8).view(torch.uint8)
        half = -(-scaled.shape[2] // 2)
        packed = shifted[:, :, :half].clone()
        packed[:, :, : scaled.shape[2] - half] |= shifted[:, :, half:] << 4
        return packed

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        """Write codes times their scales."""
        import torch

        half, rest = codes.shape[2], into.shape[2] - codes.shape[2]
        torch.mul((codes & 15).view(torch.int8) - _ZERO, scale, out=into[:, :, :half])
        torch.mul((codes[:, :, :rest] >> 4).view(torch.int8) - _ZERO, scale, out=into[:, :, half:])
