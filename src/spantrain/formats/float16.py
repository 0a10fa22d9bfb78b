"""Half the bytes of float32, 11 bits of mantissa: float16, with a scale for each sample, so that nothing overflows.

The scale is a power of two near the sample's largest magnitude over 2^14; off by at most 2^-11 of the number itself.
"""

from typing import TYPE_CHECKING

from spantrain.formats.codec import BlockCodec, own_bytes

if TYPE_CHECKING:
    from torch import Tensor

_ROOM = 2.0**14
"""What the largest number of a sample is near: far from overflow, and 2^28 times the least normal number."""
_EXPONENT = 0x7F80
"""The bits of a bfloat16 that say its power of two."""


class Float16(BlockCodec):
    """Codes are float16."""

    def code_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers, without scales."""
        return 2 * numbers

    def scales(self, largest: "Tensor") -> "Tensor":
        """Return the power of two of each block."""
        import torch

        power = (largest.to(torch.bfloat16).view(torch.int16) & _EXPONENT).view(torch.bfloat16)
        return power.float() / _ROOM

    def codes(self, scaled: "Tensor") -> "Tensor":
        """Return the numbers as float16."""
        import torch

        return scaled.to(torch.float16).view(torch.uint8)

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        """Write float16 times their scales."""
        import torch

        torch.mul(own_bytes(codes).view(torch.float16), scale, out=into)
