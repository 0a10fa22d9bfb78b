"""Deals the samples of data in this process to steps: in an order of each epoch's own, or as a stream gives them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from spantrain.app.training.resume import Resume
from spantrain.config.files.text_files import write_atomically
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.library.evaluation import TrainerParts, rows_of
from spantrain.models.data.dataset import Dataset
from spantrain.models.sampler import Sampler
from spantrain.models.tracing.factory import what_was_raised

_POSITION = "stream.json"
Batch = tuple[Sequence[Tensor], Tensor]


class Shuffled:
    """A data set's samples, each once an epoch, as workers that read it themselves would have them."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows
        self.size = len(rows)
        """Samples of the data."""

    def begin(self, global_batch: int, seed: int, resume: Resume | None) -> None:
        """Go to the first step, or behind all that an earlier run was dealt, under whatever plans."""
        self._whole = Span(0, global_batch)
        self._sampler = Sampler(
            dataset_size=len(self._rows),
            global_batch=global_batch,
            seed=seed,
            first_step=resume.content.step if resume else 0,
            samples_before=resume.samples if resume else 0,
        )

    def batch(self, step: int) -> Batch:
        """Return a step's inputs and labels."""
        indices = self._sampler.indices(step, self._whole)
        return self._rows.inputs(indices), self._rows.labels(indices)

    def saved(self, checkpoint: Path) -> None:
        """Leave nothing: the order is that of the seed."""


class StreamPosition(Record):
    """Where a stream was when a checkpoint was written; beside it, as JSON."""

    samples: int
    """Dealt so far."""
    epoch: int
    state: Any
    """What the stream's own `state_dict` said."""

    @classmethod
    def beside(cls, checkpoint: Path, samples: int) -> "StreamPosition | None":
        """Return the position behind so many samples; None where it was not kept."""
        try:
            found = cls(**json.loads((checkpoint / _POSITION).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.samples == samples and type(found.epoch) is int else None


class Streamed:
    """What an iterable gives, in its order; at its end it begins again, with the next epoch if it knows epochs.

    A run that goes on takes up the position that a stream with `state_dict` and `load_state_dict` had; else it skips
    what was dealt before: by the stream's own `skip` where it has one, or by reading.
    """

    def __init__(self, source: Any, spec: ModelSpec, parts: TrainerParts) -> None:
        self._source, self._spec, self._parts = source, spec, parts
        self.size = None
        """Nobody knows it of a stream."""

    def begin(self, global_batch: int, seed: int, resume: Resume | None) -> None:
        """Go to the first step, or behind all that an earlier run was dealt, under whatever plans."""
        del seed
        self._count, self._dealt = global_batch, resume.samples if resume else 0
        position = StreamPosition.beside(resume.folder, self._dealt) if resume and self._has_state else None
        self._samples = self._from(self._dealt, position)

    def batch(self, step: int) -> Batch:
        """Return the next samples; steps are asked for one after the other.

        Raises:
            ConfigError: the stream has ended, and cannot begin again.
        """
        samples = list(islice(self._samples, self._count))
        if len(samples) < self._count:
            raise ConfigError(
                f"data: the stream has no samples for step {step + 1}: it has ended, and cannot begin again; give one "
                "that can (an IterableDataset, an object with `__iter__`), or a smaller max_steps"
            )
        self._dealt += self._count
        rows = rows_of(samples, self._spec, self._parts, trains=True)
        return rows.inputs(range(self._count)), rows.labels(range(self._count))

    def saved(self, checkpoint: Path) -> None:
        """Keep the stream's position beside a checkpoint, where it has one that JSON holds."""
        if not self._has_state or self._skips:
            return
        position = StreamPosition(samples=self._dealt, epoch=self._epoch, state=self._source.state_dict())
        with suppress(TypeError, ValueError):
            text = json.dumps(vars(position))
            if json.loads(text) == vars(position):
                write_atomically(checkpoint / _POSITION, text)

    def _go_to(self, position: StreamPosition) -> None:
        try:
            self._source.load_state_dict(position.state)
        except Exception as error:
            raise ConfigError(
                f"data: the stream's load_state_dict raised {what_was_raised(error)}; give the stream that the run was "
                f"trained on, or remove {_POSITION} from its checkpoint: then samples are skipped"
            ) from error

    @property
    def _has_state(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _from(self, left: int, position: StreamPosition | None = None) -> Iterator[Any]:
        """Yield all samples behind the first so many; end only where the source cannot begin again."""
        epoch, given = position.epoch if position else 0, True
        while given:
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(epoch)
            self._epoch, epoch, given, self._skips = epoch, epoch + 1, position is not None, False
            if position is not None:
                self._go_to(position)
                left, position = 0, None
            if left and hasattr(self._source, "skip"):
                for sample in self._source.skip(left):
                    given = self._skips = True
                    yield sample
            if self._skips:
                left = 0
                continue
            # Nothing to skip, or the epoch has no more samples than that.
            for sample in self._source:
                given = True
                if left:
                    left -= 1
                else:
                    yield sample


Dealer = Shuffled | Streamed
"""What gives each step its batch, in order."""


def rows_here(data: Any) -> Any:
    """Return data if it is a data set or a stream in this process; else None.

    Raises:
        ConfigError: it gives batches.
    """
    if isinstance(data, DataLoader) and data.batch_size is not None:
        raise ConfigError(
            "data: a DataLoader gives batches, and samples are dealt to steps here: give the data set in it "
            "(loader.dataset), train_batch_size, and its collate_fn as data_collator"
        )
    return data if is_stream(data) or (hasattr(data, "__getitem__") and not isinstance(data, str)) else None


def is_stream(data: object) -> bool:
    """Whether data are samples one after the other, with no numbers to ask for them by."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not callable(data)
