"""The UnitGraph of a model: cut tensors, bytes and operations, measured on small batches."""

import contextlib
import hashlib
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spantrain.core.precision import check_dtype
from spantrain.core.shares import MemberBytes, TensorPieces, divided_share
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.errors import ConfigError
from spantrain.models.build import example_inputs, example_labels, unit_names, unit_source
from spantrain.models.execution.measure import TWO, FlopMeter, held_behind, held_by_two
from spantrain.models.execution.segment import autocast_dtype
from spantrain.models.tensor_parallel.shard import divides_sequence, pieces_of, sums_of
from spantrain.models.units import UnitModule

_SMALL, _LARGE = 1, 3
"""Batch sizes between which bytes held are compared: what does not grow with the batch is not counted."""


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """What every unit of one class has in common."""

    flop: float
    outputs: tuple[TensorSpec, ...]
    held_bytes: int
    deferred_bytes: int
    pieces: tuple[TensorPieces, ...]
    member_held: MemberBytes | None
    member_deferred: MemberBytes | None
    sequence_held: MemberBytes | None
    sequence_deferred: MemberBytes | None
    sums: int


def build_graph(spec: ModelSpec, *, dtype: str = "float32") -> UnitGraph:
    """Return the model's units with what crosses each cut and what each unit costs.

    Operations are counted on the meta device: products and convolutions, other work counts as none. Types and
    shapes at the cuts, and the bytes held from F to W, come from a real forward on the CPU, once for each class of
    identical units. Bytes held are what autograd saves, with the unit's inputs and outputs, without parameters; behind
    I also the gradients that W starts from. What members of a tensor-parallel group hold was measured on two of them.

    Args:
        spec: the model.
        dtype: of `core.precision`; parameters are float32 in any case.

    Raises:
        ValueError: there is no such dtype.
        ConfigError: an unedited model cannot be built or followed, or its samples depend on each other.
    """
    check_dtype(dtype)
    units: list[Unit] = []
    shared_bytes: dict[str, int] = {}
    costs: dict[str, _Cost] = {}
    source = unit_source(spec)
    unit_at, differing = source.to_measure()
    inputs = tuple(
        _tensor_spec(tensor, position, requires_grad=False) for position, tensor in enumerate(example_inputs(spec, 1))
    )
    for index in range(len(source.names)):
        module = source.empty(index)
        unit_class = _unit_class(spec, module, inputs)
        if unit_class not in costs:
            costs[unit_class] = _measure(spec, unit_at(index), module, inputs, dtype)
        units.append(_unit(module, unit_class, costs[unit_class]))
        shared_bytes |= {group: _bytes(module.get_parameter(local)) for group, local in module.shared.items()}
        inputs = costs[unit_class].outputs
    entering_bytes = sum(_bytes(tensor) for tensor in example_inputs(spec, 1))
    return UnitGraph(
        units=tuple(units), shared_bytes=shared_bytes, input_bytes_per_sample=entering_bytes, left_out=differing
    )


def _unit(module: UnitModule, unit_class: str, cost: _Cost) -> Unit:
    return Unit(
        name=module.name,
        unit_class=unit_class,
        parameter_bytes=sum(_bytes(parameter) for parameter in module.parameters()),
        forward_flop_per_sample=cost.flop,
        outputs=cost.outputs,
        activation_bytes_per_sample=cost.held_bytes,
        shared=tuple(sorted(module.shared)),
        tensor_sums=cost.sums,
        deferred_bytes_per_sample=cost.deferred_bytes,
        tensor_pieces=cost.pieces,
        member_activation_bytes=cost.member_held,
        member_deferred_bytes=cost.member_deferred,
        sequence_activation_bytes=cost.sequence_held,
        sequence_deferred_bytes=cost.sequence_deferred,
    )


def _unit_class(spec: ModelSpec, module: UnitModule, inputs: tuple[TensorSpec, ...]) -> str:
    """Name what determines a unit's cost: the model's settings, the modules, and the shapes that go in."""
    parameters = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    settings = sorted((key, _plain(value)) for key, value in spec.config.items())
    text = repr((spec.family, settings, spec.sequence_length, repr(module), parameters, inputs))
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    shape = "x".join(str(size) for tensor in inputs for size in tensor.shape_per_sample)
    return f"{module.class_name}[{shape}]-{digest}"


def _plain(value: object) -> object:
    # A configuration that was in a file has lists in the place of tuples.
    return tuple(value) if isinstance(value, list) else value


