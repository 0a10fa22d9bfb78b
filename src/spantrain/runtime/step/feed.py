"""Reads samples by step and span from a data set, where they are needed."""

import torch

from spantrain.core.span import Span
from spantrain.models.data.dataset import Dataset
from spantrain.models.data.sampler import Sampler


class SampledFeed:
    """The samples that a deterministic sampler chooses for each step."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        seed: int,
        same_every_step: bool = False,
        first_step: int = 0,
        samples_before: int | None = None,
    ) -> None:
        """Read a data set as a sampler deals it; the last two arguments are the sampler's.

        Args:
            dataset: what is read.
            global_batch: samples of a step.
            seed: of the sampler.
            same_every_step: deal the first step's samples in every step.
            first_step: from which step on steps have this size.
            samples_before: samples dealt before that step.
        """
        self._dataset = dataset
        self._sampler = Sampler(
            dataset_size=len(dataset),
            global_batch=global_batch,
            seed=seed,
            first_step=0 if same_every_step else first_step,
            samples_before=0 if same_every_step else samples_before,
        )
        self._same_every_step = same_every_step

    @property
    def digest(self) -> str:
        """SHA-256 of the whole data set, the same wherever the same data is read."""
        return self._dataset.digest

    def inputs(self, step: int, span: Span) -> tuple[torch.Tensor, ...]:
        """Return what the first stage takes; first dimension: the span's samples."""
        return self._dataset.inputs(self._indices(step, span))

    def labels(self, step: int, span: Span) -> torch.Tensor:
        """Return what the last stage compares with; first dimension: the span's samples."""
        return self._dataset.labels(self._indices(step, span))

    def _indices(self, step: int, span: Span) -> list[int]:
        return self._sampler.indices(0 if self._same_every_step else step, span)
