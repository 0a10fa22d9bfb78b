"""The loss at the end of an unedited model: summed over samples, so that any cut of a batch gives the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from spantrain.errors import ConfigError
from spantrain.models.units import IGNORED_LABEL, sample_losses


class Loss(Protocol):
    """Makes the loss sum of what a model returned."""

    def __call__(self, result: Any, labels: Tensor | None, samples: int) -> Tensor:
        """Return a scalar, summed over samples."""


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of logits, each sample's mean over its counted labels."""

    def __call__(self, result: Tensor, labels: Tensor | None, samples: int) -> Tensor:  # noqa: ARG002
        """Return the loss of logits `(samples, ..., classes)` and labels `(samples, ...)`."""
        assert labels is not None
        return sample_losses(result, labels).sum()


class _Counts:
    """How many labels of a sample are counted: a mean over all of a batch is one over samples if all have as many."""

    def __init__(self) -> None:
        self._first: dict[torch.Size, int] = {}

    def check(self, labels: Tensor | None) -> None:
        """Compare with all labels of this shape so far.

        Raises:
            ConfigError: a sample has another number of counted labels.
        """
        if labels is None or labels.is_floating_point() or labels.is_meta:
            return
        counts = (labels != IGNORED_LABEL).reshape(labels.shape[0], -1).sum(dim=1)
        first = self._first.setdefault(labels.shape[1:], int(counts[0]))
        other = counts[counts != first]
        if len(other) > 0:
            raise ConfigError(
                f"samples count {first} and {int(other[0])} labels (those of {IGNORED_LABEL} are not counted), so the "
                "mean over a batch would depend on how it is cut: have the factory return a loss function too, that "
                "gives each sample's mean: (module, example_batch, loss)"
            )


@dataclass(frozen=True)
class OwnLoss:
    """What the model computed itself, a mean over samples."""

    counts: _Counts = field(default_factory=_Counts, compare=False)

    def __call__(self, result: Tensor, labels: Tensor | None, samples: int) -> Tensor:
        """Return the mean times the samples."""
        if result.dim() > 0:
            return _summed(result, samples)
        self.counts.check(labels)
        return result * samples


@dataclass(frozen=True)
class FunctionLoss:
    """A user's function of the model's outputs and the labels."""

    function: Callable[[Any, Tensor | None], Tensor]
    counts: _Counts = field(default_factory=_Counts, compare=False)

    def __call__(self, result: Any, labels: Tensor | None, samples: int) -> Tensor:
        """Return what the function returns for each sample, summed; or a scalar mean, times the samples."""
        loss = self.function(result, labels)
        if not isinstance(loss, Tensor):
            raise ConfigError(f"the loss function returned a {type(loss).__name__}; wanted a tensor")
        if loss.dim() > 0:
            return _summed(loss, samples)
        self.counts.check(labels)
        return loss * samples


def _summed(loss: Tensor, samples: int) -> Tensor:
    if loss.shape != torch.Size([samples]):
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)} for {samples} samples; wanted one number for each sample, or a "
            "scalar that is their mean"
        )
    return loss.sum()
