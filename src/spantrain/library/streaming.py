"""Deals the samples of data in this process to steps: in an order of each epoch's own, or as a stream gives them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import IterableDataset

from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.library.evaluation import TrainerParts, rows_of
from spantrain.models.data.dataset import Dataset
from spantrain.models.sampler import Sampler

Batch = tuple[Sequence[Tensor], Tensor]


class Dealer(Protocol):
    """Gives each step its batch, in order."""

    size: int | None
    """Samples of the data; None of a stream."""

    def begin(self, *, global_batch: int, seed: int, first_step: int, samples_before: int) -> None:
        """Go to a step, before which so many samples were dealt, whatever plans they were dealt under."""

    def batch(self, step: int) -> Batch:
        """Return a step's inputs and labels."""


class Shuffled:
    """A data set's samples, each once an epoch, as workers that read it themselves would have them."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows
        self.size: int | None = len(rows)

    def begin(self, *, global_batch: int, seed: int, first_step: int, samples_before: int) -> None:
        """Go to a step."""
        self._whole = Span(0, global_batch)
        self._sampler = Sampler(
            dataset_size=len(self._rows),
            global_batch=global_batch,
            seed=seed,
            first_step=first_step,
            samples_before=samples_before,
        )

    def batch(self, step: int) -> Batch:
        """Return a step's inputs and labels."""
        indices = self._sampler.indices(step, self._whole)
        return self._rows.inputs(indices), self._rows.labels(indices)


class Streamed:
    """What an iterable gives, in its order; at its end it begins again, with the next epoch if it knows epochs.

    A run that goes on skips what was dealt before: by the stream's own `skip` where it has one, else by reading.
    """

    def __init__(self, source: Any, spec: ModelSpec, parts: TrainerParts) -> None:
        self._source, self._spec, self._parts = source, spec, parts
        self.size: int | None = None

    def begin(self, *, global_batch: int, seed: int, first_step: int, samples_before: int) -> None:
        """Go to a step."""
        del seed, first_step
        self._count = global_batch
        self._samples = self._from(samples_before)

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
        rows = rows_of(samples, self._spec, self._parts, trains=True)
        return rows.inputs(range(self._count)), rows.labels(range(self._count))

    def _from(self, left: int) -> Iterator[Any]:
        """Yield all samples behind the first so many; end only where the source cannot begin again."""
        epoch, given = 0, True
        while given:
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(epoch)
            epoch, given = epoch + 1, False
            if left and hasattr(self._source, "skip"):
                for sample in self._source.skip(left):
                    given = True
                    yield sample
            if given:
                left = 0
                continue
            # Nothing to skip, or the epoch has no more samples than that.
            for sample in self._source:
                given = True
                if left:
                    left -= 1
                else:
                    yield sample


def is_stream(data: object) -> bool:
    """Whether data are samples one after the other, with no numbers to ask for them by."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not callable(data)


def is_data_set(data: object) -> bool:
    """Whether data are samples by their number."""
    return hasattr(data, "__getitem__") and not isinstance(data, str)
