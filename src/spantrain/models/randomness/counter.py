"""Random numbers without a state: a hash of integers, the same on every kind of device.

Only operations of torch on 32-bit integers are used, which wrap around. A number is a hash of two words of its row and
of its index in the row; the words are hashes of seed, step and sample, and of the place that draws.
"""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from spantrain.models.sampler import derive_seed

_EVERY_SAMPLE = -1
"""Stands for a sample in what all of them have in common."""
_INDEX, _FIRST, _SECOND = -0x61C88647, -0x7A143595, -0x3D4D51CB
"""Odd factors: the golden ratio's, and those of MurmurHash3's finalizer (Appleby 2011), as signed integers."""
_DIGITS = {torch.bfloat16: 8, torch.float16: 11}
"""Binary digits of a fraction, by its type; others have those of float32."""


def row_words(seed: int, step: int, first_sample: int, samples: int, device: torch.device) -> Tensor:
    """Return two words for each sample of a step, int32 `(2, samples)`; of no samples, for what all have in common."""
    first, count = (first_sample, samples) if samples else (_EVERY_SAMPLE, 1)
    low, high = _halves(derive_seed(seed, "draws", step))
    rows = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return _scrambled(torch.stack((rows * _INDEX + low, rows * _SECOND + high)))


def random_bits(words: Tensor, place: str, index: Tensor) -> Tensor:
    """Return uniform 32-bit integers, int32 `(rows, numbers)`.

    Args:
        words: of the rows, int32 `(2, rows)`.
        place: where they are drawn.
        index: of the numbers in their row, int32 `(numbers,)`.
    """
    first, second = _halves(_place_word(place))
    keys = _scrambled(torch.stack((words[0] ^ first, words[1] ^ second)))
    mixed: Tensor = index * _INDEX + keys[0, :, None]
    _fold(mixed, 16).mul_(_FIRST).add_(keys[1, :, None])
    return _fold(mixed, 13).mul_(_SECOND)


def at_least(bits: Tensor, chance: float) -> Tensor:
    """Return true with probability 1 - chance, false otherwise."""
    bound = round(min(max(chance, 0.0), 1.0) * 2**32) - 2**31
    return bits >= bound if bound < 2**31 else torch.zeros_like(bits, dtype=torch.bool)


def fractions(bits: Tensor, dtype: torch.dtype, *, above_zero: bool = False) -> Tensor:
    """Return uniform numbers from 0 to below 1 of a floating-point type; `above_zero`: in the middle of their steps."""
    digits = _DIGITS.get(dtype, 23 if above_zero else 24)
    whole = (bits >> (32 - digits)) & (2**digits - 1)
    found: Tensor = whole.to(torch.float32) + (0.5 if above_zero else 0.0)
    return (found * 2.0**-digits).to(dtype)


def normals(words: Tensor, place: str, index: Tensor) -> Tensor:
    """Return float32 numbers of the standard normal distribution, `(rows, numbers)`, equal up to rounding anywhere.

    After Box and Muller, "A Note on the Generation of Random Normal Deviates" (1958).
    """
    radius = fractions(random_bits(words, place, index), torch.float32, above_zero=True)
    angle = fractions(random_bits(words, f"{place}/angle", index), torch.float32)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)


_place_word = lru_cache(maxsize=65536)(partial(derive_seed, 0, "place"))


def _halves(word: int) -> tuple[int, int]:
    """Return a word of 63 bits as two signed ones of 32."""
    return _signed(word), _signed(word >> 31)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _scrambled(words: Tensor) -> Tensor:
    """Scramble words one to one, in place (the finalizer of MurmurHash3)."""
    return _fold(_fold(_fold(words, 16).mul_(_FIRST), 13).mul_(_SECOND), 16)


def _fold(words: Tensor, distance: int) -> Tensor:
    """Add the upper bits to the lower ones, in place; shifts of signed integers repeat the sign, which is masked."""
    shifted = words >> distance
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (32 - distance)) - 1))
