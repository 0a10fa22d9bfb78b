"""The UnitGraph of a model: cut tensors, bytes and operations, measured on small batches."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

from spantrain.core.records import Record
from spantrain.core.shares import MemberBytes, TensorPieces, divided_share
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.errors import ConfigError
from spantrain.formats.precision import DTYPES, check_dtype, is_low
from spantrain.formats.tensor_bytes import dtype_name
from spantrain.models.build import compiled_by, example_inputs, example_rows, unit_source
from spantrain.models.execution.measure import TWO, FlopMeter, HeldBehind, held_behind, held_by_two, working_bytes
from spantrain.models.execution.segment import ONLY_CUT, autocast_dtype
from spantrain.models.low_weights import frozen_rounded, with_low_weights
from spantrain.models.statistics import trained_names_of
from spantrain.models.tensor_parallel.shard import divides_sequence, pieces_of, sums_of
from spantrain.models.tracing.factory import told_as_the_models
from spantrain.models.tracing.source import emptied, unreported
from spantrain.models.units import Rows, UnitModule

_Batch = tuple[tuple[Tensor, ...], Rows]

_SMALL, _LARGE = 1, 3
"""Batch sizes between which bytes held are compared: what does not grow with the batch is not counted."""
_LONG_FLOP, _LARGE_BYTES = 2e9, 2**28
"""Operations for a sample, and bytes of parameters, from which units are run without numbers: those would take long."""
_OF_EXPERTS = "_apply_gate"
"""What modules of the library have that route tokens to experts: those without numbers, by another product."""


def build_graph(spec: ModelSpec, *, dtype: str = "float32") -> UnitGraph:
    """Return the model's units with what crosses each cut and what each unit costs.

    Operations are counted on the meta device: products and convolutions, other work counts as none. Types and shapes at
    the cuts, and bytes held from F to W, are those of a run on the CPU, once for each class of identical units; large
    ones have no numbers in it if they can do without (torch's fake tensors). Bytes held are what autograd saves, with
    the unit's inputs and outputs, without parameters; behind I also the gradients that W starts from. What members of a
    tensor-parallel group hold was measured on two of them. What operations need besides, while they run, is the most
    that they allocate in a whole pass, less what is held. float16 is measured as bfloat16, which is as large.

    Args:
        spec: the model.
        dtype: of `formats.precision`.

    Raises:
        ValueError: there is no such dtype.
        ConfigError: an unedited model cannot be built or followed, or its samples depend on each other.
    """
    if check_dtype(dtype) == "float16":
        with contextlib.suppress(ConfigError):  # it may run in float16 alone
            return _in_float16(build_graph(spec, dtype="bfloat16"))
    others = ", ".join(name for name in DTYPES if name != dtype)
    how = f"in {dtype} (give --dtype {others})" if is_low(dtype) else "by itself"
    units, measured = list[Unit](), dict[str, Unit]()
    shared_bytes, frozen_shared = dict[str, int](), set[str]()
    source, example = unit_source(spec), example_rows(spec, 1)
    checked = source.to_measure()
    for index in range(len(source.names)):
        module, entering = source.empty(index), units[-1].outputs if units else ()
        read = _tensor_specs([example[number] for number in module.reads], have_gradients=False)
        unit_class = _unit_class(spec, module, (*entering, *read))
        if unit_class not in measured:
            last = index == len(source.names) - 1
            with told_as_the_models(f"model {spec.name}: {module.name} does not run {how}"):
                measured[unit_class] = _measure(spec, partial(checked.at, index), module, entering, dtype, last)
        found = replace(
            measured[unit_class], name=module.name, unit_class=unit_class, shared=tuple(sorted(module.shared))
        )
        units.append(replace(found, batch_norms=trained_names_of(module), whole_micro_batch=checked.whole.get(index)))
        shared = {group: frozen_rounded(module, dtype).get_parameter(local) for group, local in module.shared.items()}
        shared_bytes |= {group: _bytes(parameter) for group, parameter in shared.items()}
        frozen_shared |= {group for group, parameter in shared.items() if not parameter.requires_grad}
    return UnitGraph(
        units=tuple(units),
        shared_bytes=shared_bytes,
        frozen_shared=tuple(sorted(frozen_shared)),
        input_bytes_per_sample=sum(map(_bytes, example_inputs(spec, 1))),
        sums_samples=checked.sums_samples,
        left_out=checked.left_out,
    )


def _in_float16(graph: UnitGraph) -> UnitGraph:
    """Return a graph of bfloat16 with what crosses its cuts in float16."""
    named = {"bfloat16": "float16"}.get
    rows = [tuple(replace(one, dtype=named(one.dtype, one.dtype)) for one in unit.outputs) for unit in graph.units]
    return replace(graph, units=tuple(replace(unit, outputs=row) for unit, row in zip(graph.units, rows, strict=True)))


def _unit_class(spec: ModelSpec, module: UnitModule, inputs: tuple[TensorSpec, ...]) -> str:
    """Name what determines a unit's cost: the model's settings, the modules, and the shapes that go in."""
    parameters = [
        (name, tuple(parameter.shape), *(() if parameter.requires_grad else ("frozen",)))
        for name, parameter in module.named_parameters()
    ]
    # A configuration that was in a file has lists in the place of tuples.
    config: Mapping[str, object] = spec.config
    settings = sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in config.items())
    more = ("compiled",) if spec.compiled else ()
    text = repr((spec.family, settings, spec.sequence_length, _told(module), parameters, inputs, *more))
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    shape = "x".join(str(size) for tensor in inputs for size in tensor.shape_per_sample)
    return f"{module.class_name}[{shape}]-{digest}"


def _told(module: UnitModule) -> str:
    """Return what modules say of themselves; where one cannot without numbers, of which classes they are."""
    try:
        return repr(module)
    except Exception:  # noqa: BLE001 - whatever code of a user's raises
        return ", ".join(f"{path}: {type(part).__name__}" for path, part in module.named_modules())


class _Measured(Record):
    """What a unit holds and allocates when it is run."""

    small: HeldBehind
    large: HeldBehind
    """Of `_SMALL` and of `_LARGE` samples."""
    working: tuple[int, int]
    """Bytes that operations need besides, with `_SMALL` samples and with twice as many."""
    two: tuple[HeldBehind, ...] = ()
    """By two members of a group."""
    sliced: tuple[HeldBehind, ...] = ()
    """By two that have slices of the sequence."""


def _measure(
    spec: ModelSpec,
    whole: Callable[[], UnitModule],
    empty: UnitModule,
    entering: tuple[TensorSpec, ...],
    dtype: str,
    last: bool,
) -> Unit:
    """Return what every unit of one class has in common; `whole` gives one with numbers."""
    flop, sums, batch = _flop(spec, whole, empty, entering), sums_of(empty), partial(_batch, spec, entering)
    frozen_rounded(empty, dtype)
    pieces = pieces_of(empty) if sums else ()
    parameter_bytes = sum(map(_bytes, empty.parameters()))
    see = partial(_see, dtype=dtype, last=last, divides=bool(pieces))
    is_large = flop >= _LONG_FLOP or parameter_bytes >= _LARGE_BYTES
    seen = _see_without_numbers(empty, batch, see) if is_large and not spec.compiled else None
    if seen is None:
        unit = whole()
        unit.compiled_by = compiled_by(spec, ONLY_CUT)
        seen = see(unit, batch)
    small, large, working = seen.small, seen.large, seen.working
    grown = (large.forward_bytes - small.forward_bytes) / (_LARGE - _SMALL)
    held_bytes = math.ceil(grown if grown >= 0 else large.forward_bytes / _LARGE)  # one packed sequence may hold more
    # What did not grow with the batch before I is still there behind it.
    constant_bytes = small.forward_bytes - _SMALL * held_bytes
    frozen_bytes = sum(_bytes(parameter) for parameter in empty.parameters() if not parameter.requires_grad)
    goes_back = frozen_bytes < parameter_bytes or any(tensor.requires_grad for tensor in entering)
    working_per_sample = max(0, math.ceil((working[1] - working[0]) / _SMALL))
    return Unit(
        name=empty.name,
        unit_class="",
        parameter_bytes=parameter_bytes,
        frozen_bytes=frozen_bytes,
        forward_flop_per_sample=flop,
        # Every floating-point tensor behind what is trained has a gradient, if only zeros (`StageExecutor`).
        outputs=() if last else _tensor_specs(small.outputs, have_gradients=goes_back),
        activation_bytes_per_sample=held_bytes,
        tensor_sums=sums,
        deferred_bytes_per_sample=max(0, math.ceil((small.backward_input_bytes - constant_bytes) / _SMALL)),
        working_bytes_per_sample=working_per_sample,
        working_bytes=max(0, working[0] - _SMALL * working_per_sample),
        tensor_pieces=pieces,
        member_activation_bytes=_by_member(pieces, [held.forward_bytes - constant_bytes for held in seen.two]),
        member_deferred_bytes=_by_member(pieces, [held.backward_input_bytes - constant_bytes for held in seen.two]),
        sequence_activation_bytes=_by_member(pieces, [held.forward_bytes - constant_bytes for held in seen.sliced]),
        sequence_deferred_bytes=_by_member(
            pieces, [held.backward_input_bytes - constant_bytes for held in seen.sliced]
        ),
    )


def _see(unit: UnitModule, batch: Callable[[int], _Batch], *, dtype: str, last: bool, divides: bool) -> _Measured:
    """Run a unit on batches of so many samples; `divides` says whether a group could divide it."""
    low, two, sliced = autocast_dtype(dtype), tuple[HeldBehind, ...](), tuple[HeldBehind, ...]()
    with_low_weights(unit, dtype)
    if divides:
        two = held_by_two(unit, partial(batch, _SMALL), low, ends_model=last)
    if two and divides_sequence(unit):
        sliced = held_by_two(unit, partial(batch, _SMALL), low, ends_model=last, sequence_parallel=True)
    # Behind the copies for two: what is run as a stage has layers of other classes (`models.weight_gradients`).
    small, large = (held_behind(unit, partial(batch, samples), low, ends_model=last) for samples in (_SMALL, _LARGE))
    working = [working_bytes(unit, partial(batch, samples), low, ends_model=last) for samples in (_SMALL, 2 * _SMALL)]
    return _Measured(small=small, large=large, working=(working[0], working[1]), two=two, sliced=sliced)


class _WithoutNumbers(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that know products of a mixture's experts in any type and size, as processors do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if str(func) != "aten._grouped_mm.default":
            return super().__torch_dispatch__(func, types, args, kwargs)
        one, other, ends = args[:3]
        groups = [len(ends)] * (one.dim() == other.dim() == 2) or [len(one)] * (one.dim() == other.dim() == 3)
        return one.new_empty([*groups, one.shape[-2], other.shape[-1]])


def _see_without_numbers(
    empty: UnitModule, batch: Callable[[int], _Batch], see: Callable[[UnitModule, Callable[[int], _Batch]], _Measured]
) -> _Measured | None:
    """Return the same of a unit that has only shapes; None if its code needs numbers, or does something else then."""
    if any(isinstance(part, nn.RNNBase) for part in empty.modules()):
        return None
    mode = _WithoutNumbers(allow_non_fake_inputs=True)

    def without_numbers(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def batch_without(samples: int) -> _Batch:
        with mode:  # members of a group are in a thread of their own
            tensors, rows = batch(samples)
            return tensors, {number: row if is_fake(row) else mode.from_tensor(row) for number, row in rows.items()}

    with contextlib.suppress(Exception), unreported(), mode:
        unit = emptied(empty, without_numbers, buffers=True)
        for experts in (part for part in unit.modules() if hasattr(part, _OF_EXPERTS)):
            config: Any = experts.config
            config._experts_implementation = "grouped_mm"
        return see(unit, batch_without)
    return None


def _by_member(pieces: tuple[TensorPieces, ...], held: list[int]) -> MemberBytes | None:
    """Return what members hold for one sample, from what two of unlike parts hold; None where they have like parts."""
    parts = [divided_share(pieces, share) for share in TWO] if held else [0.0, 0.0]
    if parts[0] == parts[1]:
        return None
    per_part = (held[0] - held[1]) / (parts[0] - parts[1])
    whole_bytes = held[0] - parts[0] * per_part
    return MemberBytes(
        whole_bytes=max(0, math.ceil(whole_bytes / _SMALL)), divided_bytes=max(0, math.ceil(per_part / _SMALL))
    )


def _batch(spec: ModelSpec, entering: tuple[TensorSpec, ...], samples: int, device: str = "cpu") -> _Batch:
    tensors = []
    for one in entering:
        tensor = torch.zeros((samples, *one.shape_per_sample), dtype=getattr(torch, one.dtype), device=device)
        tensors.append(tensor.requires_grad_(one.requires_grad))
    return tuple(tensors), example_rows(spec, samples, device=device)


def _flop(
    spec: ModelSpec, whole: Callable[[], UnitModule], empty: UnitModule, entering: tuple[TensorSpec, ...]
) -> float:
    """Count operations for one sample: without numbers, or with them where the unit cannot do without.

    They are as many in any type, so what comes in is taken to be of float32, as the parameters are. No graph is made: a
    unit may keep what it has computed, and could not be copied then.
    """
    low = ("bfloat16", "float16")
    as_float32 = tuple(replace(one, dtype="float32") if one.dtype in low else one for one in entering)
    with contextlib.suppress(RuntimeError, ConfigError), torch.no_grad(), FlopMeter() as meter:
        empty.run(*_batch(spec, as_float32, _SMALL, "meta"))
        return float(meter.total) / _SMALL
    try:
        with torch.no_grad(), FlopMeter() as meter:
            whole().run(*_batch(spec, as_float32, _SMALL))
    except RuntimeError as error:
        raise ConfigError(
            f"model {spec.name}: {empty.name} ran when its model was followed, and does not run on {_SMALL} sample: "
            f"{error}; write its forward so that it takes any number of samples"
        ) from error
    return float(meter.total) / _SMALL


def _tensor_specs(tensors: Sequence[Tensor], *, have_gradients: bool) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=f"hidden{position or ''}",
            shape_per_sample=tuple(tensor.shape[1:]),
            dtype=dtype_name(tensor.dtype),
            bytes_per_sample=_bytes(tensor) // tensor.shape[0],
            requires_grad=have_gradients and tensor.is_floating_point(),
        )
        for position, tensor in enumerate(tensors)
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
