"""Checks by numbers that a user's model was followed rightly, and that its samples do not depend on each other."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.tracing.batch import Batch
from spantrain.models.tracing.difference import called_on, calls_of
from spantrain.models.tracing.factory import what_was_raised
from spantrain.models.tracing.plain import uncompiled
from spantrain.models.tracing.source import Loaded, picked
from spantrain.models.units import UnitModule

_SAMPLES = 4
"""Unlike the numbers that forwards are written down for."""
_TOLERANCE = 1e-3
"""Relative; rounding is far below, and what mixes samples far above."""
_ROUNDING = 1e-6
"""Of one and the same sum, done twice."""


def check_units(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded) -> None:
    """Compare losses of the example batch: the unsplit model's, the units', and the units' of one sample at a time.

    Raises:
        ConfigError: they differ: the model cannot be trained exactly in parts.
    """
    batch = loaded.batch.resized(_SAMPLES)
    _check_steady(spec, loaded, batch)
    with torch.no_grad():
        whole = _loss_of_model(spec, loaded, batch)
        together = _loss_of_units(units, batch)
    if not _close(whole, together):
        raise ConfigError(
            f"model {spec.name}: the loss of its parts is {together:.6g} and its own {whole:.6g}: "
            f"{_why_not_followed(loaded.module)}"
        )
    _check_alone(spec, units, loaded, batch, together)


def _check_steady(spec: ModelSpec, loaded: Loaded, batch: Batch) -> None:
    """Refuse a forward that does not do the same every time."""
    with torch.no_grad():
        losses = [_loss_under(seed, spec, loaded, batch) for seed in (0, 1)]
    if _close(*losses, tolerance=_ROUNDING):
        return
    drawn = [call for call in calls_of(loaded.module, lambda: called_on(loaded, batch)) if call.is_random]
    why = "something is kept between calls, which a forward must not do"
    if drawn:
        why = (
            f"it draws random numbers in evaluation mode too, by `{drawn[0].name}` in {drawn[0].module} at "
            f"{drawn[0].where}; draw them in training mode only, or give them as an input"
        )
    raise ConfigError(
        f"model {spec.name}: its forward does not do the same every time, the loss is {losses[0]:.6g} and then "
        f"{losses[1]:.6g}: {why}"
    )


def _loss_under(seed: int, spec: ModelSpec, loaded: Loaded, batch: Batch) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _loss_of_model(spec, loaded, batch)


def _why_not_followed(model: nn.Module) -> str:
    hooked = [
        f"{path or 'the model'} ({type(part).__name__})"
        for path, part in model.named_modules()
        if part._forward_hooks or part._forward_pre_hooks
    ]
    if hooked:
        return f"its forward could not be followed through the hooks of {hooked[0]}; do in forward what they do"
    return "its forward could not be followed rightly; please report this, with the model"


def _check_alone(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded, batch: Batch, together: float) -> None:
    def told(found: str) -> str:
        return (
            f"model {spec.name}: the loss of {_SAMPLES} samples together is {together:.6g}, and one by one {found}: "
            f"they depend on each other ({_how(loaded, batch)}), so gradients would depend on how a batch is cut; "
            "return one loss for each sample, or their mean"
        )

    try:
        with torch.no_grad():
            apart = sum(_loss_of_units(units, _row(batch, index)) for index in range(_SAMPLES))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(told(f"there is none ({what_was_raised(error)})")) from error
    if not _close(together, apart):
        raise ConfigError(told(f"{apart:.6g}"))


def _how(loaded: Loaded, batch: Batch) -> str:
    """Return how samples come to depend on each other, as far as that can be seen."""
    for call in calls_of(loaded.module, lambda: called_on(loaded, batch)):
        if call.name == "batch_norm" and call.own_statistics:
            return f"{call.module} has no running statistics, and takes those of the batch"
    return "a loss over pairs, statistics of the batch"


def _loss_of_model(spec: ModelSpec, loaded: Loaded, batch: Batch) -> float:
    with uncompiled():
        result = picked(loaded.loss, called_on(loaded, batch), f"model {spec.name}")
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


def _close(one: float, other: float, *, tolerance: float = _TOLERANCE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)
