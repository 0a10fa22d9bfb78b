"""The wire format of a cut: tensors rounded on their way to the neighbouring stage, where a plan asks for it.

A format may send float32 tensors as another type (`formats.codec.CastCodec`), or a tensor of floating-point numbers
as rows of bytes, one for each sample, so that a message can be cut between any two samples:

    codes | scales (`formats.codec`) | sizes of the sample's dimensions, int32 | their count | the type it had

A tensor of bytes is put into rows too, as it is, so that rows are known from other tensors; all others are sent as they
are, and so are those that would take no fewer bytes in rows. `Unit.forward_bytes` counts all of this. Sums of
gradients over replicas and of shared parameters never pass a cut's format.
"""

import math

import torch
from torch import Tensor

from spantrain.errors import ProtocolError
from spantrain.formats.codec import ROUNDED_DTYPES, BlockCodec, frame_bytes
from spantrain.formats.registry import WireFormat

Tensors = tuple[Tensor, ...]

_DTYPES = (torch.uint8, *(getattr(torch, name) for name in ROUNDED_DTYPES))
"""By the last byte of a row."""


def for_wire(tensors: Tensors, wire_format: WireFormat) -> Tensors:
    """Return tensors as they are sent; the first dimension of each is its samples, before and after."""
    codec = wire_format.codec
    return tuple(_in_rows(one, codec) for one in tensors) if isinstance(codec, BlockCodec) else codec.send(tensors)


def from_wire(tensors: Tensors, wire_format: WireFormat, device: torch.device | None = None) -> Tensors:
    """Return tensors as a stage works on them, rows taken apart on the device (None: where they are).

    Under bfloat16, those that came as bfloat16 are in float32 again, also one that autocast had made bfloat16; the
    values are the same. From rows, each has the type it had.

    Raises:
        ProtocolError: a row is not as long as it says.
    """
    codec = wire_format.codec
    if not isinstance(codec, BlockCodec):
        return codec.receive(tensors)
    return tuple(_from_rows(tensor, codec, device or tensor.device) for tensor in tensors)


class ErrorFeedback:
    """Sends gradients: what rounding takes from a sample's is added to those of the next sample that is sent.

    Parameters' gradients are sums over samples, of which an error that is the same in each would be a part; this way
    errors cancel. It is the error feedback of 1-bit SGD (Seide et al., Interspeech 2014) with samples in the place of
    steps: at a cut every step brings other samples, so that nothing of an earlier step belongs to them, and each has an
    object of its own. Kept is one sample's gradients for each tensor, in float32.

    Activations are not sent so: the error of one would be another's, and a stage is not linear in its input.
    """

    def __init__(self) -> None:
        self._left: dict[int, Tensor] = {}

    def for_wire(self, tensors: Tensors, wire_format: WireFormat) -> Tensors:
        """Return gradients as they are sent; see `for_wire` outside."""
        codec = wire_format.codec
        if not isinstance(codec, BlockCodec) or codec.block_numbers is None:
            return for_wire(tensors, wire_format)
        return tuple(self._in_rows(number, tensor, codec) for number, tensor in enumerate(tensors))

    def _in_rows(self, number: int, tensor: Tensor, codec: BlockCodec) -> Tensor:
        if not _is_rounded(tensor, codec):
            return _in_rows(tensor, codec)
        wanted = tensor.detach().reshape(tensor.shape[0], -1).float()
        rows = _empty_rows(tensor, codec)
        left = self._left.get(number)
        for sample in range(wanted.shape[0]):
            one = wanted[sample : sample + 1]
            if left is not None:
                one = one + left
            codes, scales = _parts(rows[sample : sample + 1], tensor, codec)
            codec.encode(one, codes, scales)
            # Of what is not finite nothing is left over.
            left = (one - codec.decode(codes, scales, one.shape[1])).nan_to_num_(0.0, 0.0, 0.0)
        if left is not None:
            self._left[number] = left
        return rows


