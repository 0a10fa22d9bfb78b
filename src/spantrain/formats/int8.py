"""A quarter of the bytes of float32: 255 even steps over each block of 128 numbers.

The scale is the block's largest magnitude over 127; off by at most 1/253 of that magnitude.
"""

from typing import TYPE_CHECKING

from spantrain.formats.codec import BlockCodec

if TYPE_CHECKING:
    from torch import Tensor


class Int8(BlockCodec):
    """Codes are -127 to 127."""

    block_numbers = 128

    def code_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers, without scales."""
        return numbers

    def scales(self, largest: "Tensor") -> "Tensor":
        """Return the size of a step of each block."""
        return largest / 127.0

    def codes(self, scaled: "Tensor") -> "Tensor":
        """Return the nearest codes."""
        import torch

        return scaled.round_().to(torch.int8).view(torch.uint8)

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        """Write codes times their scales."""
        import torch

        torch.mul(codes.view(torch.int8), scale, out=into)
