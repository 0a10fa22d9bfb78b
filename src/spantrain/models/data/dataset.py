"""Open the data set of a model: inputs and labels of samples, each from the index alone.

Each stage reads what its units need, as a rule the first one inputs and the last one labels, on its own machine.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.formats.tensor_bytes import byte_view
from spantrain.models.build import example_inputs
from spantrain.models.catalog.catalog import IMAGE_CHANNELS, IMAGE_SIDE
from spantrain.models.data.chat import open_conversations
from spantrain.models.data.choice import CHAT, ROWS, TEXT_KINDS, class_count, known_tokens, start_token
from spantrain.models.data.images import open_images
from spantrain.models.data.records import apart
from spantrain.models.data.text import Windows, read_windows
from spantrain.models.sampler import derive_seed, mix
from spantrain.models.sources import OWN
from spantrain.models.units import IGNORED_LABEL

_MASKED_RATIO = 0.15
_DIGITS_HELD_OUT_EVERY = 6


class Dataset(Protocol):
    """Samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def digest(self) -> str:
        """SHA-256 over all samples: machines that read the same data have the same one."""

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the first unit's inputs, samples first."""

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return the last unit's labels, samples first."""


def open_dataset(spec: ModelSpec, *, held_out: bool = False) -> Dataset:
    """Open the model's data set: what it trains on, or the part held out (no sample is in both).

    Raises:
        ConfigError: the data set is unknown, missing on this machine, or too short.
    """
    kind, _, rest = spec.dataset.partition(":")
    if spec.dataset == "digits":
        return _digits(held_out=held_out)
    if spec.dataset == "example":
        return _example(spec)
    if kind == "images" or (kind == "hf" and spec.objective == "classify"):
        return open_images(
            spec.dataset,
            shape=tuple(example_inputs(spec, 1)[0].shape[1:]),
            classes=class_count(spec),
            held_out=held_out,
        )
    if spec.family == "factory" and spec.sequence_length is not None:
        from spantrain.models.data.user import check_shapes

        check_shapes([torch.empty(1, spec.sequence_length)], spec, f"data {spec.dataset}")
    if kind == CHAT:
        return open_conversations(spec, held_out=held_out, shifted=_shifted(spec))
    if kind in TEXT_KINDS or not rest:
        return _open_text(spec, held_out=held_out)
    from spantrain.models.data.user import open_rows, open_user_samples

    return (open_rows if kind == ROWS else open_user_samples)(spec, held_out=held_out)


def _shifted(spec: ModelSpec) -> bool:
    """Whether labels are the tokens that follow: those of transformers' causal losses are the tokens themselves."""
    if spec.objective != OWN:
        return True
    from spantrain.models.tracing.model import cut_model

    return not cut_model(spec).whole.shifts_labels


def _example(spec: ModelSpec) -> Dataset:
    if spec.family != "factory":
        raise ConfigError(f"model {spec.name}: data example: only models from a function have an example batch")
    from spantrain.models.tracing.model import cut_model

    batch = cut_model(spec).whole.batch
    if batch.labels is None:
        raise ConfigError(f"model {spec.name}: its example batch has no labels; give --data, or return some with it")
    content = b"".join(byte_view(tensor.cpu()) for tensor in (*batch.inputs, batch.labels))
    return HeldSamples(batch.inputs, batch.labels, content)


def _open_text(spec: ModelSpec, *, held_out: bool) -> Dataset:
    if spec.sequence_length is None:
        raise ConfigError(f"model {spec.name}: data {spec.dataset} is text: give --sequence-length, tokens of a sample")
    windows = read_windows(
        spec.dataset, spec.sequence_length, held_out=held_out, tokenizer=spec.tokenizer, vocabulary=known_tokens(spec)
    )
    if spec.objective == "continue":
        return Continuation(**vars(windows), start=start_token(spec))
    if spec.objective != "masked-byte":
        return NextToken(**vars(windows), shifted=_shifted(spec))
    if windows.mask is None:
        raise ConfigError(
            f"model {spec.name}: learns masked tokens, but tokenizer {spec.tokenizer} has neither [MASK] nor <mask>; "
            "take one that has"
        )
    return MaskedTokens(**vars(windows))


