"""Wire formats: sizes in bytes, and numbers to what is sent and back; torch is imported only where tensors are at hand.

Most formats send small codes and a scale for each block of numbers. A block is divided by its scale and rounded to the
nearest code; a code times the scale is what arrives. Scales are bfloat16: two bytes, with the range of float32, so that
gradients of any size keep theirs. A block with a number that is not finite has a scale that is not, and no number of it
arrives finite: divergence is still seen.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Tensors = tuple[Tensor, ...]

_DTYPES = (
    ("float32", 4, "F32"),
    ("bfloat16", 2, "BF16"),
    ("float16", 2, "F16"),
    ("float64", 8, "F64"),
    ("int64", 8, "I64"),
    ("int32", 4, "I32"),
    ("int16", 2, "I16"),
    ("int8", 1, "I8"),
    ("uint8", 1, "U8"),
    ("bool", 1, "BOOL"),
    ("complex64", 8, "C64"),
)
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({name: size for name, size, _ in _DTYPES})
"""Types of tensors that can be sent, by torch's names, with a number's bytes; messages count them in this order."""
DTYPE_CODES: Mapping[str, str] = MappingProxyType({name: code for name, _, code in _DTYPES})
"""What the safetensors format calls them."""
ROUNDED_DTYPES: Mapping[str, int] = MappingProxyType(
    {name: DTYPE_BYTES[name] for name in ("float32", "bfloat16", "float16")}
)
"""Types of tensors that may be sent in rows, with the bytes of a number."""
_SCALE_BYTES = 2
_MIN_SCALE = 2.0**-110
"""Its inverse times any number is finite in float32; blocks this small are all but zero."""


def frame_bytes(dimensions: int) -> int:
    """Return the bytes behind the numbers of a row: the sizes of a sample's dimensions, their count, the type."""
    return 4 * dimensions + 2


