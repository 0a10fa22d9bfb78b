"""The model as a chain of units, the tensors that cross each cut, and the parameters that units share."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ModelSpec", "TensorSpec", "Unit", "UnitGraph"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, at which size, on which data: enough to build it anywhere, with the same weights."""

    name: str
    """What the user asked for, e.g. `gpt2-tiny`."""
    family: str
    """`gpt2`, `bert`, `resnet` or `efficientnet`."""
    config: Mapping[str, int | float | str | tuple[int, ...]]
    """Fields of the transformers configuration that differ from its defaults."""
    dataset: str
    """`stdlib-text`, `digits` or `text:PATH`."""
    sequence_length: int | None = None
    """Tokens per sample; None for image models."""
    objective: str = "next-byte"
    """`next-byte`, `masked-byte` or `classify`."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor that crosses a cut; its first dimension is the samples."""

    name: str
    shape_per_sample: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, `int64`, ..."""
    bytes_per_sample: int
    requires_grad: bool = True


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece of the model that can be placed."""

    name: str
    """Prefix of its parameters' names in the unsplit model, e.g. `transformer.h.3`."""
    unit_class: str
    """Units with equal classes cost the same; measured once."""
    parameter_bytes: int
    forward_flop_per_sample: float
    outputs: tuple[TensorSpec, ...]
    """Every tensor alive at the cut behind this unit; the last unit's loss is not listed."""
    activation_bytes_per_sample: int
    """Held from F to W for one sample, cut tensors included."""
    shared: tuple[str, ...] = ()
    """Groups of shared parameters with a member in this unit, e.g. `wte`."""

    @property
    def cut_bytes_per_sample(self) -> int:
        """Bytes that cross the cut behind this unit for one sample, forward."""
        return sum(tensor.bytes_per_sample for tensor in self.outputs)

    @property
    def gradient_bytes_per_sample(self) -> int:
        """Bytes that cross the cut behind this unit for one sample, backward."""
        return sum(tensor.bytes_per_sample for tensor in self.outputs if tensor.requires_grad)


@dataclass(frozen=True, kw_only=True)
class UnitGraph:
    """Units in topological order."""

    units: tuple[Unit, ...]
    shared_bytes: Mapping[str, int]
    """Bytes of each group of shared parameters."""

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError("a model needs at least one unit")
        unknown = {name for unit in self.units for name in unit.shared} - set(self.shared_bytes)
        if unknown:
            raise ValueError(f"shared parameters without a size: {sorted(unknown)}")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once."""
        doubled = sum(
            (sum(name in unit.shared for unit in self.units) - 1) * size for name, size in self.shared_bytes.items()
        )
        return sum(unit.parameter_bytes for unit in self.units) - doubled