def _measure(
    spec: ModelSpec, module: UnitModule, empty: UnitModule, inputs: tuple[TensorSpec, ...], dtype: str
) -> _Cost:
    flop = _flop(spec, module, empty, inputs)
    outputs, small = _held_bytes(spec, module, _tensors(inputs, _SMALL, "cpu"), dtype)
    _, large = _held_bytes(spec, module, _tensors(inputs, _LARGE, "cpu"), dtype)
    last = module.name == unit_names(spec)[-1]
    held_bytes = math.ceil((large - small) / (_LARGE - _SMALL))
    # What did not grow with the batch before I is still there behind it.
    constant_bytes = small - _SMALL * held_bytes
    batch, low = partial(_batch, spec, inputs, last), autocast_dtype(dtype)
    deferred_bytes = held_behind(module, batch, low).backward_input_bytes
    sums = sums_of(empty)
    pieces = pieces_of(empty) if sums else ()
    two = held_by_two(module, batch, low) if pieces else []
    sliced = held_by_two(module, batch, low, sequence_parallel=True) if two and divides_sequence(module) else []
    return _Cost(
        flop=flop,
        # Every floating-point tensor at a cut has a gradient, if only zeros (`StageExecutor`).
        outputs=()
        if last
        else tuple(
            _tensor_spec(out, number, requires_grad=out.is_floating_point()) for number, out in enumerate(outputs)
        ),
        held_bytes=held_bytes,
        deferred_bytes=max(0, math.ceil((deferred_bytes - constant_bytes) / _SMALL)),
        pieces=pieces,
        member_held=_by_member(pieces, [held.forward_bytes - constant_bytes for held in two]),
        member_deferred=_by_member(pieces, [held.backward_input_bytes - constant_bytes for held in two]),
        sequence_held=_by_member(pieces, [held.forward_bytes - constant_bytes for held in sliced]),
        sequence_deferred=_by_member(pieces, [held.backward_input_bytes - constant_bytes for held in sliced]),
        sums=sums,
    )


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


def _batch(spec: ModelSpec, inputs: tuple[TensorSpec, ...], last: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    return _tensors(inputs, _SMALL, "cpu"), example_labels(spec, _SMALL) if last else None


def _flop(spec: ModelSpec, module: UnitModule, empty: UnitModule, inputs: tuple[TensorSpec, ...]) -> float:
    """Count operations for one sample: without numbers, or with them where the unit cannot do without."""
    with contextlib.suppress(RuntimeError), FlopMeter() as meter:
        _forward(spec, empty, _tensors(inputs, _SMALL, "meta"))
        return float(meter.total) / _SMALL
    try:
        with FlopMeter() as meter:
            _forward(spec, module, _tensors(inputs, _SMALL, "cpu"))
    except RuntimeError as error:
        raise ConfigError(
            f"model {spec.name}: {module.name} ran when its model was followed, and does not run on {_SMALL} sample: "
            f"{error}; write its forward so that it takes any number of samples"
        ) from error
    return float(meter.total) / _SMALL


def _tensors(specs: tuple[TensorSpec, ...], samples: int, device: str) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(
            (samples, *spec.shape_per_sample),
            dtype=getattr(torch, spec.dtype),
            device=device,
            requires_grad=spec.requires_grad,
        )
        for spec in specs
    )


def _forward(spec: ModelSpec, module: UnitModule, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a unit; the last one on labels too."""
    if module.name != unit_names(spec)[-1]:
        return tuple(module(*inputs))
    labels = example_labels(spec, inputs[0].shape[0], device=inputs[0].device)
    return (module(*inputs, labels),)


def _held_bytes(
    spec: ModelSpec, module: UnitModule, inputs: tuple[Tensor, ...], dtype: str
) -> tuple[tuple[Tensor, ...], int]:
    """Return a forward's outputs and the bytes of the distinct storages held for its backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in module.buffers()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    low = autocast_dtype(dtype)
    autocast = torch.autocast("cpu", dtype=low, enabled=low is not None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        outputs = _forward(spec, module, inputs)
    # Every tensor is alive here, so equal addresses mean one storage.
    storages = [tensor.untyped_storage() for tensor in (*inputs, *saved, *outputs)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}
    return outputs, sum(sizes.values())


def _tensor_spec(tensor: Tensor, position: int, *, requires_grad: bool) -> TensorSpec:
    return TensorSpec(
        name="hidden" if position == 0 else f"hidden{position}",
        shape_per_sample=tuple(tensor.shape[1:]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes_per_sample=_bytes(tensor) // tensor.shape[0],
        requires_grad=requires_grad,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
