"""The loss at the end of an unedited model: summed over samples, so that any cut of a batch gives the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spantrain.errors import ConfigError
from spantrain.models.units import sample_losses

__all__ = ["FunctionLoss", "LabelLoss", "Loss", "OwnLoss"]


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


@dataclass(frozen=True)
class OwnLoss:
    """What the model computed itself, a mean over samples."""

    def __call__(self, result: Tensor, labels: Tensor | None, samples: int) -> Tensor:  # noqa: ARG002
        """Return the mean times the samples."""
        return result * samples if result.dim() == 0 else _summed(result, samples)


@dataclass(frozen=True)
class FunctionLoss:
    """A user's function of the model's outputs and the labels."""

    function: Callable[[Any, Tensor | None], Tensor]

    def __call__(self, result: Any, labels: Tensor | None, samples: int) -> Tensor:
        """Return what the function returns for each sample, summed; or a scalar mean, times the samples."""
        loss = self.function(result, labels)
        if not isinstance(loss, Tensor):
            raise ConfigError(f"the loss function returned a {type(loss).__name__}; wanted a tensor")
        return loss * samples if loss.dim() == 0 else _summed(loss, samples)


def _summed(loss: Tensor, samples: int) -> Tensor:
    if loss.shape != torch.Size([samples]):
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)} for {samples} samples; wanted one number for each sample, or a "
            "scalar that is their mean"
        )
    return loss.sum()