class NextToken(Windows):
    """Windows of text; the label at each position is the token that follows, unless the model shifts labels itself."""

    shifted: bool = True

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return int64 `(samples, tokens)`."""
        return (self.tokens(indices, slice(-1)),)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples, tokens)`."""
        return self.tokens(indices, slice(1, None) if self.shifted else slice(-1))

    def tokens(self, indices: Sequence[int], part: slice) -> Tensor:
        """Return int64 `(samples, tokens)`: a part of each window."""
        return torch.from_numpy(self.rows[list(indices), part].astype(np.int64))


class Continuation(NextToken):
    """Windows of text in halves: an encoder reads the first, a decoder writes the second, told one token at a time."""

    start: int
    """What is told before the first token."""

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return int64 `(samples, tokens)` twice: what is read, and what was written before each position."""
        tokens, half = self.tokens(indices, slice(-1)), self.length // 2
        return tokens[:, :half], functional.pad(tokens[:, half:-1], (1, 0), value=self.start)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples, tokens)`: what is to be written."""
        return self.tokens(indices, slice(self.length // 2, -1))


class MaskedTokens(NextToken):
    """Windows of text with a fixed number of tokens masked, chosen by the sample's index; the labels are those tokens.

    Unlike in BERT's own recipe every chosen token is masked: none is kept, none replaced by another.
    """

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return int64 `(samples, tokens)`, the mask at the masked positions."""
        assert self.mask is not None, "of windows with a mask"
        return (self.tokens(indices, slice(-1)).masked_fill(self._masked(indices), self.mask),)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples, tokens)`, -100 where nothing is masked."""
        return self.tokens(indices, slice(-1)).masked_fill(~self._masked(indices), IGNORED_LABEL)

    def _masked(self, indices: Sequence[int]) -> Tensor:
        length, count = np.uint64(self.length), max(1, round(_MASKED_RATIO * self.length))
        samples = np.asarray(list(indices), dtype=np.uint64)[:, None]
        keys = mix(np.add(samples * length, np.arange(length, dtype=np.uint64)), derive_seed(0, "mask"))
        masked = np.zeros(keys.shape, dtype=np.bool_)
        np.put_along_axis(masked, np.argsort(keys, axis=1, kind="stable")[:, :count], True, axis=1)
        return torch.from_numpy(masked)


class HeldSamples:
    """Samples that are held in memory: rows of tensors."""

    def __init__(self, inputs: tuple[Tensor, ...], labels: Tensor, content: bytes) -> None:
        """`content` is what they were made of, for their digest."""
        self._inputs, self._labels = inputs, labels
        self.digest = sha256(content).hexdigest()

    def __len__(self) -> int:
        return self._labels.shape[0]

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return rows of the inputs."""
        return tuple(tensor[list(indices)] for tensor in self._inputs)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return rows of the labels."""
        return self._labels[list(indices)]


@cache
def _digits(*, held_out: bool) -> HeldSamples:
    """Return scikit-learn's handwritten digits (1797 images of 8x8), of mean 0 and deviation 1 once they are resized.

    Inputs are float32 `(samples, 3, 32, 32)`, the same grey in each channel, and labels int64 `(samples,)`.
    """
    from sklearn.datasets import load_digits  # imported late: it takes a second

    bunch = load_digits()
    parts = apart(range(len(bunch.target)), _DIGITS_HELD_OUT_EVERY)
    kept, training = parts[held_out], bunch.images[parts[0]]
    images = torch.from_numpy((bunch.images[kept] - training.mean()) / training.std()).float()[:, None]
    resized = functional.interpolate(images, size=(IMAGE_SIDE, IMAGE_SIDE), mode="bilinear")
    labels = torch.from_numpy(bunch.target[kept]).long()
    content = bunch.images[kept].tobytes() + bunch.target[kept].tobytes()
    return HeldSamples((resized.expand(-1, IMAGE_CHANNELS, -1, -1),), labels, content)
