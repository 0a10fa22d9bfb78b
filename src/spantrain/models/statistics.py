"""Running statistics of normalizations: buffers that training changes, as state beside the parameters."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from spantrain.core.shares import TensorPart
from spantrain.models.units import UnitModule, full_name

_CHANNELS = "_own_channels"


def named_statistics(units: Iterable[UnitModule]) -> dict[str, Tensor]:
    """Return the running statistics by their names in the unsplit model; those of a module in two units once."""
    found = {id(tensor): (name, tensor) for name, tensor in reversed(list(_all(units)))}
    return dict(reversed(found.values()))


def _all(units: Iterable[UnitModule]) -> Iterator[tuple[str, Tensor]]:
    for unit in units:
        for path, module in norms_of(unit):
            for name, tensor in module.named_buffers(recurse=False):
                yield full_name(unit, f"{path}.{name}"), tensor


def statistics_parts(units: Iterable[UnitModule]) -> dict[str, TensorPart]:
    """Return by name which part of each running statistic units hold that were divided (`keep_channels`)."""
    found: dict[str, TensorPart] = {}
    for unit in units:
        for path, module in norms_of(unit):
            for name, tensor in module.named_buffers(recurse=False):
                part = getattr(module, _CHANNELS, None) if tensor.dim() else None
                found[full_name(unit, f"{path}.{name}")] = part or TensorPart(full_shape=tuple(tensor.shape))
    return found


def keep_channels(module: _NormBase, part: TensorPart, held: int) -> None:
    """Note that a normalization's statistics are a part of the unsplit model's, of so many channels."""
    setattr(module, _CHANNELS, part)
    module.num_features = held


def norms_of(unit: UnitModule) -> Iterator[tuple[str, _NormBase]]:
    """Yield the normalizations that keep running statistics, with their paths in the unit."""
    for path, module in unit.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None:
            yield path, module
