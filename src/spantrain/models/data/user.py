"""Samples that users' own code gives: a data set from a function of theirs.

A user's data set has `__len__` and `__getitem__`; an element is what a batch is (`models.tracing.batch`), for one
sample: a dict with `labels` among its tensors, or a tuple whose last tensor is the labels. If the function takes
`held_out`, it is called with it; otherwise every sixteenth sample is held out.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spantrain.core.units import ModelSpec, TensorSpec
from spantrain.errors import ConfigError
from spantrain.formats.tensor_bytes import byte_view
from spantrain.models.build import unit_source
from spantrain.models.data.choice import class_count, known_tokens
from spantrain.models.data.records import apart, is_saved_set, load_saved_dataset, record_parts
from spantrain.models.sources import OWN
from spantrain.models.tracing.batch import LABEL_NAMES, LABELS_NAME, ModelBatch, split_batch
from spantrain.models.tracing.factory import called_data, sample_at
from spantrain.models.tracing.model import cut_model
from spantrain.models.units import IGNORED_LABEL

_DIGEST_SAMPLES = 64


class UserSamples:
    """Some samples of a user's data set."""

    def __init__(self, samples: Any, indices: Sequence[int], spec: ModelSpec, *, source: str, trains: bool) -> None:
        """Read these samples, as the model takes them; `source` begins messages. To train, by the model's parts.

        Raises:
            ConfigError: the first one cannot be read, or it has labels of another sort than the model is told.
        """
        self._samples = samples
        self._indices = indices
        self._spec, self._names = spec, wanted_names(spec)
        self._source = source
        self._cut = spec if trains else None
        self._last: tuple[tuple[int, ...], list[ModelBatch]] = (), []
        self.unlabelled = bool(spec.rows) and all(one.name != LABELS_NAME for one in spec.rows)
        """Whether the model is told what is right under other names, as those that find answers in texts are."""
        _check_followed(self.first, spec, source)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def has_labels(self) -> bool:
        """Whether the model is told what is right of samples, by the first one."""
        return self.unlabelled or self._sample(0).labels is not None

    @property
    def first(self) -> ModelBatch:
        """The first sample, as a batch of one."""
        return self._sample(0).mapped(lambda tensor: tensor[None])

    @property
    def digest(self) -> str:
        """SHA-256 over the number of samples and some of them: reading all could take hours."""
        count = len(self._indices)
        some = sorted({index * count // _DIGEST_SAMPLES for index in range(min(count, _DIGEST_SAMPLES))})
        found = sha256(f"{count}:".encode())
        for tensor in (*self.inputs(some), self.labels(some)):
            found.update(byte_view(tensor.cpu()))
        return found.hexdigest()

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the inputs of samples, stacked."""
        samples = [sample.inputs for sample in self._read(indices)]
        names = dict(enumerate(self._names or ()))
        stacked = tuple(
            self._stacked(tensors, names.get(number, f"input {number}"))
            for number, tensors in enumerate(zip(*samples, strict=True))
        )
        if self._cut is not None:
            check_shapes(stacked, self._cut, self._source)
        return stacked

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return the labels of samples, stacked; zeros of a model that is told under other names."""
        if self.unlabelled:
            return torch.zeros(len(indices), dtype=torch.int64)
        found = []
        for index, sample in zip(indices, self._read(indices), strict=True):
            if sample.labels is None:
                raise ConfigError(f"{self._source}: sample {index} has no labels; add them, under the key `labels`")
            found.append(sample.labels)
        return self._stacked(found, LABELS_NAME)

    def _read(self, indices: Sequence[int]) -> list[ModelBatch]:
        """Return samples, read once: each reading may turn or cut a picture anew, and its labels are to be of that."""
        key = tuple(indices)
        if self._last[0] != key:
            self._last = key, [self._sample(index) for index in key]
        return self._last[1]

    def _sample(self, index: int) -> ModelBatch:
        source = f"{self._source}: sample {self._indices[index]}"
        sample = sample_at(self._samples, self._indices[index], self._source)
        if isinstance(sample, Mapping):
            ordered = _ordered(sample, self._names, self._source)
            sample = {name: _tensor(value, f"{source}: {name}")[None] for name, value in ordered.items()}
        elif isinstance(sample, Sequence) and not isinstance(sample, str):
            sample = tuple(_tensor(value, f"{source}: element {number}")[None] for number, value in enumerate(sample))
        found = split_batch(sample, source=source)
        if not self._spec.is_brought:
            _check_built_in(found, self._spec, source, trains=self._cut is not None)
        return found.mapped(lambda tensor: tensor[0])

    def _stacked(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise ConfigError(
                f"{self._source}: {name} of samples have shapes {shapes[0]} and {shapes[1]}; bring all to one: "
                'tokenizer(..., padding="max_length", truncation=True, max_length=N) in the data set, labels -100 '
                "where it padded; or rows in this process and Trainer(processing_class=tokenizer), or data_collator"
            )
        return torch.stack(list(tensors))


def _tensor(value: Any, source: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{source} is a {type(value).__name__} that is no tensor ({error}); make it numbers"
        ) from error


def open_user_samples(spec: ModelSpec, *, held_out: bool) -> UserSamples:
    """Call the function that `spec.dataset` names, and return its samples: to train on, or held out.

    Raises:
        ConfigError: the function cannot be had, raises, or returns no data set.
    """
    samples, takes_held_out = called_data(spec.dataset, held_out=held_out)
    remedy = "give more, or take an argument `held_out` and return the part that is asked for"
    return _part(samples, spec, divided=takes_held_out, held_out=held_out, remedy=remedy)


def open_rows(spec: ModelSpec, *, held_out: bool) -> UserSamples:
    """Open `rows:PATH`: rows to train on, or those that are held out, by the names of their files or one in sixteen.

    Raises:
        ConfigError: there are no rows, or one is none, or unlike the first.
    """
    place = Path(spec.dataset.partition(":")[2])
    if is_saved_set(place):
        parts = load_saved_dataset(place)
    else:
        parts = [[_checked(row, where, spec.rows) for where, row in part] for part in record_parts(place)]
    remedy = "give more, or a part that is called test"
    return _part(parts[held_out and len(parts) > 1], spec, divided=len(parts) > 1, held_out=held_out, remedy=remedy)


def _checked(row: Mapping[str, Any], where: str, wanted: Sequence[TensorSpec]) -> Mapping[str, Any]:
    for one in wanted:
        names = LABEL_NAMES if one.name == LABELS_NAME else (one.name,)
        shape = next((np.shape(row[name]) for name in names if name in row), None)
        if shape != one.shape_per_sample:
            found = "is missing" if shape is None else f"has shape {list(shape)}"
            like = f"that of the first row {list(one.shape_per_sample)}"
            raise ConfigError(f"{where}: {one.name} {found}, {like}; pad or cut all to one, labels by {IGNORED_LABEL}")
    return row


def _part(samples: Any, spec: ModelSpec, *, divided: bool, held_out: bool, remedy: str) -> UserSamples:
    """Return samples to train on, or those held out; `divided`: they are that part already."""
    source = f"data {spec.dataset}"
    indices: Sequence[int] = range(len(samples))
    if not divided:
        indices = apart(indices)[held_out]
    if not indices:
        raise ConfigError(f"{source}: no {'held-out ' if held_out else ''}samples among {len(samples)}; {remedy}")
    return UserSamples(samples, indices, spec, source=source, trains=True)


def samples_of(samples: Any, spec: ModelSpec, *, trains: bool = False) -> UserSamples:
    """Return all samples of a data set in this process; to train, or for the whole model.

    Raises:
        ConfigError: it has no length, or no samples.
    """
    if not hasattr(samples, "__len__") or len(samples) == 0:
        raise ConfigError(f"data: a {type(samples).__name__} without `__len__`, or without samples; give a data set")
    return UserSamples(samples, range(len(samples)), spec, source="data", trains=trains)


def check_shapes(inputs: Sequence[Tensor], spec: ModelSpec, source: str) -> None:
    """Refuse inputs of other lengths than those of the example batch, which a model's parts may have as numbers.

    Raises:
        ConfigError: they are.
    """
    example = cut_model(spec).whole.batch if spec.is_brought else None
    for number, (got, wanted) in enumerate(zip(inputs, example.inputs, strict=False) if example else ()):
        if got.shape[1:] != wanted.shape[1:]:
            name = example and example.names[number]
            raise ConfigError(
                f"{source}: {name or f'input {number}'} has {list(got.shape[1:])} numbers a sample, but the example "
                f"batch of the model, which it was cut and planned with, {list(wanted.shape[1:])}: pad or truncate to "
                'that length (padding="max_length", truncation=True, max_length=...), or give another example batch'
            )


def _check_followed(batch: ModelBatch, spec: ModelSpec, source: str) -> None:
    """Refuse tokens as their own labels, where the loss is that of the tokens that follow, and the other way round.

    Raises:
        ConfigError: they are: something else would be learnt.
    """
    labels, tokens = batch.labels, batch.inputs[0]
    if spec.objective not in ("next-byte", OWN) or labels is None or labels.shape != tokens.shape or labels.dim() != 2:
        return
    counted = labels != IGNORED_LABEL
    before = counted[:, :-1]
    own = torch.equal(labels[counted], tokens[counted])
    follow = bool(before.any()) and torch.equal(labels[:, :-1][before], tokens[:, 1:][before])
    if spec.objective == OWN and follow and not own and cut_model(spec).whole.shifts_labels:
        raise ConfigError(
            f"{source}: the labels are the tokens that follow, and the loss of {spec.name} shifts them once more: give "
            f"the tokens themselves as labels ({IGNORED_LABEL}: not counted)"
        )
    if spec.objective != OWN and bool(counted.any()) and own and not follow:
        raise ConfigError(
            f"{source}: the labels are the tokens themselves; of {spec.name}, labels are the tokens that follow: shift "
            "them by one (the last is -100), or give samples as dictionaries to a model of transformers, whose own "
            "loss shifts them"
        )


def batch_of(batch: Any, spec: ModelSpec, *, source: str, trains: bool = False) -> ModelBatch:
    """Return a batch as the model reads it; to train, by the model's parts.

    Raises:
        ConfigError: it is none, its inputs are not of the sort that the model takes, or numbers are out of range.
    """
    names = wanted_names(spec)
    if isinstance(batch, Mapping):
        strange = [name for name in batch if names is not None and name not in (*names, *LABEL_NAMES)]
        if strange:
            raise ConfigError(
                f"{source}: has {strange[0]}, which the model's example batch has not ({', '.join(names or ())}): add "
                "it there, or leave it out"
            )
        batch = _ordered(batch, names, source)
    found = split_batch(batch, source=source)
    if spec.is_brought:
        example = cut_model(spec).whole.batch
        got, wanted = ([f"{one.dtype} in {one.dim()} dimensions" for one in b.inputs] for b in (found, example))
        if got != wanted:
            raise ConfigError(
                f"{source}: the inputs are {'; '.join(got)}, but the model's example batch has {'; '.join(wanted)} "
                "(of a tuple, the last tensor is the labels)"
            )
        if trains:
            check_shapes(found.inputs, spec, source)
        _check_numbers(found, spec, source)
    else:
        _check_built_in(found, spec, source, trains=trains)
    _check_followed(found, spec, source)
    return found


def _check_built_in(batch: ModelBatch, spec: ModelSpec, source: str, *, trains: bool) -> None:
    """Refuse what a model of the catalogue cannot take: inputs and labels of another type or number, and to train size.

    Raises:
        ConfigError: they are.
    """
    example = unit_source(spec).batch()
    pairs = ((example.names[0], batch.inputs[0], example.inputs[0]), (LABELS_NAME, batch.labels, example.labels))
    for name, got, wanted in pairs:
        if got is None or wanted is None:
            continue
        shapes = [list(one.shape[1:]) if trains else one.dim() for one in (got, wanted)]
        if got.dtype != wanted.dtype or shapes[0] != shapes[1]:
            raise ConfigError(
                f"{source}: {name} are {got.dtype} of shape {list(got.shape[1:])}, but {spec.name} takes "
                f"{wanted.dtype} of shape {list(wanted.shape[1:])}: make them such in the data set"
                + (", or give --sequence-length" if spec.sequence_length and got.dtype == wanted.dtype else "")
            )
    _check_numbers(batch, spec, source)


def _check_numbers(batch: ModelBatch, spec: ModelSpec, source: str) -> None:
    """Refuse tokens and labels that a model has no row for, where its configuration says how many it has."""
    reads_images = spec.objective == "classify"
    limit = class_count(spec) if reads_images else known_tokens(spec)
    if limit is None:
        return
    tokens = () if reads_images else tuple(("inputs", tensor) for tensor in batch.inputs)
    labels = () if batch.labels is None else (("labels", batch.labels[batch.labels != IGNORED_LABEL]),)
    for name, tensor in (*tokens, *labels):
        if tensor.numel() == 0 or tensor.is_floating_point():
            continue
        least, most = int(tensor.min()), int(tensor.max())
        if least < 0 or most >= limit:
            raise ConfigError(
                f"{source}: the {name} have numbers from {least} to {most}, but {spec.name} knows 0 to {limit - 1}"
                + (f" (and {IGNORED_LABEL}: not counted)" if name == "labels" else "")
            )


def _ordered(fields: Mapping[str, Any], names: Sequence[str] | None, source: str) -> Mapping[str, Any]:
    """Return the fields in the order in which the model takes them."""
    if names is None:
        return fields
    missing = [name for name in names if name not in fields]
    if missing:
        raise ConfigError(f"{source}: has {', '.join(fields)}, but the model takes {missing[0]}")
    labels = [fields[name] for name in LABEL_NAMES if name in fields]
    return {name: fields[name] for name in names} | ({LABELS_NAME: labels[0]} if labels else {})


def wanted_names(spec: ModelSpec) -> tuple[str, ...] | None:
    """Return the inputs of a model by name, in its order; None where it takes them by position."""
    names = tuple(name for name in unit_source(spec).batch().names if name is not None)
    return names or None
