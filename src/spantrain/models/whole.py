"""The unsplit model of a spec: as the transformers library or its author wrote it, and the names of its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from spantrain.core.units import ModelSpec
from spantrain.models.build import empty_unit, example_inputs, unit_count
from spantrain.models.units import parameter_names

_EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A model in one piece, with an example of what goes in."""

    module: nn.Module
    inputs: Mapping[str, torch.Tensor]
    """By the keyword of the module's forward; empty where inputs have no keywords."""


@dataclass(frozen=True, kw_only=True)
class WholeParameter:
    """One parameter of the unsplit model."""

    shape: tuple[int, ...]
    other_names: tuple[str, ...] = field(default=())
    """Of a parameter that several units share: its names in the later ones."""


def whole_parameters(spec: ModelSpec) -> dict[str, WholeParameter]:
    """Return all parameters of a model by name; one that units share has the name that it has in the first of them."""
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for index in range(unit_count(spec)):
        unit = empty_unit(spec, index)
        groups = {local: group for group, local in unit.shared.items()}
        for local, full in parameter_names(unit).items():
            name = first.setdefault(groups[local], full) if local in groups else full
            shapes.setdefault(name, tuple(unit.get_parameter(local).shape))
            if name != full:
                others.setdefault(name, []).append(full)
    return {
        name: WholeParameter(shape=shape, other_names=tuple(others.get(name, ()))) for name, shape in shapes.items()
    }


def whole_buffers(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the buffers that a model is made with, by name."""
    if spec.family == "hf":
        from spantrain.models.tracing.source import load_model

        module = load_model(spec, seed=0, only=()).module
    else:
        module = whole_model(spec, seed=0).module
    return dict(module.named_buffers())


def whole_model(spec: ModelSpec, *, seed: int) -> WholeModel:
    """Build the unsplit model in evaluation mode, on the CPU, with weights of its own under a seed.

    Raises:
        ConfigError: an unedited model cannot be built.
    """
    if spec.family in ("factory", "hf"):
        return _unedited(spec, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _of_catalog(spec)
    (example,) = example_inputs(spec, _EXAMPLES)
    name = "pixel_values" if example.is_floating_point() else "input_ids"
    return WholeModel(module=module.eval(), inputs=_varied({name: example}, module))


def _unedited(spec: ModelSpec, seed: int) -> WholeModel:
    from spantrain.models.tracing.source import load_model

    loaded = load_model(spec, seed=seed)
    batch = loaded.batch
    named = {name: tensor for name, tensor in zip(batch.names, batch.inputs, strict=True) if name is not None}
    complete = len(named) == len(batch.inputs)
    return WholeModel(module=loaded.module, inputs=_varied(named, loaded.module) if complete else {})


def _of_catalog(spec: ModelSpec) -> nn.Module:
    import transformers

    match spec.family:
        case "gpt2":
            from spantrain.models.catalog import gpt2

            module: nn.Module = transformers.GPT2LMHeadModel(gpt2.configuration(spec))
        case "bert":
            from spantrain.models.catalog import bert

            module = transformers.BertForMaskedLM(bert.configuration(spec))
        case "resnet":
            from spantrain.models.catalog import resnet

            module = transformers.ResNetForImageClassification(resnet.configuration(spec))
        case _:
            assert spec.family == "efficientnet", f"no family {spec.family}"
            from spantrain.models.catalog import efficientnet

            module = transformers.EfficientNetForImageClassification(efficientnet.configuration(spec))
    return module


def _varied(inputs: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Return inputs whose numbers differ from each other, so that an output says something of all weights."""
    vocabulary = int(getattr(getattr(module, "config", None), "vocab_size", 2))
    found = {}
    for name, tensor in inputs.items():
        numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
        if tensor.is_floating_point():
            found[name] = torch.sin(numbers.to(tensor.dtype))
        elif name.endswith("input_ids"):
            found[name] = (numbers % vocabulary).to(tensor.dtype)
        else:
            found[name] = tensor
    return found
