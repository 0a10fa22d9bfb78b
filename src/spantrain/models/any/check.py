"""Checks by numbers that a user's model was followed rightly, and that its samples do not depend on each other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.any.batch import Batch
from spantrain.models.any.factory import what_was_raised
from spantrain.models.any.losses import OwnLoss
from spantrain.models.any.source import Loaded, load_model, picked
from spantrain.models.units import UnitModule

__all__ = ["check_units"]

_SAMPLES = 4
"""Unlike the numbers that forwards are written down for."""
_TOLERANCE = 1e-3
"""Relative; rounding is far below, and what mixes samples far above."""


def check_units(spec: ModelSpec, units: Sequence[UnitModule], *, seed: int) -> None:
    """Compare losses of the example batch: the unsplit model's, the units', and the units' of one sample at a time.

    Raises:
        ConfigError: they differ: the model cannot be trained exactly in parts.
    """
    loaded = load_model(spec, seed=seed)
    batch = loaded.batch.resized(_SAMPLES)
    with torch.no_grad():
        whole = _loss_of_model(spec, loaded, batch)
        together = _loss_of_units(units, batch)
        apart = sum(_loss_of_units(units, _row(batch, index)) for index in range(_SAMPLES))
    if not _close(whole, together):
        raise ConfigError(
            f"model {spec.name}: the loss of its parts is {together:.6g} and its own {whole:.6g}: its forward does "
            "not do the same every time (random numbers, state kept between calls), or could not be followed rightly"
        )
    if not _close(together, apart):
        raise ConfigError(
            f"model {spec.name}: the loss of {_SAMPLES} samples together is {together:.6g}, and one by one "
            f"{apart:.6g}: they depend on each other (a loss over pairs, statistics of the batch), so gradients would "
            "depend on how a batch is cut; return one loss for each sample, or their mean"
        )


def _loss_of_model(spec: ModelSpec, loaded: Loaded, batch: Batch) -> float:
    named = {name: tensor for name, tensor in zip(batch.names, batch.inputs, strict=True) if name is not None}
    plain = [tensor for name, tensor in zip(batch.names, batch.inputs, strict=True) if name is None]
    if isinstance(loaded.loss, OwnLoss) and batch.has_labels and batch.labels is not None:
        if batch.labels_name is None:
            plain.append(batch.labels)
        else:
            named[batch.labels_name] = batch.labels
    result = picked(loaded.loss, loaded.module(*plain, **named), f"model {spec.name}")
    try:
        return float(loaded.loss(result, batch.labels, batch.samples))
    except ConfigError as error:
        raise ConfigError(f"model {spec.name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"model {spec.name}: the loss function raised {what_was_raised(error)}") from error


def _loss_of_units(units: Sequence[UnitModule], batch: Batch) -> float:
    tensors: tuple[Tensor, ...] = batch.inputs
    for unit in units[:-1]:
        tensors = unit(*tensors)
    labels = torch.zeros(batch.samples) if batch.labels is None else batch.labels
    return float(units[-1](*tensors, labels))


def _row(batch: Batch, index: int) -> Batch:
    return Batch(
        inputs=tuple(tensor[index : index + 1] for tensor in batch.inputs),
        names=batch.names,
        labels=None if batch.labels is None else batch.labels[index : index + 1],
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-6)
