"""The model as a chain of units, the tensors that cross each cut, and the parameters that units share."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Annotated

from spantrain.core.records import Bounds, NotNegative, Record, check_bounds
from spantrain.core.shares import ALONE, MemberBytes, MemberShare, TensorPieces, divided_share
from spantrain.formats.registry import WireFormat

MAX_SEQUENCE = 2**24
"""Tokens of a sample."""
TRAIN_ON = ("answers", "all")
"""Which tokens of a conversation count in the loss."""
_MAX_DIMENSIONS = 16
_SIZE = Bounds(low=0, high=2**46)
"""Of all parameters together, or of a sample, in bytes: no model has so many."""
Bytes = Annotated[int, _SIZE]


class ChatForm(Record):
    """How conversations become samples of tokens (`docs/data.md`)."""

    template: str = ""
    """A Jinja file, or the name of a template; empty: the tokenizer's own."""
    train_on: str = "answers"
    """One of `TRAIN_ON`."""
    packing: bool = False
    """Whether a sample holds several conversations, each with positions and attention of its own."""

    def __post_init__(self) -> None:
        if self.train_on not in TRAIN_ON:
            raise ValueError(f"train_on must be one of {', '.join(TRAIN_ON)}, got {self.train_on!r}")


class TensorSpec(Record, where="tensor {0.name}"):
    """One tensor that crosses a cut, or of a batch; its first dimension is the samples."""

    name: str
    shape_per_sample: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, `int64`, ..."""
    bytes_per_sample: Bytes
    requires_grad: bool = True

    def __post_init__(self) -> None:
        check_bounds(self)
        shape = self.shape_per_sample
        if len(shape) > _MAX_DIMENSIONS or min(shape, default=1) < 0:
            raise ValueError(f"tensor {self.name}: has up to {_MAX_DIMENSIONS} dimensions, none negative, got {shape}")

    def wire_bytes(self, wire_format: WireFormat) -> int:
        """Return what one sample of it takes as it is sent."""
        return wire_format.codec.sample_bytes(self.dtype, self.bytes_per_sample, len(self.shape_per_sample))


class ModelSpec(Record):
    """Which model, at which size, on which data: enough to build it anywhere, with the same weights."""

    name: str
    """What the user asked for, e.g. `gpt2-tiny`."""
    family: str
    """`gpt2`, `bert`, `resnet` or `efficientnet`; `hf` (transformers configuration), `factory` (a user's function)."""
    config: Mapping[str, int | float | str | tuple[int, ...]]
    """Fields of the transformers configuration that differ from its defaults."""
    dataset: str
    """`stdlib-text`, `digits`, or `KIND:PATH` (`docs/data.md`)."""
    sequence_length: Annotated[int | None, Bounds(low=1, high=MAX_SEQUENCE)] = None
    """Tokens per sample; None for image models."""
    objective: str = "next-byte"
    """`next-byte`, `masked-byte`, `continue` or `classify`; `own`: what the model, or its factory, makes of labels."""
    source: str = ""
    """`FILE.py:FUNCTION` or `package.module:function` of a factory; folder of a transformers configuration."""
    source_sha256: str = ""
    """Digest of the factory's file or the configuration: workers build from the same or refuse."""
    tokenizer: str = ""
    """Folder or file of a tokenizer; empty: bytes."""
    chat: ChatForm = field(default_factory=ChatForm)
    """Of data that are conversations."""
    compiled: bool = False
    """Whether its layers are compiled (`torch.compile`), which changes what they take and hold, not what they are."""
    rows: tuple[TensorSpec, ...] = ()
    """What a sample of the user's own data has, by the names of the forward of a transformers class; else none."""

    @property
    def is_brought(self) -> bool:
        """Whether it is none of the catalogue's."""
        return self.family in ("hf", "factory")


class WholeMicroBatch(Record):
    """That what a unit makes of a sample depends on the others that it is run on at once."""

    why: str
    """In words."""
    fewest: int = 1
    """Samples at once; of fewer it makes nothing."""


class Unit(Record, where="unit {0.name}"):
    """The smallest piece of the model that can be placed."""

    name: str
    """Prefix of its parameters' names in the unsplit model, e.g. `transformer.h.3`."""
    unit_class: str
    """Units with equal classes cost the same; measured once."""
    parameter_bytes: Bytes
    forward_flop_per_sample: NotNegative
    outputs: tuple[TensorSpec, ...]
    """Every tensor alive at the cut behind this unit; the last unit's loss is not listed."""
    activation_bytes_per_sample: Bytes
    """Held from F to I (or B) for one sample, the tensors of both cuts included."""
    shared: tuple[str, ...] = ()
    """Groups of shared parameters with a member in this unit, e.g. `wte`."""
    tensor_sums: Annotated[int, Bounds(low=0, high=64)] = 0
    """Sums of its output over a tensor-parallel group in a forward pass, and as many of its input's gradient in a
    backward pass (Shoeybi et al., Megatron-LM, 2019: two in a transformer block); 0: it cannot be divided, every
    member of the group computes the whole."""
    deferred_bytes_per_sample: Annotated[int | None, _SIZE] = None
    """Held from I to W for one sample: the graph, and gradients inside the unit that W starts from. None: taken to be
    what is held before."""
    working_bytes_per_sample: Bytes = 0
    """What its operations need besides for each sample of the span at work: tensors that nobody holds when an action is
    over."""
    working_bytes: Bytes = 0
    """What they need however few the samples: a new gradient of weights, before it is added to the one that is held."""
    tensor_pieces: tuple[TensorPieces, ...] = ()
    """What is divided in a unit that can be, by which whole pieces. Empty: taken to be all of it, at any point."""
    member_activation_bytes: MemberBytes | None = None
    """What a member of a group holds for one sample from F to I, measured. None: reckoned
    (`UnitGraph.held_activation_bytes`)."""
    member_deferred_bytes: MemberBytes | None = None
    """The same from I to W. None: in proportion to what is held before."""
    sequence_activation_bytes: MemberBytes | None = None
    """What a member holds from F to I with slices of the sequence between divided layers, measured. None: the unit has
    no transformer block of which all layers are known (`core.plan.Stage.sequence_parallel`)."""
    sequence_deferred_bytes: MemberBytes | None = None
    """The same from I to W."""
    batch_norms: tuple[str, ...] = ()
    """Full names of its normalizations that may take statistics of batches (`core.job.TrainJob.batch_norm`)."""
    whole_micro_batch: WholeMicroBatch | None = None
    """None: each sample is by itself, so that it does not matter how a batch is cut."""
    frozen_bytes: Bytes = 0
    """Of its parameters' bytes, those that are not trained: without gradients and optimizer state."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.frozen_bytes > self.parameter_bytes:
            raise ValueError(
                f"unit {self.name}: frozen_bytes are part of its parameter_bytes, {self.parameter_bytes}, got "
                f"{self.frozen_bytes}"
            )

    def slices_sequence(self, share: MemberShare) -> bool:
        """Whether a member of a group holds slices of the sequence in it."""
        return share.slices_sequence and len(share.shares) > 1 and self.sequence_activation_bytes is not None

    def work_share(self, share: MemberShare) -> float:
        """Return the part of the unit's computation that falls to a member of a group."""
        if not self.tensor_sums or len(share.shares) == 1:
            return 1.0
        if not self.tensor_pieces:
            return share.part
        return 1.0 - sum(group.work_share * (1.0 - share.of(group.pieces)) for group in self.tensor_pieces)

    def divided_share(self, share: MemberShare) -> float:
        """Return the part that a member has of what is divided in the unit."""
        if not self.tensor_sums or len(share.shares) == 1:
            return 1.0
        return divided_share(self.tensor_pieces, share) if self.tensor_pieces else share.part

    @property
    def trained_bytes(self) -> int:
        """Bytes of its parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def training_flop_per_sample(self) -> float:
        """Operations of a forward and a backward pass, what is computed again not counted."""
        trained = self.trained_bytes / self.parameter_bytes if self.parameter_bytes else 1.0
        return self.forward_flop_per_sample * (1.0 + self.goes_back * (1.0 + trained))

    @property
    def goes_back(self) -> bool:
        """Whether a backward pass comes to it: something is trained in it or in front of it."""
        return not self.outputs or any(tensor.requires_grad for tensor in self.outputs)

    @property
    def cut_bytes_per_sample(self) -> int:
        """Bytes that cross the cut behind this unit for one sample, forward."""
        return sum(tensor.bytes_per_sample for tensor in self.outputs)

    def forward_bytes(self, wire_format: WireFormat) -> int:
        """Return the bytes that cross the cut behind this unit for one sample, forward."""
        return sum(tensor.wire_bytes(wire_format) for tensor in self.outputs)

    def backward_bytes(self, wire_format: WireFormat) -> int:
        """Return the bytes that cross the cut behind this unit for one sample, backward."""
        return sum(tensor.wire_bytes(wire_format) for tensor in self.outputs if tensor.requires_grad)

    @property
    def gradient_bytes_per_sample(self) -> int:
        """Bytes that cross the cut behind this unit for one sample, backward."""
        return sum(tensor.bytes_per_sample for tensor in self.outputs if tensor.requires_grad)


class UnitGraph(Record, where="the model"):
    """Units in topological order."""

    units: tuple[Unit, ...]
    shared_bytes: Mapping[str, int]
    """Bytes of each group of shared parameters."""
    input_bytes_per_sample: Bytes = 0
    """Bytes that enter the first unit."""
    frozen_shared: tuple[str, ...] = ()
    """Groups of shared parameters that are not trained."""
    sums_samples: bool = False
    """Whether the model's own loss is a sum over samples; otherwise it is their mean."""
    left_out: tuple[str, ...] = ()
    """What of the model as its author gave it units do not do (dropout, live batch statistics), a line each."""

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError("a model needs at least one unit")
        unknown = {name for unit in self.units for name in unit.shared} - set(self.shared_bytes)
        if unknown:
            raise ValueError(f"shared parameters without a size: {sorted(unknown)}")
        check_bounds(self)
        parameter_bytes = sum(unit.parameter_bytes for unit in self.units)
        for name, size in (*self.shared_bytes.items(), ("parameters", parameter_bytes)):
            if not _SIZE.holds(size):
                raise ValueError(f"the model: {name} must be {_SIZE} bytes, got {size}")

    def fewest_samples(self, units: range) -> int:
        """Return how many samples units need at once, whose samples depend on each other; 0: they do not."""
        whole = (self.units[index].whole_micro_batch for index in units)
        return max((one.fewest for one in whole if one is not None), default=0)

    def held_parameter_bytes(self, units: Sequence[int], tp_share: MemberShare = ALONE) -> tuple[int, ...]:
        """Return the bytes of parameters of each of consecutive units; those that they share count at the first one.

        A member of a tensor-parallel group holds whole pieces of what is divided in a unit, and all of the rest.
        """
        return self._held(units, tp_share, self.shared_bytes, trained=False)

    def shared_within_bytes(self, units: Sequence[int]) -> int:
        """Return the bytes of parameters that several of some units share."""
        users = Counter(name for unit in units for name in set(self.units[unit].shared))
        return sum(self.shared_bytes[name] for name, count in users.items() if count > 1)

    def held_trained_bytes(self, units: Sequence[int], tp_share: MemberShare = ALONE) -> tuple[int, ...]:
        """Return the same of the parameters that are trained: bytes of gradients, and of what replicas sum."""
        return self._held(units, tp_share, self.trained_shared_bytes, trained=True)

    def gathered_bytes(self, units: Sequence[int], ratio: float, tp_share: MemberShare = ALONE) -> tuple[float, ...]:
        """Return the bytes that each unit is computed with: so many for each byte that is trained, and all others."""
        held, trained = self.held_parameter_bytes(units, tp_share), self.held_trained_bytes(units, tp_share)
        return tuple(whole - (1 - ratio) * own for whole, own in zip(held, trained, strict=True))

    @cached_property
    def trained_shared_bytes(self) -> Mapping[str, int]:
        """Bytes of each group of shared parameters that is trained."""
        return {name: size for name, size in self.shared_bytes.items() if name not in self.frozen_shared}

    def _held(
        self, units: Sequence[int], tp_share: MemberShare, shared_bytes: Mapping[str, int], *, trained: bool
    ) -> tuple[int, ...]:
        seen: set[str] = set()
        found = []
        for unit in (self.units[index] for index in units):
            size = unit.parameter_bytes - trained * unit.frozen_bytes - _bytes_of(unit.shared, seen, shared_bytes)
            for group in unit.tensor_pieces:
                divided = group.parameter_bytes - trained * group.frozen_bytes
                divided -= _bytes_of(group.shared, seen, shared_bytes)
                size -= divided - round(divided * tp_share.of(group.pieces))
            if unit.tensor_sums and not unit.tensor_pieces:
                size = round(size * tp_share.part)
            seen.update(unit.shared)
            found.append(size)
        return tuple(found)

    def held_activation_bytes(self, unit: int, tp_share: MemberShare = ALONE) -> int:
        """Return the bytes that one sample in flight holds of a unit.

        Of a unit that can be divided, a member of a tensor-parallel group holds something whole, and of the rest the
        pieces that it has. Where that was not measured, whole are the input, and for each sum the result and what the
        divided layers read (of the input's size: as a rule a normalization's result; Korthikanti et al., "Reducing
        Activation Recomputation in Large Transformer Models", 2022, section 4.2: the five of a transformer block
        without sequence parallelism and dropout).
        """
        own = self.units[unit]
        size = own.activation_bytes_per_sample
        if len(tp_share.shares) == 1 or not own.tensor_sums:
            return size
        found = own.sequence_activation_bytes if own.slices_sequence(tp_share) else own.member_activation_bytes
        if found is None:
            entering_bytes = self.entering_bytes(unit)
            whole = min(size, entering_bytes + own.tensor_sums * (entering_bytes + own.cut_bytes_per_sample))
            found = MemberBytes(whole_bytes=whole, divided_bytes=size - whole)
        return found.of(own.divided_share(tp_share))

    def stage_held_bytes(self, units: range, tp_share: MemberShare = ALONE, recompute: Collection[int] = ()) -> int:
        """Return the bytes that one sample holds of consecutive units from F to I (or B), each tensor once.

        A cut between two of them belongs to both. Of a recomputed unit only what enters it is held; its output is what
        enters the next one. Between two units with slices of the sequence there are slices only.
        """
        own = {unit: self.held_activation_bytes(unit, tp_share) for unit in units}
        sliced = {unit for unit in units if self.units[unit].slices_sequence(tp_share)}
        inner = {unit for unit in sliced if unit - 1 in sliced}
        for unit in recompute:
            entering_bytes = self.entering_bytes(unit)
            own[unit] = min(own[unit], math.ceil(tp_share.part * entering_bytes) if unit in inner else entering_bytes)
        found = sum(own.values())
        for unit in units[:-1]:
            cut_bytes = self.units[unit].cut_bytes_per_sample
            if unit + 1 in inner:
                found -= sum(min(cut_bytes, own[side]) for side in (unit, unit + 1) if side not in recompute)
            elif unit not in recompute:
                found -= min(cut_bytes, own[unit], own[unit + 1])
        return found

    def stage_deferred_bytes(self, units: range, tp_share: MemberShare = ALONE, recompute: Collection[int] = ()) -> int:
        """Return the bytes that one sample holds of consecutive units from I to W; recomputed ones are done by then."""
        left = [unit for unit in units if unit not in recompute]
        if any(self.units[unit].deferred_bytes_per_sample is None for unit in left):
            whole = self.stage_held_bytes(units, tp_share)
            return whole - sum(self._again_bytes(unit, tp_share) for unit in recompute) if recompute else whole
        return sum(self._deferred_bytes(unit, tp_share) for unit in left)

    def stage_working_bytes(self, units: range, tp_share: MemberShare = ALONE) -> tuple[int, int]:
        """Return what operations of the unit that needs most need, by the sample and besides; divided as it is."""
        own = [(self.units[unit].divided_share(tp_share), self.units[unit]) for unit in units]
        by_sample = max(part * unit.working_bytes_per_sample for part, unit in own)
        return math.ceil(by_sample), math.ceil(max(part * unit.working_bytes for part, unit in own))

    def stage_again_bytes(
        self, units: range, tp_share: MemberShare = ALONE, recompute: Collection[int] = (), *, splits: bool = True
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

    def _again_bytes(self, unit: int, tp_share: MemberShare) -> int:
        return max(0, self.held_activation_bytes(unit, tp_share) - self.entering_bytes(unit))

    def _deferred_bytes(self, unit: int, tp_share: MemberShare) -> int:
        """Return what is held of one unit from I to W; what is not known of a divided one, in proportion to before."""
        own = self.units[unit]
        size = own.deferred_bytes_per_sample or 0
        if len(tp_share.shares) == 1 or not own.tensor_sums or not own.activation_bytes_per_sample:
            return size
        found = own.sequence_deferred_bytes if own.slices_sequence(tp_share) else own.member_deferred_bytes
        if found is not None:
            return found.of(own.divided_share(tp_share))
        return math.ceil(size * self.held_activation_bytes(unit, tp_share) / own.activation_bytes_per_sample)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once."""
        return sum(self.held_parameter_bytes(range(len(self.units))))

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained, shared ones counted once."""
        return sum(self.held_trained_bytes(range(len(self.units))))


def _bytes_of(names: Collection[str], seen: Collection[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in names if name in seen)
