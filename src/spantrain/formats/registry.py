"""The wire formats by name: what floating-point tensors may be sent as, the most exact first."""

from enum import StrEnum
from typing import TYPE_CHECKING, Self

from spantrain.formats.codec import BlockCodec, CastCodec, WireCodec, own_bytes

if TYPE_CHECKING:
    from torch import Tensor

_ROOM = 2.0**14
"""What the largest float16 of a sample is near: far from overflow, and 2^28 times the least normal number."""
_EXPONENT = 0x7F80
"""The bits of a bfloat16 that say its power of two."""
_ZERO = 8
"""What is added to codes of four bits as they are sent."""


class _Float16(BlockCodec):
    """Half the bytes of float32, 11 bits of mantissa: float16, with a scale for each sample, so that nothing overflows.

    The scale is a power of two near the sample's largest magnitude over 2^14; off by at most 2^-11 of the number.
    """

    def code_bytes(self, numbers: int) -> int:
        return 2 * numbers

    def scales(self, largest: "Tensor") -> "Tensor":
        import torch

        power = (largest.to(torch.bfloat16).view(torch.int16) & _EXPONENT).view(torch.bfloat16)
        return power.float() / _ROOM

    def codes(self, scaled: "Tensor") -> "Tensor":
        import torch

        return scaled.to(torch.float16).view(torch.uint8)

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        import torch

        torch.mul(own_bytes(codes).view(torch.float16), scale, out=into)


class _Int8(BlockCodec):
    """A quarter of the bytes of float32: 255 even steps, codes of -127 to 127, over each block of 128 numbers.

    The scale is the block's largest magnitude over 127; off by at most 1/253 of that magnitude.
    """

    block_numbers = 128

    def code_bytes(self, numbers: int) -> int:
        return numbers

    def scales(self, largest: "Tensor") -> "Tensor":
        return largest / 127.0

    def codes(self, scaled: "Tensor") -> "Tensor":
        import torch

        return scaled.round_().to(torch.int8).view(torch.uint8)

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        import torch

        torch.mul(codes.view(torch.int8), scale, out=into)


class _Int4(BlockCodec):
    """An eighth of the bytes of float32: 15 even steps, codes of -7 to 7, over each block of 64 numbers.

    A byte has a number of the block's first half and one of its second half. The scale is the block's largest magnitude
    over 7; off by at most 1/13.9 of that magnitude.
    """

    block_numbers = 64

    def code_bytes(self, numbers: int) -> int:
        return -(-numbers // 2)

    def scales(self, largest: "Tensor") -> "Tensor":
        return largest / 7.0

    def codes(self, scaled: "Tensor") -> "Tensor":
        import torch

        shifted = scaled.round_().add_(_ZERO).to(torch.int8).view(torch.uint8)
        half = -(-scaled.shape[2] // 2)
        packed = shifted[:, :, :half].clone()
        packed[:, :, : scaled.shape[2] - half] |= shifted[:, :, half:] << 4
        return packed

    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        import torch

        half, rest = codes.shape[2], into.shape[2] - codes.shape[2]
        torch.mul((codes & 15).view(torch.int8) - _ZERO, scale, out=into[:, :, :half])
        torch.mul((codes[:, :, :rest] >> 4).view(torch.int8) - _ZERO, scale, out=into[:, :, half:])


class WireFormat(StrEnum):
    """What floating-point tensors are sent as; all others are sent as they are (`docs/wire-formats.md`).

    >>> [(one.value, one.codec.entries(256)) for one in WireFormat]
    [('native', 256), ('float16', 514), ('bfloat16', 256), ('int8', 260), ('int4', 136)]
    """

    codec: WireCodec

    def __new__(cls, codec: WireCodec | str) -> Self:
        """Make the member of a codec, under the codec's name; afterwards, `WireFormat("int8")` finds it by that."""
        assert isinstance(codec, WireCodec)
        member = str.__new__(cls, codec.name)
        member._value_, member.codec = codec.name, codec
        return member

    NATIVE = WireCodec("native")
    """As they were computed: exact."""
    FLOAT16 = _Float16("float16")
    BFLOAT16 = CastCodec("bfloat16")
    """Half the bytes of float32, 8 bits of mantissa."""
    INT8 = _Int8("int8")
    INT4 = _Int4("int4")