def _in_rows(tensor: Tensor, codec: BlockCodec) -> Tensor:
    samples = tensor.shape[0]
    if tensor.dtype is torch.uint8:
        return torch.cat((tensor.reshape(samples, -1), _frames(tensor)), dim=1)
    if not _is_rounded(tensor, codec):
        return tensor
    rows = _empty_rows(tensor, codec)
    codec.encode(tensor.detach().reshape(samples, -1).float(), *_parts(rows, tensor, codec))
    return rows


def _is_rounded(tensor: Tensor, codec: BlockCodec) -> bool:
    """Return whether a tensor's numbers are sent in rows: if that takes fewer bytes."""
    if tensor.dtype not in _DTYPES[1:]:
        return False
    numbers = math.prod(tensor.shape[1:])
    return codec.row_bytes(numbers, tensor.dim() - 1) < numbers * tensor.element_size()


def _empty_rows(tensor: Tensor, codec: BlockCodec) -> Tensor:
    """Return rows for a tensor with nothing but what they end with."""
    length = codec.row_bytes(math.prod(tensor.shape[1:]), tensor.dim() - 1)
    rows = torch.empty(tensor.shape[0], length, dtype=torch.uint8, device=tensor.device)
    rows[:, length - frame_bytes(tensor.dim() - 1) :] = _frames(tensor)
    return rows


def _parts(rows: Tensor, tensor: Tensor, codec: BlockCodec) -> tuple[Tensor, Tensor]:
    """Return where in rows the codes and the scales of a tensor are."""
    scales_at = codec.code_bytes(math.prod(tensor.shape[1:]))
    return rows[:, :scales_at], rows[:, scales_at : rows.shape[1] - frame_bytes(tensor.dim() - 1)]


def _frames(tensor: Tensor) -> Tensor:
    """Return what ends the rows of a tensor: its sizes, their count, its type."""
    sizes = torch.tensor(tensor.shape[1:], dtype=torch.int32).view(torch.uint8)
    what = torch.tensor([tensor.dim() - 1, _DTYPES.index(tensor.dtype)], dtype=torch.uint8)
    return torch.cat((sizes, what)).to(tensor.device).expand(tensor.shape[0], -1)


def _from_rows(rows: Tensor, codec: BlockCodec, device: torch.device) -> Tensor:
    if rows.dtype is not torch.uint8:
        return rows
    shape, dtype = _read_frame(rows)
    numbers, frame = math.prod(shape), frame_bytes(len(shape))
    frame_at = rows.shape[1] - frame
    wanted = numbers + frame if dtype is torch.uint8 else codec.row_bytes(numbers, len(shape))
    if rows.shape[1] != wanted:
        raise ProtocolError(f"rows of {shape} as {codec.name}: {rows.shape[1]} bytes long, wanted {wanted}")
    rows = rows.to(device)
    if dtype is torch.uint8:
        return rows[:, :frame_at].reshape(-1, *shape)
    scales_at = codec.code_bytes(numbers)
    found = codec.decode(rows[:, :scales_at], rows[:, scales_at:frame_at], numbers)
    return found.reshape(-1, *shape).to(dtype)


def _read_frame(rows: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    is_row = rows.dim() == 2 and rows.shape[0] > 0 and rows.shape[1] >= frame_bytes(0)
    dimensions, kind = rows[0, -2:].tolist() if is_row else (0, len(_DTYPES))
    sizes_at = rows.shape[-1] - frame_bytes(dimensions)
    if kind >= len(_DTYPES) or sizes_at < 0:
        raise ProtocolError(f"bytes of {tuple(rows.shape)} do not end as rows do; are both sides of the same version?")
    sizes = rows[0, sizes_at : sizes_at + 4 * dimensions].clone().view(torch.int32)
    return tuple(sizes.tolist()), _DTYPES[kind]