class WireCodec:
    """A wire format; this one sends numbers as they are, and others say in what they differ."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sent_type(self, dtype: str) -> str:
        """Return the type that a tensor of a type is sent as."""
        return dtype

    def entries(self, numbers: int) -> int:
        """Return how many entries of that type so many numbers take."""
        return numbers

    def sample_bytes(self, dtype: str, native_bytes: int, dimensions: int) -> int:  # noqa: ARG002 - others ask for all
        """Return what one sample of a tensor takes on the wire that has so many bytes and dimensions."""
        return native_bytes

    def send(self, tensors: "Tensors") -> "Tensors":
        """Return tensors as they are sent, where that is not in rows."""
        return tensors

    def receive(self, tensors: "Tensors") -> "Tensors":
        """Return tensors as a stage works on them, where they were not sent in rows."""
        return tensors

    def write(self, numbers: "Tensor", sent: "Tensor") -> None:
        """Write numbers, float32, as they are sent, to that many `entries`."""
        sent.copy_(numbers)

    def read(self, sent: "Tensor", numbers: int) -> "Tensor":  # noqa: ARG002
        """Return so many numbers of what `write` wrote, in float32."""
        return sent.float()


class CastCodec(WireCodec):
    """Numbers of float32 as a smaller type of torch, which gives the format its name."""

    def sent_type(self, dtype: str) -> str:
        """Return the type that a tensor of a type is sent as."""
        return self.name if dtype == "float32" else dtype

    def sample_bytes(self, dtype: str, native_bytes: int, dimensions: int) -> int:  # noqa: ARG002
        """Return what one sample of a tensor takes on the wire."""
        return native_bytes * DTYPE_BYTES[self.name] // 4 if dtype == "float32" else native_bytes

    def send(self, tensors: "Tensors") -> "Tensors":
        """Return tensors as they are sent."""
        import torch

        return tuple(one.to(self._type()) if one.dtype is torch.float32 else one for one in tensors)

    def receive(self, tensors: "Tensors") -> "Tensors":
        """Return tensors as a stage works on them."""
        return tuple(one.float() if one.dtype is self._type() else one for one in tensors)

    def _type(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found


class BlockCodec(WireCodec, ABC):
    """Each sample of a tensor as a row of bytes: codes, a scale for each block, and what the tensor was.

    A subclass says what codes and scales are.
    """

    block_numbers: int | None = None
    """Numbers that share a scale; None: those of a sample."""

    def sent_type(self, dtype: str) -> str:
        """Return the type that a tensor of a type is sent as, if that takes fewer bytes."""
        return "uint8" if dtype in ROUNDED_DTYPES else dtype

    @abstractmethod
    def code_bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers in a row, without scales; they begin a block."""

    def row_bytes(self, numbers: int, dimensions: int) -> int:
        """Return the bytes of the row that one sample of a floating-point tensor would be sent as."""
        return self.entries(numbers) + frame_bytes(dimensions)

    def entries(self, numbers: int) -> int:
        """Return the bytes of so many numbers in a row, with their scales."""
        blocks = -(-numbers // (self.block_numbers or max(1, numbers)))
        return self.code_bytes(numbers) + _SCALE_BYTES * blocks

    def sample_bytes(self, dtype: str, native_bytes: int, dimensions: int) -> int:
        """Return what one sample of a tensor takes on the wire."""
        if dtype == "uint8":
            return native_bytes + frame_bytes(dimensions)
        width = ROUNDED_DTYPES.get(dtype)
        return native_bytes if width is None else min(native_bytes, self.row_bytes(native_bytes // width, dimensions))

    def write(self, numbers: "Tensor", sent: "Tensor") -> None:
        """Write numbers as they are sent."""
        end = self.code_bytes(numbers.numel())
        self.encode(numbers.unsqueeze(0), sent[:end].unsqueeze(0), sent[end:].unsqueeze(0))

    def read(self, sent: "Tensor", numbers: int) -> "Tensor":
        """Return the numbers of what `write` wrote."""
        end = self.code_bytes(numbers)
        return self.decode(sent[:end].unsqueeze(0), sent[end:].unsqueeze(0), numbers).squeeze(0)

    def encode(self, numbers: "Tensor", codes: "Tensor", scales: "Tensor") -> None:
        """Write the codes and scales of rows.

        Args:
            numbers: float32, [samples, numbers of a sample].
            codes: uint8, [samples, `code_bytes` of a sample], to be written.
            scales: uint8, [samples, 2 x blocks], to be written.
        """
        import torch

        code_at = scale_at = 0
        for begin, count, blocks in self._runs(numbers.shape[1]):
            part = _blocks(numbers[:, begin : begin + count], blocks)
            # Faster than the largest of magnitudes, which is written first; neither forgets a number that is none.
            largest = torch.maximum(part.amax(2), -part.amin(2))
            scale = self.scales(largest).clamp_min_(_MIN_SCALE).to(torch.bfloat16)
            scale_end, code_end = scale_at + _SCALE_BYTES * blocks, code_at + self.code_bytes(count)
            scales[:, scale_at:scale_end] = scale.view(torch.uint8)
            codes[:, code_at:code_end] = self.codes(part * scale.float().reciprocal_().unsqueeze(2)).flatten(1)
            code_at, scale_at = code_end, scale_end

    def decode(self, codes: "Tensor", scales: "Tensor", numbers: int) -> "Tensor":
        """Return the numbers of rows, float32, [samples, numbers]; the inverse of `encode` but for rounding."""
        import torch

        found = torch.empty(codes.shape[0], numbers, dtype=torch.float32, device=codes.device)
        code_at = scale_at = 0
        for begin, count, blocks in self._runs(numbers):
            scale_end, code_end = scale_at + _SCALE_BYTES * blocks, code_at + self.code_bytes(count)
            scale = own_bytes(scales[:, scale_at:scale_end]).view(torch.bfloat16).float().unsqueeze(2)
            into = _blocks(found[:, begin : begin + count], blocks)
            self.multiply(_blocks(codes[:, code_at:code_end], blocks), scale, into)
            code_at, scale_at = code_end, scale_end
        return found

    def _runs(self, numbers: int) -> list[tuple[int, int, int]]:
        """Return runs of equal blocks: where each begins, its numbers, its blocks; the last may be a shorter one."""
        size = self.block_numbers or numbers
        whole = numbers // size
        runs = [(0, whole * size, whole), (whole * size, numbers - whole * size, 1)]
        return [run for run in runs if run[1]]

    @abstractmethod
    def scales(self, largest: "Tensor") -> "Tensor":
        """Return the scale of each block by its largest magnitude; both float32, [samples, blocks]."""

    @abstractmethod
    def codes(self, scaled: "Tensor") -> "Tensor":
        """Return the codes of numbers in units of their scale, uint8, [samples, blocks, bytes]; may use up `scaled`."""

    @abstractmethod
    def multiply(self, codes: "Tensor", scale: "Tensor", into: "Tensor") -> None:
        """Write codes, uint8, [samples, blocks, bytes], times their scales."""


def _blocks(columns: "Tensor", blocks: int) -> "Tensor":
    """Return columns as [samples, blocks, columns of a block], in the same storage."""
    return columns.view(columns.shape[0], blocks, columns.shape[1] // blocks)


def own_bytes(part: "Tensor") -> "Tensor":
    """Return bytes in storage of their own: where they lie in a row, they could not be read as wider numbers."""
    import torch

    return part.clone(memory_format=torch.contiguous_format)
