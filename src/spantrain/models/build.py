"""Build units of a model: the same weights, whichever of them are built and wherever."""

from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor, nn

from spantrain.core.units import ModelSpec
from spantrain.models.catalog import catalog
from spantrain.models.catalog.catalog import IMAGE_CHANNELS, IMAGE_SIDE, is_text
from spantrain.models.data.hashing import derive_seed
from spantrain.models.units import UnitModule, tie_parameters

_SHARED_STD = 0.02
"""Standard deviation of tied embeddings: the transformers library's for GPT-2 and BERT."""


def unit_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's units in order; an unedited model is followed for it, once for each process.

    Raises:
        ConfigError: no such family, or the model cannot be built or followed.
    """
    if not is_unedited(spec):
        return catalog.unit_names(spec)
    from spantrain.models.tracing.model import cut_model

    return cut_model(spec).names


def unit_count(spec: ModelSpec) -> int:
    """Return the number of units of a model (without building any)."""
    return len(unit_names(spec))


def is_unedited(spec: ModelSpec) -> bool:
    """Whether the model is of no family of the catalog's, but followed as it is (`models.tracing`)."""
    return spec.family in ("factory", "hf")


def build_units(spec: ModelSpec, indices: Iterable[int] | None = None, *, seed: int) -> list[UnitModule]:
    """Build the units with these indices (all by default), in float32 on the CPU.

    The weights are the same whichever units are built: every unit of the catalog's families, and every group of shared
    parameters, has a seed of its own, derived from `seed`; an unedited model is built whole, by its own rules, and what
    no unit asked for holds is dropped. Parameters shared among the units asked for are one object. The global random
    state is left as it was.

    Raises:
        ValueError: an index is out of range.
        ConfigError: an unedited model cannot be built or followed.
    """
    wanted = list(range(unit_count(spec)) if indices is None else indices)
    if any(not 0 <= index < unit_count(spec) for index in wanted):
        raise ValueError(f"{spec.name} has units 0 to {unit_count(spec) - 1}, got {wanted}")
    if is_unedited(spec):
        from spantrain.models.tracing.model import build_traced

        return list(build_traced(spec, wanted, seed=seed))
    units = [_seeded_unit(spec, index, seed) for index in wanted]
    tie_parameters(units)
    return units


def empty_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit on the meta device: shapes, no weights."""
    if is_unedited(spec):
        from spantrain.models.tracing.model import empty_traced

        return empty_traced(spec, index)
    with torch.device("meta"):
        unit: UnitModule = _family(spec).make_unit(spec, index)
    return unit


def _seeded_unit(spec: ModelSpec, index: int, seed: int) -> UnitModule:
    family = _family(spec)
    with torch.random.fork_rng(devices=[]):
        unit: UnitModule = family.make_unit(spec, index)
        # Seeded after construction, so that what constructors draw has no effect.
        torch.manual_seed(derive_seed(seed, "unit", index))
        family.initialize(spec, unit)
        for group, local in unit.shared.items():
            torch.manual_seed(derive_seed(seed, "shared", group))
            nn.init.normal_(unit.get_parameter(local), std=_SHARED_STD)
    return unit


def _family(spec: ModelSpec) -> ModuleType:
    # Imported here: transformers takes seconds to import, and planning needs none of it.
    match spec.family:
        case "gpt2":
            from spantrain.models.catalog import gpt2

            return gpt2
        case "bert":
            from spantrain.models.catalog import bert

            return bert
        case "resnet":
            from spantrain.models.catalog import resnet

            return resnet
        case _:
            assert spec.family == "efficientnet", f"no family {spec.family}"
            from spantrain.models.catalog import efficientnet

            return efficientnet


def example_inputs(spec: ModelSpec, samples: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Return inputs of the first unit with the right shapes and types, for measuring; their values mean nothing."""
    if is_unedited(spec):
        from spantrain.models.tracing.model import cut_model

        batch = cut_model(spec).batch.resized(samples)
        return tuple(tensor.to(device) for tensor in batch.inputs)
    if is_text(spec):
        assert spec.sequence_length is not None
        return (torch.zeros(samples, spec.sequence_length, dtype=torch.int64, device=device),)
    return (torch.zeros(samples, IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE, device=device),)


def example_labels(spec: ModelSpec, samples: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return labels with the right shape and type, for measuring."""
    if is_unedited(spec):
        from spantrain.models.tracing.model import cut_model

        labels = cut_model(spec).batch.resized(samples).labels
        return torch.zeros(samples, dtype=torch.int64, device=device) if labels is None else labels.to(device)
    shape = (samples, spec.sequence_length) if spec.sequence_length is not None else (samples,)
    return torch.zeros(shape, dtype=torch.int64, device=device)
