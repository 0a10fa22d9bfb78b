"""Builds a model's units, any of them with the weights that it has among all others, and the unsplit model."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog_units import CatalogUnits
from spantrain.models.execution.segment import CODE
from spantrain.models.statistics import named_statistics
from spantrain.models.units import Rows, UnitModule, parameter_names

if TYPE_CHECKING:
    from spantrain.models.tracing.model import TracedUnits


_LOGGER = logging.getLogger(__name__)
_tell_once = cache(_LOGGER.warning)


class UnsplitModel(Record):
    """A model in one piece, with an example of what goes in."""

    module: nn.Module
    inputs: Mapping[str, torch.Tensor]
    """By the keyword of the module's forward; empty where inputs have no keywords."""


class UnsplitParameter(Record):
    """One parameter of the unsplit model."""

    shape: tuple[int, ...]
    is_complex: bool
    other_names: tuple[str, ...] = field(default=())
    """Names in later units, where several share it."""


def unit_source(spec: ModelSpec) -> "CatalogUnits | TracedUnits":
    """Return where the units of a model come from: the catalog, or any model that is followed.

    Raises:
        ConfigError: there is no such family.
    """
    if spec.is_brought:
        from spantrain.models.tracing.model import TracedUnits

        return TracedUnits(spec)
    return CatalogUnits(spec)


def unit_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's units in order; an unedited model is followed for it, once for each process.

    Raises:
        ConfigError: no such family, or the model cannot be built or followed.
    """
    return unit_source(spec).names


def unit_count(spec: ModelSpec) -> int:
    """Return the number of units of a model (without building any)."""
    return len(unit_names(spec))


def build_units(spec: ModelSpec, indices: Iterable[int] | None = None, *, seed: int) -> list[UnitModule]:
    """Build the units with these indices (all by default), in float32 on the CPU.

    The weights are the same whichever units are built. Parameters shared among the units asked for are one object. The
    global random state is left as it was.

    Raises:
        ValueError: an index is out of range.
        ConfigError: an unedited model cannot be built or followed.
    """
    return _compiled(spec, unit_source(spec).build(_checked(spec, indices), seed=seed))


def blank_units(spec: ModelSpec, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
    """Build units for a device that takes them over from others: parameters may hold anything.

    What is no parameter (masks, frozen statistics) is as ever. Errors are those of `build_units`.
    """
    return _compiled(spec, unit_source(spec).blank(_checked(spec, indices), seed=seed))


def compiled_by(spec: ModelSpec, compiler: str) -> str:
    """Return what compiles the layers of a model, if anything does: not where it draws at random while it trains."""
    if not spec.compiled:
        return ""
    if unit_source(spec).draws:
        why = "it draws at random while it trains (--dropout off: no)"
        _tell_once(f"model {spec.name}: its layers are not compiled: {why}")
        return ""
    return compiler


def _compiled(spec: ModelSpec, units: list[UnitModule]) -> list[UnitModule]:
    by = compiled_by(spec, CODE)
    for unit in units:
        unit.compiled_by = by
    return units


def _checked(spec: ModelSpec, indices: Iterable[int] | None) -> list[int]:
    count = unit_count(spec)
    wanted = list(range(count) if indices is None else indices)
    if any(not 0 <= index < count for index in wanted):
        raise ValueError(f"{spec.name} has units 0 to {count - 1}, got {wanted}")
    return wanted


def empty_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit on the meta device: shapes, no weights."""
    return unit_source(spec).empty(index)


def example_rows(spec: ModelSpec, samples: int, *, device: torch.device | str = "cpu") -> Rows:
    """Return what units may read of samples, with the right shapes and types, for measuring; values mean nothing."""
    return {number: tensor.to(device) for number, tensor in unit_source(spec).batch().resized(samples).rows.items()}


def example_inputs(spec: ModelSpec, samples: int) -> tuple[Tensor, ...]:
    """Return what the model is given beside labels, as `example_rows` does."""
    return unit_source(spec).batch().resized(samples).inputs


def whole_parameters(spec: ModelSpec) -> dict[str, UnsplitParameter]:
    """Return all parameters of a model by name; one that units share has the name that it has in the first of them."""
    found: dict[str, UnsplitParameter] = {}
    first: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for index in range(unit_count(spec)):
        unit = empty_unit(spec, index)
        groups = {local: group for group, local in unit.shared.items()}
        for local, full in parameter_names(unit).items():
            name = first.setdefault(groups[local], full) if local in groups else full
            own = unit.get_parameter(local)
            found.setdefault(name, UnsplitParameter(shape=tuple(own.shape), is_complex=own.is_complex()))
            if name != full:
                others.setdefault(name, []).append(full)
    return {name: replace(one, other_names=tuple(others.get(name, ()))) for name, one in found.items()}


class LibraryNames(Record):
    """What the transformers library says of tensors in a file that it wrote."""

    renamed: Mapping[str, str]
    """Names in its model of those that have another one there."""
    joined: frozenset[str]
    """Those of which several become one parameter, such as a layer's experts."""
    shared: Mapping[str, tuple[str, ...]]
    """By name of a parameter in the model, all that it has there, of those that modules share."""
    model: Any
    """The library's own, without weights."""


def library_names(spec: ModelSpec, stored: Iterable[str]) -> LibraryNames | None:
    """Return what the library says of names in a file; None where the model is not the library's."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None  # before its version 5 no names differed
    modules = unit_source(spec).unsplit(seed=0, weights=False)[0].modules()
    model = next((one for one in modules if isinstance(one, PreTrainedModel)), None)
    if model is None:
        return None
    ways, names = get_model_conversion_mapping(model), dict[int, list[str]]()
    kinds = [[one for one in ways if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)]
    found = {name: rename_source_key(name, *kinds) for name in stored}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return LibraryNames(
        renamed={name: now for name, (now, pattern) in found.items() if pattern is None and now != name},
        joined=frozenset(name for name, (_, pattern) in found.items() if pattern is not None),
        shared={name: tuple(own) for own in names.values() if own[1:] for name in own},
        model=model,
    )


def whole_statistics(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all running statistics of a model by name."""
    units = [empty_unit(spec, index) for index in range(unit_count(spec))]
    return {name: tuple(tensor.shape) for name, tensor in named_statistics(units).items()}


def whole_buffers(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the buffers that a model is made with, by name."""
    return dict(unit_source(spec).unsplit(seed=0, weights=False)[0].named_buffers())


def whole_model(spec: ModelSpec, *, seed: int) -> UnsplitModel:
    """Build the unsplit model in evaluation mode, on the CPU, with weights of its own under a seed.

    Raises:
        ConfigError: an unedited model cannot be built.
    """
    module, batch = unit_source(spec).unsplit(seed=seed)
    named = {name: tensor for name, tensor in zip(batch.names, batch.inputs, strict=True) if name is not None}
    if len(named) != len(batch.inputs):
        return UnsplitModel(module=module, inputs={})
    # Numbers differ from each other, so that an output says something of all weights.
    vocabulary = int(getattr(getattr(module, "config", None), "vocab_size", 2))
    for name, tensor in named.items():
        numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
        if tensor.is_floating_point():
            named[name] = torch.sin(numbers.to(tensor.dtype))
        elif name.endswith("input_ids"):
            named[name] = (numbers % vocabulary).to(tensor.dtype)
    return UnsplitModel(module=module, inputs=named)
