"""Text as numbers: bytes as they are, or the tokens of a tokenizer's file."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spantrain.errors import ConfigError

IntArray = npt.NDArray[np.integer]

BYTE_MASK = 256
"""The token in the place of a masked byte: the first that is no byte."""

_SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|im_end|>")
_TEXTS_AT_ONCE = 4096
_MASKS = ("[MASK]", "<mask>")


class Encoder(Protocol):
    """Turns text into numbers."""

    @property
    def mask(self) -> int | None:
        """The number in the place of a masked one; None where there is none."""

    def text(self, content: bytes) -> IntArray:
        """Return the numbers of one long text."""

    def documents(self, texts: Iterable[str]) -> list[IntArray]:
        """Return the numbers of each text, with a separator behind it."""


class Bytes:
    """UTF-8, a byte a number; documents end with a line feed."""

    mask: int | None = BYTE_MASK

    def text(self, content: bytes) -> IntArray:
        """Return the bytes."""
        return np.frombuffer(content, dtype=np.uint8)

    def documents(self, texts: Iterable[str]) -> list[IntArray]:
        """Return the bytes of each, with a line feed behind it."""
        return [self.text(f"{text}\n".encode()) for text in texts]


class Tokens:
    """The tokens of a file of the `tokenizers` library (which transformers writes, too).

    Nothing is added at the ends of a text but the separator between documents: the first of the usual names for it
    that the tokenizer knows, or none.
    """

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it is missing, or none of the library.
        """
        from tokenizers import Tokenizer  # imported late: planning needs none

        if not file.is_file():
            raise ConfigError(f"tokenizer {file}: does not exist on this machine; copy it to every machine of the run")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"tokenizer {file}: not a file of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.mask = self._first_known(_MASKS)
        self._separator = self._first_known(_SEPARATORS)

    def text(self, content: bytes) -> IntArray:
        """Return the tokens; bytes that are no UTF-8 are replaced."""
        lines = content.decode(errors="replace").splitlines(keepends=True)
        return np.concatenate([np.zeros(0, dtype=np.int32), *self._encoded(lines, [])])

    def documents(self, texts: Iterable[str]) -> list[IntArray]:
        """Return the tokens of each, with the separator behind it."""
        return self._encoded(texts, [] if self._separator is None else [self._separator])

    def _encoded(self, texts: Iterable[str], end: list[int]) -> list[IntArray]:
        found: list[IntArray] = []
        remaining = iter(texts)
        while some := list(islice(remaining, _TEXTS_AT_ONCE)):
            encoded = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            found += [np.asarray([*encoding.ids, *end], dtype=np.int32) for encoding in encoded]
        return found

    def _first_known(self, names: Iterable[str]) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((number for number in found if number is not None), None)


def open_encoder(tokenizer: str) -> Encoder:
    """Return the encoder of a `ModelSpec.tokenizer`: bytes where it is empty.

    Raises:
        ConfigError: as `Tokens`.
    """
    return Tokens(Path(tokenizer)) if tokenizer else Bytes()
