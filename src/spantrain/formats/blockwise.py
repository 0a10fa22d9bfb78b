"""Numbers as small codes and a scale for each block of them: what `float16`, `int8` and `int4` send.

A block is divided by its scale and rounded to the nearest code; a code times the scale is what arrives:

| format  | scale of a block                              | codes                    | off by at most              |
|---------|-----------------------------------------------|--------------------------|-----------------------------|
| float16 | a power of two near its largest over 2^14     | float16                  | 2^-11 of the number itself  |
| int8    | its largest magnitude over 127                | -127 to 127              | 1/253 of the largest        |
| int4    | its largest magnitude over 7                  | -7 to 7, two in a byte   | 1/13.9 of the largest       |

Scales are bfloat16: two bytes, with the range of float32, so that gradients of any size keep theirs. A block with a
number that is not finite has a scale that is not, and no number of it arrives finite: divergence is still seen.
"""

import torch
from torch import Tensor

from spantrain.core.plan import SCALE_BYTES, WireFormat

_LEAST_SCALE = 2.0**-110
"""Its inverse times any number is finite in float32; blocks this small are all but zero."""
_FLOAT16_ROOM = 2.0**14
"""What the largest number of a sample is near in float16: far from overflow, and 2^28 times its least normal number."""
_EXPONENT = 0x7F80
"""The bits of a bfloat16 that say its power of two."""
_LARGEST_CODE = {WireFormat.INT8: 127.0, WireFormat.INT4: 7.0}
_INT4_ZERO = 8
"""Four-bit codes are sent with this added."""


def encode(numbers: Tensor, wire_format: WireFormat, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of numbers.

    Args:
        numbers: float32, [samples, numbers of a sample].
        wire_format: one that is sent in rows.
        codes: uint8, [samples, `WireFormat.code_bytes` of a sample], to be written.
        scales: uint8, [samples, 2 x blocks], to be written.
    """
    code_at = scale_at = 0
    for begin, count, blocks in _parts(numbers.shape[1], wire_format):
        part = _blocks(numbers[:, begin : begin + count], blocks)
        scale = _scales(part, wire_format)
        scale_end, code_end = scale_at + SCALE_BYTES * blocks, code_at + wire_format.code_bytes(count)
        scales[:, scale_at:scale_end] = scale.view(torch.uint8)
        scaled = part * scale.float().reciprocal_().unsqueeze(2)
        codes[:, code_at:code_end] = _codes(scaled, wire_format).flatten(1)
        code_at, scale_at = code_end, scale_end


def decode(codes: Tensor, scales: Tensor, wire_format: WireFormat, numbers: int) -> Tensor:
    """Return the numbers of codes and scales, float32, [samples, numbers]; the inverse of `encode` but for rounding."""
    found = torch.empty(codes.shape[0], numbers, dtype=torch.float32, device=codes.device)
    code_at = scale_at = 0
    for begin, count, blocks in _parts(numbers, wire_format):
        scale_end, code_end = scale_at + SCALE_BYTES * blocks, code_at + wire_format.code_bytes(count)
        scale = _own(scales[:, scale_at:scale_end]).view(torch.bfloat16).float().unsqueeze(2)
        part = _blocks(codes[:, code_at:code_end], blocks)
        into = _blocks(found[:, begin : begin + count], blocks)
        _multiply(part, scale, wire_format, into)
        code_at, scale_at = code_end, scale_end
    return found


def _parts(numbers: int, wire_format: WireFormat) -> list[tuple[int, int, int]]:
    """Return runs of equal blocks: where each begins, its numbers, its blocks; the last block may be a shorter one."""
    size = wire_format.block_numbers or numbers
    whole = numbers // size
    runs = [(0, whole * size, whole), (whole * size, numbers - whole * size, 1)]
    return [run for run in runs if run[1]]


def _scales(part: Tensor, wire_format: WireFormat) -> Tensor:
    """Return the scale of each block, bfloat16, [samples, blocks]."""
    # Faster than the largest of magnitudes, which would first be written; neither forgets a number that is none.
    largest = torch.maximum(part.amax(2), -part.amin(2))
    if wire_format is WireFormat.FLOAT16:
        power = (largest.to(torch.bfloat16).view(torch.int16) & _EXPONENT).view(torch.bfloat16)
        return (power.float() / _FLOAT16_ROOM).clamp_min_(_LEAST_SCALE).to(torch.bfloat16)
    return (largest / _LARGEST_CODE[wire_format]).clamp_min_(_LEAST_SCALE).to(torch.bfloat16)


def _codes(scaled: Tensor, wire_format: WireFormat) -> Tensor:
    """Return the codes of numbers in units of their scale, uint8, [samples, blocks, bytes]; `scaled` is used up."""
    if wire_format is WireFormat.FLOAT16:
        return scaled.to(torch.float16).view(torch.uint8)
    if wire_format is WireFormat.INT8:
        return scaled.round_().to(torch.int8).view(torch.uint8)
    # A byte has a number of the block's first half and one of its second half.
    shifted = scaled.round_().add_(_INT4_ZERO).to(torch.int8).view(torch.uint8)
    half = -(-scaled.shape[2] // 2)
    packed = shifted[:, :, :half].clone()
    packed[:, :, : scaled.shape[2] - half] |= shifted[:, :, half:] << 4
    return packed


def _multiply(part: Tensor, scale: Tensor, wire_format: WireFormat, into: Tensor) -> None:
    """Write codes, uint8, [samples, blocks, bytes], times their scales."""
    if wire_format is WireFormat.FLOAT16:
        torch.mul(_own(part).view(torch.float16), scale, out=into)
    elif wire_format is WireFormat.INT8:
        torch.mul(part.view(torch.int8), scale, out=into)
    else:
        half, rest = part.shape[2], into.shape[2] - part.shape[2]
        torch.mul((part & 15).view(torch.int8) - _INT4_ZERO, scale, out=into[:, :, :half])
        torch.mul((part[:, :, :rest] >> 4).view(torch.int8) - _INT4_ZERO, scale, out=into[:, :, half:])


def _blocks(columns: Tensor, blocks: int) -> Tensor:
    """Return columns as [samples, blocks, columns of a block], in the same storage."""
    return columns.view(columns.shape[0], blocks, columns.shape[1] // blocks)


def _own(part: Tensor) -> Tensor:
    """Return bytes in storage of their own: where they lie in a row, they could not be read as wider numbers."""
    return part.clone(memory_format=torch.contiguous_format)
