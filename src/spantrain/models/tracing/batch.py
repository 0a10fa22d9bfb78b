"""Example batches: what goes into a model, and which of it is the labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spantrain.errors import ConfigError

LABELS = "labels"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch, divided as the stages read it: inputs at the first one, labels at the last one."""

    inputs: tuple[Tensor, ...]
    names: tuple[str | None, ...]
    """The keyword under which the model takes each input; None: by position."""
    labels: Tensor | None
    labels_name: str | None = None
    """The keyword of the labels."""
    has_labels: bool = False
    """Whether labels are a part of the batch; otherwise the model predicts its own input."""

    @property
    def samples(self) -> int:
        """In the batch."""
        return self.inputs[0].shape[0]

    def resized(self, samples: int) -> "Batch":
        """Return a batch of so many samples: the first ones, over and over."""
        rows = torch.arange(samples) % self.samples
        return Batch(
            inputs=tuple(tensor[rows.to(tensor.device)] for tensor in self.inputs),
            names=self.names,
            labels=None if self.labels is None else self.labels[rows.to(self.labels.device)],
            labels_name=self.labels_name,
            has_labels=self.has_labels,
        )


def split_batch(batch: Any, *, source: str) -> Batch:
    """Divide a batch into inputs and labels.

    A dictionary's entries are the model's keyword arguments, its `labels` are the labels. Of a tuple with two tensors
    or more the last one is the labels. A tensor alone is both (a model that predicts its own input).

    Raises:
        ConfigError: it is something else, has no tensors, or tensors with unequal numbers of samples.
    """
    if isinstance(batch, Tensor):
        found = Batch(inputs=(batch,), names=(None,), labels=batch)
    elif isinstance(batch, Mapping):
        names = tuple(name for name in batch if name != LABELS)
        found = Batch(
            inputs=tuple(batch[name] for name in names),
            names=names,
            labels=batch.get(LABELS),
            labels_name=LABELS,
            has_labels=LABELS in batch,
        )
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        inputs = tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
        labels = batch[-1] if len(batch) > 0 else None
        found = Batch(inputs=inputs, names=(None,) * len(inputs), labels=labels, has_labels=len(batch) > 1)
    else:
        raise ConfigError(f"{source}: the batch is a {type(batch).__name__}; wanted a tensor, tuple or dict of tensors")
    _check(found, source)
    return found


def _check(batch: Batch, source: str) -> None:
    tensors = [*batch.inputs, *(() if batch.labels is None else (batch.labels,))]
    if not batch.inputs or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors) or "nothing"
        raise ConfigError(f"{source}: the batch holds {kinds}; wanted tensors only, at least one besides the labels")
    counts = {tuple(tensor.shape[:1]) for tensor in tensors}
    if len(counts) > 1 or counts == {()} or (0,) in counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"{source}: tensors of the batch have shapes {shapes}; the first dimension is the samples")
