"""Open the data set of a model: inputs and labels of samples, each from the index alone.

Each stage reads what its units need, as a rule the first one inputs and the last one labels, on its own machine.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

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
from spantrain.models.data.choice import CHAT, IMAGE_SUFFIXES, ROWS, TEXT_KINDS, class_count, known_tokens, start_token
from spantrain.models.data.records import apart, load_saved_dataset
from spantrain.models.data.text import Windows, read_windows
from spantrain.models.sampler import derive_seed, mix
from spantrain.models.sources import OWN
from spantrain.models.units import IGNORED_LABEL

_MASKED_RATIO = 0.15
_PICTURES_HELD_OUT_EVERY = 6
_IMAGE_FIELDS = ("image", "img", "pixel_values")
_LABEL_FIELDS = ("label", "labels", "fine_label")
_MIDDLE = 127.5


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
        return _open_images(spec, held_out=held_out)
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
    parts = apart(range(len(bunch.target)), _PICTURES_HELD_OUT_EVERY)
    kept, training = parts[held_out], bunch.images[parts[0]]
    images = torch.from_numpy((bunch.images[kept] - training.mean()) / training.std()).float()[:, None]
    resized = functional.interpolate(images, size=(IMAGE_SIDE, IMAGE_SIDE), mode="bilinear")
    labels = torch.from_numpy(bunch.target[kept]).long()
    content = bunch.images[kept].tobytes() + bunch.target[kept].tobytes()
    return HeldSamples((resized.expand(-1, IMAGE_CHANNELS, -1, -1),), labels, content)


class Images:
    """Pictures brought to the model's size, colours from -1 to 1; each is read when it is asked for."""

    def __init__(self, source: "_Folder | _Saved", indices: Sequence[int], shape: tuple[int, int, int]) -> None:
        self._source = source
        self._indices = indices
        self._channels, self._height, self._width = shape
        self.digest = sha256(f"{source.digest}{list(indices)}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return float32 `(samples, channels, height, width)`."""
        return (torch.stack([self._pixels(self._indices[index]) for index in indices]),)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples,)`."""
        return torch.tensor([self._source.labels[self._indices[index]] for index in indices], dtype=torch.int64)

    def _pixels(self, index: int) -> Tensor:
        picture = self._source.picture(index).convert("L" if self._channels == 1 else "RGB")
        pixels = np.asarray(picture.resize((self._width, self._height)), dtype=np.float32) / _MIDDLE - 1.0
        return torch.from_numpy(pixels.reshape(self._height, self._width, self._channels)).permute(2, 0, 1)


def _open_images(spec: ModelSpec, *, held_out: bool) -> Images:
    """Open `images:FOLDER` or `hf:FOLDER`; every sixth picture is held out.

    Raises:
        ConfigError: pillow is missing, the folder has no pictures of classes, or more classes than the model.
    """
    kind, _, place = spec.dataset.partition(":")
    shape, classes = tuple(example_inputs(spec, 1)[0].shape[1:]), class_count(spec)
    if len(shape) != 3:
        raise ConfigError(f"data {place}: the model reads samples of shape {shape}, not pictures")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"data {spec.dataset}: reading pictures needs pillow; run: pip install pillow") from error
    path = Path(place)
    parts: Sequence[_Folder | _Saved] = (
        [_Folder(path)] if kind == "images" else [_Saved(rows, path) for rows in load_saved_dataset(path)]
    )
    for source in parts:
        if classes is not None and source.class_count > classes:
            raise ConfigError(
                f"data {place}: has {source.class_count} classes, but the model tells {classes} apart; give fewer, or "
                "a model with more"
            )
    if len(parts) > 1:
        return Images(parts[held_out], range(len(parts[held_out].labels)), shape)
    chosen = apart(range(len(parts[0].labels)), _PICTURES_HELD_OUT_EVERY)[held_out]
    if not chosen:
        raise ConfigError(
            f"data {place}: has too few pictures to hold any out; give at least {_PICTURES_HELD_OUT_EVERY}"
        )
    return Images(parts[0], chosen, shape)


class _Folder:
    """A folder of folders, one for each class, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"data {folder}: does not exist on this machine; give a folder of one folder per class")
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        inside = ((path, number) for number, name in enumerate(names) for path in sorted((folder / name).rglob("*")))
        found = [entry for entry in inside if entry[0].suffix.lower() in IMAGE_SUFFIXES and entry[0].is_file()]
        if not found:
            raise ConfigError(
                f"data {folder}: no pictures; wanted a folder per class with {', '.join(sorted(IMAGE_SUFFIXES))} in it"
            )
        # Classes take turns, so that every sixth picture is of each class.
        found.sort(key=lambda entry: sha256(entry[0].relative_to(folder).as_posix().encode()).digest())
        self.class_count = len(names)
        self.labels = [number for _, number in found]
        self._paths = [path for path, _ in found]
        digest = sha256()
        for path, number in found:
            _read_picture(path, whole=False)
            digest.update(f"{path.relative_to(folder).as_posix()}:{number}:".encode() + path.read_bytes())
        self.digest = digest.hexdigest()

    def picture(self, index: int) -> Any:
        """Read a picture.

        Raises:
            ConfigError: the file is damaged.
        """
        return _read_picture(self._paths[index], whole=True)


def _read_picture(path: Path, *, whole: bool) -> Any:
    """Read a picture, or no more of it than shows that it is one."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.copy() if whole else picture.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # pillow's, of damaged files
        raise ConfigError(
            f"data {path}: not a picture that pillow reads ({error}); remove it, or save it again"
        ) from error


class _Saved:
    """Rows of a data set with a picture and its class."""

    def __init__(self, rows: Any, path: Path) -> None:
        columns = rows.column_names
        image = next((name for name in _IMAGE_FIELDS if name in columns), None)
        label = next((name for name in _LABEL_FIELDS if name in columns), None)
        if image is None or label is None:
            raise ConfigError(
                f"data {path}: has {', '.join(columns)}; wanted a picture ({', '.join(_IMAGE_FIELDS)}) and its class "
                f"({', '.join(_LABEL_FIELDS)})"
            )
        self._rows, self._image = rows, image
        self.labels = [int(value) for value in rows[label]]
        self.class_count = max(self.labels, default=0) + 1
        self.digest = sha256(f"{rows._fingerprint}{self.labels}".encode()).hexdigest()

    def picture(self, index: int) -> Any:
        """Read a picture."""
        return self._rows[index][self._image]
