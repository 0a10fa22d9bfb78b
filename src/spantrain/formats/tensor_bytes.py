"""The name of a tensor's type, a tensor's bytes, and a file of tensors in the safetensors format; nothing is copied."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from spantrain.formats.codec import DTYPE_CODES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE_BYTES = 8 * 2**20
_ALIGNMENT = 8


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a type: `float32`, ..."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: "Tensor") -> "Tensor":
    """Return the bytes of a tensor, row by row; of the same memory where it lies in one piece."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def byte_view(tensor: "Tensor") -> memoryview:
    """Return the same of a tensor on the processor, for a file or a socket."""
    view: memoryview = raw_bytes(tensor).numpy().data
    return view


def tensor_pieces(tensors: "Mapping[str, Tensor]") -> Iterator[bytes | memoryview]:
    """Return the bytes of a safetensors file that holds these tensors, which lie on the CPU, in pieces.

    (Format: https://huggingface.co/docs/safetensors: eight bytes of the header's length, the header as JSON, the
    tensors without gaps.) Nothing is copied, so that saving takes no second buffer.
    """
    header: dict[str, object] = {}
    start = 0
    for name, tensor in tensors.items():
        end, code = start + tensor.nbytes, DTYPE_CODES[dtype_name(tensor.dtype)]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        data = byte_view(tensor)
        for lo in range(0, len(data), _PIECE_BYTES):
            yield data[lo : lo + _PIECE_BYTES]
