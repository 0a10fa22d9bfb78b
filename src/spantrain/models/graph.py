"""The UnitGraph of a model: cut tensors, bytes and operations, measured on small batches."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.models.build import build_units, empty_unit, example_inputs, example_labels, unit_count
from spantrain.models.catalog import unit_names
from spantrain.models.units import UnitModule

__all__ = ["build_graph"]

_SMALL, _LARGE = 1, 3
"""Batch sizes between which bytes held are compared: what does not grow with the batch is not counted."""


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """What every unit of one class has in common."""

    flop: float
    outputs: tuple[TensorSpec, ...]
    held_bytes: int


def build_graph(spec: ModelSpec, *, dtype: str = "float32") -> UnitGraph:
    """Return the model's units with what crosses each cut and what each unit costs.

    Operations are counted on the meta device: products and convolutions, other work counts as none. Types and
    shapes at the cuts, and the bytes held from F to W, come from a real forward on the CPU, once for each class of
    identical units. Bytes held are what autograd saves, with the unit's inputs and outputs, without parameters.

    Args:
        spec: the model.
        dtype: `float32`, or `bfloat16` for autocast; parameters are float32 either way.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    units: list[Unit] = []
    shared_bytes: dict[str, int] = {}
    costs: dict[str, _Cost] = {}
    inputs = tuple(_tensor_spec(tensor, position) for position, tensor in enumerate(example_inputs(spec, 1)))
    for index in range(unit_count(spec)):
        module = empty_unit(spec, index)
        unit_class = _unit_class(spec, module, inputs)
        if unit_class not in costs:
            costs[unit_class] = _measure(spec, index, inputs, dtype)
        units.append(_unit(module, unit_class, costs[unit_class]))
        shared_bytes |= {group: _bytes(module.get_parameter(local)) for group, local in module.shared.items()}
        inputs = costs[unit_class].outputs
    return UnitGraph(units=tuple(units), shared_bytes=shared_bytes)


def _unit(module: UnitModule, unit_class: str, cost: _Cost) -> Unit:
    return Unit(
        name=module.name,
        unit_class=unit_class,
        parameter_bytes=sum(_bytes(parameter) for parameter in module.parameters()),
        forward_flop_per_sample=cost.flop,
        outputs=cost.outputs,
        activation_bytes_per_sample=cost.held_bytes,
        shared=tuple(sorted(module.shared)),
        tensor_sums=module.tensor_sums,
    )


def _unit_class(spec: ModelSpec, module: UnitModule, inputs: tuple[TensorSpec, ...]) -> str:
    """Name what determines a unit's cost: the model's settings, the modules, and the shapes that go in."""
    parameters = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    settings = sorted((key, _plain(value)) for key, value in spec.config.items())
    text = repr((spec.family, settings, spec.sequence_length, repr(module), parameters, inputs))
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    body = getattr(module, "body", module)
    shape = "x".join(str(size) for tensor in inputs for size in tensor.shape_per_sample)
    return f"{type(body).__name__}[{shape}]-{digest}"


def _plain(value: object) -> object:
    # A configuration that was in a file has lists in the place of tuples.
    return tuple(value) if isinstance(value, list) else value


def _measure(spec: ModelSpec, index: int, inputs: tuple[TensorSpec, ...], dtype: str) -> _Cost:
    with FlopCounterMode(display=False) as counter:
        _forward(spec, empty_unit(spec, index), _tensors(inputs, _SMALL, "meta"))
    module = build_units(spec, [index], seed=0)[0]
    outputs, small = _held_bytes(spec, module, _tensors(inputs, _SMALL, "cpu"), dtype)
    _, large = _held_bytes(spec, module, _tensors(inputs, _LARGE, "cpu"), dtype)
    last = index == unit_count(spec) - 1
    return _Cost(
        flop=float(counter.get_total_flops()) / _SMALL,
        outputs=() if last else tuple(_tensor_spec(tensor, position) for position, tensor in enumerate(outputs)),
        held_bytes=math.ceil((large - small) / (_LARGE - _SMALL)),
    )


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

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        outputs = _forward(spec, module, inputs)
    # Every tensor is alive here, so equal addresses mean one storage.
    storages = [tensor.untyped_storage() for tensor in (*inputs, *saved, *outputs)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}
    return outputs, sum(sizes.values())


def _tensor_spec(tensor: Tensor, position: int) -> TensorSpec:
    return TensorSpec(
        name="hidden" if position == 0 else f"hidden{position}",
        shape_per_sample=tuple(tensor.shape[1:]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes_per_sample=_bytes(tensor) // tensor.shape[0],
        requires_grad=tensor.requires_grad,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
