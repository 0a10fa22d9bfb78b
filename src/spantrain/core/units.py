"""The model as a chain of units, the tensors that cross each cut, and the parameters that units share."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["ModelSpec", "TensorSpec", "Unit", "UnitGraph"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, at which size, on which data: enough to build it anywhere, with the same weights."""

    name: str
    """What the user asked for, e.g. `gpt2-tiny`."""
    family: str
    """`gpt2`, `bert`, `resnet` or `efficientnet`; `hf` (transformers configuration), `factory` (a user's function)."""
    config: Mapping[str, int | float | str | tuple[int, ...]]
    """Fields of the transformers configuration that differ from its defaults."""
    dataset: str
    """`stdlib-text`, `digits` or `text:PATH`."""
    sequence_length: int | None = None
    """Tokens per sample; None for image models."""
    objective: str = "next-byte"
    """`next-byte`, `masked-byte` or `classify`; of a factory's model: its own."""
    source: str = ""
    """`FILE.py:FUNCTION` or `package.module:function` of a factory; folder of a transformers configuration."""
    source_sha256: str = ""
    """Of the factory's file or the configuration: workers build from the same or refuse."""
    tokenizer: str = ""
    """Folder or file of a tokenizer; empty: bytes."""


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
    """Held from F to I (or B) for one sample, the tensors of both cuts included."""
    shared: tuple[str, ...] = ()
    """Groups of shared parameters with a member in this unit, e.g. `wte`."""
    tensor_sums: int = 0
    """Sums of its output over a tensor-parallel group in a forward pass, and as many of its input's gradient in a
    backward pass (Shoeybi et al., Megatron-LM, 2019: two in a transformer block); 0: it cannot be divided, every
    member of the group computes the whole."""
    deferred_bytes_per_sample: int | None = None
    """Held from I to W for one sample: the graph, and gradients inside the unit that W starts from. None: taken to be
    what is held before."""

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
    input_bytes_per_sample: int = 0
    """Of what enters the first unit."""

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError("a model needs at least one unit")
        unknown = {name for unit in self.units for name in unit.shared} - set(self.shared_bytes)
        if unknown:
            raise ValueError(f"shared parameters without a size: {sorted(unknown)}")

    def held_parameter_bytes(self, units: range, tp_share: float = 1.0) -> tuple[int, ...]:
        """Return the bytes of parameters of each of consecutive units; those that they share count at the first one.

        Of a unit that can be divided, a member of a tensor-parallel group holds its `tp_share`.
        """
        seen: set[str] = set()
        found = []
        for unit in (self.units[index] for index in units):
            size = unit.parameter_bytes - sum(self.shared_bytes[name] for name in unit.shared if name in seen)
            seen.update(unit.shared)
            found.append(round(size * tp_share) if unit.tensor_sums else size)
        return tuple(found)

    def held_activation_bytes(self, unit: int, tp_share: float = 1.0) -> int:
        """Return the bytes that one sample in flight holds of a unit.

        Of a unit that can be divided, a member of a tensor-parallel group holds whole its input, and for each sum the
        result and what the divided layers read (of the input's size: as a rule a normalization's result). Of the rest
        it holds its `tp_share` (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        2022, section 4.2: the five of a transformer block without sequence parallelism and dropout).
        """
        own = self.units[unit]
        size = own.activation_bytes_per_sample
        if tp_share == 1.0 or not own.tensor_sums:
            return size
        entering_bytes = self.entering_bytes(unit)
        whole = min(size, entering_bytes + own.tensor_sums * (entering_bytes + own.cut_bytes_per_sample))
        return whole + math.ceil(tp_share * (size - whole))

    def stage_held_bytes(self, units: range, tp_share: float = 1.0, recompute: Collection[int] = ()) -> int:
        """Return the bytes that one sample holds of consecutive units from F to I (or B), each tensor once.

        A cut between two of them belongs to both. Of a recomputed unit only what enters it is held; its output is what
        enters the next one.
        """
        own = {unit: self.held_activation_bytes(unit, tp_share) for unit in units}
        own |= {unit: min(own[unit], self.entering_bytes(unit)) for unit in recompute}
        twice = (
            min(self.units[unit].cut_bytes_per_sample, own[unit], own[unit + 1])
            for unit in units[:-1]
            if unit not in recompute
        )
        return sum(own.values()) - sum(twice)

    def stage_deferred_bytes(self, units: range, tp_share: float = 1.0, recompute: Collection[int] = ()) -> int:
        """Return the bytes that one sample holds of consecutive units from I to W; recomputed ones are done by then."""
        left = [unit for unit in units if unit not in recompute]
        if any(self.units[unit].deferred_bytes_per_sample is None for unit in left):
            whole = self.stage_held_bytes(units, tp_share)
            return whole - sum(self._again_bytes(unit, tp_share) for unit in recompute) if recompute else whole
        return sum(self._deferred_bytes(unit, tp_share) for unit in left)

    def stage_again_bytes(
        self, units: range, tp_share: float = 1.0, recompute: Collection[int] = (), *, splits: bool = True
    ) -> int:
        """Return the bytes that one sample holds besides while its recomputed units are run again, one after the other.

        When a unit's turn comes, those behind it have gone back: they hold nothing more, or, if the backward pass is
        split into I and W, what W needs.

        Raises:
            ValueError: a recomputed unit is none of these.
        """
        if not recompute:
            return 0
        if any(unit not in units for unit in recompute):
            raise ValueError(f"recomputed units {sorted(recompute)} are not all in {units}")
        whole, most = self.stage_held_bytes(units, tp_share, recompute), 0
        for unit in recompute:
            before, behind = range(units.start, unit + 1), range(unit + 1, units.stop)
            left = [other for other in recompute if other <= unit], [other for other in recompute if other > unit]
            held = self.stage_held_bytes(before, tp_share, left[0]) + self._again_bytes(unit, tp_share)
            deferred = self.stage_deferred_bytes(behind, tp_share, left[1]) if splits and behind else 0
            most = max(most, held + deferred - whole)
        return most

    def entering_bytes(self, unit: int) -> int:
        """Return the bytes that enter a unit for one sample."""
        return self.units[unit - 1].cut_bytes_per_sample if unit else self.input_bytes_per_sample

    def _again_bytes(self, unit: int, tp_share: float) -> int:
        return max(0, self.held_activation_bytes(unit, tp_share) - self.entering_bytes(unit))

    def _deferred_bytes(self, unit: int, tp_share: float) -> int:
        """Return what is held of one unit from I to W; of a divided one, in proportion to what is held before."""
        own = self.units[unit]
        size = own.deferred_bytes_per_sample or 0
        if tp_share == 1.0 or not own.tensor_sums or not own.activation_bytes_per_sample:
            return size
        return math.ceil(size * self.held_activation_bytes(unit, tp_share) / own.activation_bytes_per_sample)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once."""
        doubled = sum(
            (sum(name in unit.shared for unit in self.units) - 1) * size for name, size in self.shared_bytes.items()
        )
        return sum(unit.parameter_bytes for unit in self.units) - doubled
