"""Words between workers: records as JSON, packed, in tensors of bytes as messages carry them."""

import json
import zlib
from typing import TypeVar

import torch

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.errors import ProtocolError

_WORDS_BYTES, _UNPACKED_BYTES = 32 * 2**20, 64 * 2**20
"""Of one message and of what was packed in it, at most."""
T = TypeVar("T")


def packed_words(value: object) -> torch.Tensor:
    """Return what has a form in JSON as a tensor of bytes."""
    text = zlib.compress(json.dumps(to_json(value), separators=(",", ":")).encode())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_words(kind: type[T], message: torch.Tensor, peer: str, what: str) -> T:
    """Return what a peer has packed; `what` it does with that is in the message where it is nothing of the sort.

    Raises:
        ProtocolError: it is no tensor of bytes, or too large, or of another form.
    """
    if message.dtype != torch.uint8 or message.nbytes > _WORDS_BYTES:
        what = f"{message.nbytes} bytes of {message.dtype}"
        raise ProtocolError(f"{peer}: sent {what}, words have {_WORDS_BYTES} at most")
    text = message.numpy().tobytes()
    try:
        value: object = json.loads(zlib.decompressobj().decompress(text, _UNPACKED_BYTES))
    except zlib.error as error:
        raise ProtocolError(f"{peer}: sent words that cannot be unpacked: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{peer}: sent no JSON: {error}") from None
    return from_json(kind, value, f"{peer} {what}", error=ProtocolError)
