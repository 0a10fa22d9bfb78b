"""The UnitGraph of a model: cut tensors, bytes and operations, measured on small batches."""

import contextlib
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spantrain.core.precision import check_dtype
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.models.build import (
    build_units,
    empty_unit,
    example_inputs,
    example_labels,
    is_unedited,
    unit_count,
    unit_names,
)
from spantrain.models.held import StorageLog
from spantrain.models.precision import autocast_dtype
from spantrain.models.segment import Segment
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
    deferred_bytes: int


def build_graph(spec: ModelSpec, *, dtype: str = "float32") -> UnitGraph:
    """Return the model's units with what crosses each cut and what each unit costs.

    Operations are counted on the meta device: products and convolutions, other work counts as none. Types and
    shapes at the cuts, and the bytes held from F to W, come from a real forward on the CPU, once for each class of
    identical units. Bytes held are what autograd saves, with the unit's inputs and outputs, without parameters; behind
    I also the gradients that W starts from.

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
    # An unedited model is built whole for each unit that is asked for: all of them at once, then.
    built = build_units(spec, seed=0) if is_unedited(spec) else None
    if built and spec.family == "factory":
        # Imported here: it loads what only users' models need.
        from spantrain.models.any.check import check_units

        check_units(spec, built, seed=0)
    inputs = tuple(
        _tensor_spec(tensor, position, requires_grad=False) for position, tensor in enumerate(example_inputs(spec, 1))
    )
    for index in range(unit_count(spec)):
        module = empty_unit(spec, index)
        unit_class = _unit_class(spec, module, inputs)
        if unit_class not in costs:
            real = built[index] if built else build_units(spec, [index], seed=0)[0]
            costs[unit_class] = _measure(spec, real, module, inputs, dtype)
        units.append(_unit(module, unit_class, costs[unit_class]))
        shared_bytes |= {group: _bytes(module.get_parameter(local)) for group, local in module.shared.items()}
        inputs = costs[unit_class].outputs
    entering_bytes = sum(_bytes(tensor) for tensor in example_inputs(spec, 1))
    return UnitGraph(units=tuple(units), shared_bytes=shared_bytes, input_bytes_per_sample=entering_bytes)


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
        deferred_bytes_per_sample=cost.deferred_bytes,
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
    deferred_bytes = _deferred_bytes(spec, module, _tensors(inputs, _SMALL, "cpu"), dtype)
    return _Cost(
        flop=flop,
        # Every floating-point tensor at a cut has a gradient, if only zeros (`StageExecutor`).
        outputs=()
        if last
        else tuple(
            _tensor_spec(out, number, requires_grad=out.is_floating_point()) for number, out in enumerate(outputs)
        ),
        held_bytes=held_bytes,
        # What did not grow with the batch before I is still there behind it.
        deferred_bytes=max(0, math.ceil(deferred_bytes / _SMALL) - (small - _SMALL * held_bytes)),
    )


def _flop(spec: ModelSpec, module: UnitModule, empty: UnitModule, inputs: tuple[TensorSpec, ...]) -> float:
    """Count operations for one sample: without numbers, or with them where the unit cannot do without."""
    for unit, place in ((empty, "meta"), (module, "cpu")):
        with contextlib.suppress(RuntimeError), FlopCounterMode(display=False) as counter:
            _forward(spec, unit, _tensors(inputs, _SMALL, place))
            return float(counter.get_total_flops()) / _SMALL
    raise AssertionError(f"{module.name} ran when its model was followed, and does not run now")


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


def _deferred_bytes(spec: ModelSpec, module: UnitModule, inputs: tuple[Tensor, ...], dtype: str) -> int:
    """Return the bytes of the distinct storages held behind I, for W; the model's first unit has no I."""
    last, samples = module.name == unit_names(spec)[-1], inputs[0].shape[0]
    labels = example_labels(spec, samples) if last else None
    segment = Segment([module], ends_model=last, autocast_dtype=autocast_dtype(dtype), torch_device=torch.device("cpu"))
    log = StorageLog([*module.parameters(), *module.buffers()])
    with log.watching():
        held, outputs = segment.forward(inputs, labels)
    del inputs
    segment.backward_input(held, tuple(torch.ones_like(output) for output in outputs if output.is_floating_point()))
    del outputs
    log.add(*held.tensors)
    return log.look()


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
